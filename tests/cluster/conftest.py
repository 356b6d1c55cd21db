"""A real Ray cluster on this machine: a head and two more raylets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would be written into the home folder

ROOT = Path(__file__).parents[2]


ATTEMPTS = 6  # a node gives up after 15 s if its own helpers have not begun by then, which no setting changes

USUAL = {"num_gpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Start nodes one after the other, in whatever process of whatever session of tests on this machine."""
    with (Path(tempfile.gettempdir()) / f"etude-tests-ray-{os.getuid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add_node(to: Any, **resources: Any) -> None:
    """Start one more node, and the head as the first; on a busy machine Ray's own patience may be too short."""
    for attempt in range(ATTEMPTS):
        try:
            with alone():
                to.add_node(wait=False, **{**USUAL, **resources})
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            to.wait_for_nodes(timeout=300)
            return


def started(nodes: int, cores: int) -> Any:
    """Start a cluster; its head also answers drivers from elsewhere (`client`, an address ray://…)."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made.client = f"ray://127.0.0.1:{port}"
    try:
        for number in range(nodes):
            add_node(made, num_cpus=cores, **({} if number else {"ray_client_server_port": port}))
    except Exception:
        made.shutdown()
        raise
    return made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of three nodes with three cores each, one of them with two GPUs, as Ray believes."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])  # actors import what tests define
    os.environ["OMP_NUM_THREADS"] = "1"
    made = started(nodes=2, cores=3)
    add_node(made, num_cpus=3, num_gpus=2)
    yield made
    made.shutdown()
    os.environ["PYTHONPATH"] = before
