"""What engine and trainer are told when they are started: one file, the same for both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etude.files import read_json, write_json
from etude.rl.settings import RlSettings

JOB = "job.json"
LEDGER, WISH = "ledger.jsonl", "reward_weights.json"
PLACES = ("model", "folder", "socket")


@dataclass(frozen=True)
class RlJob:
    """One run."""

    model: Path  # the folder of the weights at its start: version 0
    folder: Path  # of the run; absolute
    socket: Path  # where the engine listens; short, as the system's names of sockets are
    settings: RlSettings
    seed: int

    @property
    def exchange(self) -> Path:
        """Return the folder of batches and reports."""
        return self.folder / "exchange"

    @property
    def weights(self) -> Path:
        """Return the folder of the WeightStore."""
        return self.folder / "weights"

    @property
    def trainer(self) -> Path:
        """Return the folder of the trainer's checkpoints."""
        return self.folder / "trainer"

    @property
    def result(self) -> Path:
        """Return the folder of the trained model."""
        return self.folder / "model"

    def save(self) -> Path:
        """Write it into the run's folder, and return where."""
        told = {name: str(getattr(self, name)) for name in PLACES}
        write_json(self.folder / JOB, {**told, "settings": self.settings.model_dump(mode="json"), "seed": self.seed})
        return self.folder / JOB


def load_job(path: Path) -> RlJob:
    """Read what `save` wrote."""
    told = read_json(path)
    places = {name: Path(told[name]) for name in PLACES}
    return RlJob(**places, settings=RlSettings(**told["settings"]), seed=told["seed"])
