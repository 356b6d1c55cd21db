"""One rank of a stage's training as a process of its own; torch.distributed's variables say which.

python -m etude.cluster.rank TRAINING.json

The first rank writes metrics, progress and results into the stage's folder, which all nodes see, as it does on one machine. Asked to
end (SIGTERM) it stops after a step with a checkpoint, and tells the others.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import Interrupted
from etude.files import read_json, write_json
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.rl.processes import as_child
from etude.run.folder import METRICS, PROGRESS
from etude.run.runner import SESSION, command_line
from etude.run.stages import STAGES
from etude.run.stages.training import TrainingStage
from etude.work import Work

if TYPE_CHECKING:
    from etude.run.train import Training

FILE = "training.json"


def save_training(training: Training, cache: Path) -> Path:
    """Write what a rank must know, and return where."""
    places = {name: str(path) if (path := getattr(training, name)) else None for name in ("folder", "parent", "corpus")}
    told = {"kind": training.kind, "settings": training.settings.model_dump(mode="json"), "seed": training.seed}
    write_json(training.folder / FILE, {**told, **places, "cache": str(cache)})
    return training.folder / FILE


def load_training(path: Path) -> tuple[Training, Path]:
    """Read what `save_training` wrote."""
    from etude.run.train import Training

    told: dict[str, Any] = read_json(path)
    settings = STAGES[told["kind"]].settings.model_validate(told["settings"], strict=False)
    corpus = Path(told["corpus"]) if told["corpus"] else None
    made = Training(told["kind"], settings, Path(told["folder"]), Path(told["parent"]), corpus, told["seed"])
    return made, Path(told["cache"])


def main() -> None:
    """Take part in the training of a file."""
    from etude.training.distributed import join

    training, cache = load_training(Path(sys.argv[1]))
    world, asked = join(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    stage = STAGES[training.kind]
    assert isinstance(stage, TrainingStage)
    try:
        if not world.leads:
            stage.train(training, world, None)
            return
        with MetricsLog(training.folder / METRICS) as metrics:
            number = sum(1 for _ in metrics.rows(SESSION))
            if f"plan/{number:04d}" in metrics:  # ranks were lost: this is one more attempt
                metrics.put(f"{SESSION}{number + 1:04d}", command=command_line())
            reporter = Reporter()
            reporter.listener = lambda state: write_json(training.folder / PROGRESS, state)
            reporter.check_stop = lambda: _check(asked)
            stage.train(training, world, Work(training.folder, metrics, reporter, cache))
    except Interrupted as wish:
        sys.exit(128 + wish.signal_number)


def _check(asked: list[int]) -> None:
    if asked:
        raise Interrupted(asked[0])


if __name__ == "__main__":
    as_child(main)
