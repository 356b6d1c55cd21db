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
from etude.recipe.cluster import ClusterSettings, EnginePlaces
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
        vllm = [number for number, each in enumerate(places.engines) if each.kind == "vllm"]

        async def before() -> None:
            """Wait until every vLLM has the first weights: it takes minutes to start, and the game would be over."""
            for log in (folder / "cluster" / f"engine-{number}.log" for number in vllm):
                while not log.exists() or "POST /resume" not in log.read_text():
                    await asyncio.sleep(0.1)

        # A vLLM on few cores computes for seconds without an answer.
        run = ClusterRun(places, 120.0 if vllm else PATIENCE)
        asyncio.run(run.play(make(), make, model, settings, work, 0, before))


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, out, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    given = dict(word.split("=", 1) for word in sys.argv[4:])
    python = given.pop("vllm", "")
    mixed = [EnginePlaces(cpus=1), EnginePlaces(cpus=1, kind="vllm", python=python)] if python else PLACES.engines
    places = PLACES.model_copy(update={"engines": mixed})
    wished = {name: json.loads(value) for name, value in given.items()}
    with joined(address, print):
        play(where, out, settings_of(processes=True, **wished), places)
