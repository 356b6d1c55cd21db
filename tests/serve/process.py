"""A server in a process of its own, to be killed: `python -m tests.serve.process PORT HELD_AT DRAIN`; it prints its port."""

from __future__ import annotations

import signal
import sys

from etude.inference.http import Limits, bind, server_of
from etude.serve.app import build_app
from etude.serve.process import ModelCard
from tests import tiny
from tests.serve.scripted import Scripted


def serve(port: int, held_at: int, drain: int) -> None:
    """Tell the port; hold the policy at a token, if it is not -1, until SIGUSR1."""
    policy = Scripted(tiny.tokeniser(), "import os, return left")
    policy.hold_at = None if held_at < 0 else held_at
    signal.signal(signal.SIGUSR1, lambda *_: policy.release())
    limits = Limits(drain=drain)
    with bind("127.0.0.1", port) as address:
        address.listen()
        sys.stdout.write(f"{address.getsockname()[1]}\n")
        sys.stdout.flush()
        server_of(build_app(policy, policy.tokeniser, ModelCard("tiny"), limits), limits).run(sockets=[address])


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
