"""A real Ray cluster on this machine: a head and two more raylets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would be written into the home folder

ROOT = Path(__file__).parents[2]


def started(nodes: int, cores: int) -> Any:
    """Start a cluster; on a busy machine Ray's own patience may be too short."""
    from ray.cluster_utils import Cluster

    for attempt in range(3):
        made = Cluster()
        try:
            for _ in range(nodes):
                made.add_node(num_cpus=cores, num_gpus=0, object_store_memory=80_000_000, include_dashboard=False)
        except Exception:
            made.shutdown()
            if attempt == 2:
                raise
        else:
            return made
    raise AssertionError


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of three nodes with three cores each, one of them with two GPUs, as Ray believes."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])  # actors import what tests define
    os.environ["OMP_NUM_THREADS"] = "1"
    made = started(nodes=2, cores=3)
    made.add_node(num_cpus=3, num_gpus=2, object_store_memory=80_000_000, include_dashboard=False)
    yield made
    made.shutdown()
    os.environ["PYTHONPATH"] = before
