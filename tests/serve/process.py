"""A server in a process of its own, to be killed."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from etude.serve.app import build_app
from etude.serve.card import ModelCard
from etude.serve.limits import Limits
from etude.serve.run import bind, server_of
from tests import tiny
from tests.serve.scripted import Scripted


def serve(told: Connection, port: int, held_at: int | None, drain: int) -> None:
    """Tell the port; hold the policy at a token until SIGUSR1."""
    policy = Scripted(tiny.tokeniser(), "import os, return left")
    policy.hold_at = held_at
    signal.signal(signal.SIGUSR1, lambda *_: policy.release())
    limits = Limits(drain=drain)
    with bind("127.0.0.1", port) as address:
        address.listen()
        told.send(address.getsockname()[1])
        server_of(build_app(policy, policy.tokeniser, ModelCard("tiny"), limits), limits).run(sockets=[address])
