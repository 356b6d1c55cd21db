"""The game of tests/rl/toy.py on a cluster, for tests that kill its parts.

python -m tests.cluster.toy MODEL FOLDER ADDRESS [SETTING=JSON …]
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

import torch

from etude.cluster.connect import joined
from etude.cluster.stages import ClusterRun
from etude.jsonl import MetricsLog
from etude.models.load import load_tokeniser
from etude.progress import Reporter
from etude.recipe.cluster import ClusterSettings
from etude.rl.settings import RlSettings
from etude.work import Work
from tests.rl.toy import Toy, settings_of

PATIENCE = 3.0  # seconds: an engine that is stopped is found soon
PLACES = ClusterSettings.model_validate(
    {
        "trainer": {"cpus": 2},
        "engines": {"count": 2, "cpus": 1},
        "sandboxes": {"cpus": 2, "pool": 1},
    }
)


def toy_of(model: Path, settings: RlSettings) -> Toy:
    return Toy(load_tokeniser(model), tasks=40, tokens=24, temperature=settings.harness.temperature)


def play(model: Path, folder: Path, settings: RlSettings, places: ClusterSettings = PLACES) -> None:
    """Run to the end, or go on with what is there; the cluster was joined."""
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        work = Work(folder, metrics, Reporter(), folder / "cache")
        make = partial(toy_of, model, settings)
        asyncio.run(ClusterRun(places, PATIENCE).play(make(), make, model, settings, work, seed=0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, out, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    wished = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[4:])}
    with joined(address, print):
        play(where, out, settings_of(processes=True, **wished))
