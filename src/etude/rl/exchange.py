"""What orchestrator and trainer hand each other: batches one way, reports the other, as files in a folder.

A file appears whole or not at all and never changes. So either side may be killed at any moment, or be on another machine that
shares the folder, and the other only sees that nothing new comes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from etude.files import read_json, write_text

if TYPE_CHECKING:
    from pathlib import Path

STOP = "stop"
OBSERVED = "trainer.json"  # beside the traces of a group: the trainer's log-prob of each of their sampled tokens, and which it masked


@dataclass(frozen=True)
class TrainedEpisode:
    """An episode to learn from."""

    file: str  # its trace, relative to the run's folder
    reward: float  # all parts, weighted


@dataclass(frozen=True)
class TrainedGroup:
    """Episodes of one task, to be compared with each other."""

    group: int
    task: str
    episodes: tuple[TrainedEpisode, ...]


@dataclass(frozen=True)
class Batch:
    """What one step learns from."""

    step: int  # from 1
    groups: tuple[TrainedGroup, ...]


@dataclass(frozen=True)
class Report:
    """What one step did."""

    step: int
    version: int  # of the weights published after it
    metrics: dict[str, float]  # flat; NaN is left out


class Exchange:
    """The folder. Both sides open their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("batches", "reports", "again"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def put_batch(self, batch: Batch) -> None:
        """Give a step to the trainer; putting the same again does nothing."""
        _put(self.folder / "batches" / _name(batch.step), asdict(batch))

    def batch(self, step: int) -> Batch | None:
        """Return the batch of a step, if it is there."""
        payload = _get(self.folder / "batches" / _name(step))
        return TypeAdapter(Batch).validate_python(payload) if payload else None

    def put_report(self, report: Report) -> None:
        """Say that a step is trained and published. One that a kill made the trainer do again is kept apart: it was spent again."""
        path = self.folder / "reports" / _name(report.step)
        if path.exists():
            before = sum(1 for _ in (self.folder / "again").glob("*.json"))
            path = self.folder / "again" / f"{before:04d}-{report.step:08d}.json"
        _put(path, asdict(report))

    def report(self, step: int) -> Report | None:
        """Return the report of a step, if it is there."""
        payload = _get(self.folder / "reports" / _name(step))
        return Report(**payload) if payload else None

    def spent_again(self) -> list[Report]:
        """Return the reports of steps that were done again after a kill."""
        return [Report(**read_json(path)) for path in sorted((self.folder / "again").glob("*.json"))]

    def stop(self) -> None:
        """Tell the trainer that no more batches will come."""
        write_text(self.folder / STOP, "")

    @property
    def stopped(self) -> bool:
        """Whether no more batches will come."""
        return (self.folder / STOP).exists()


def episode_file(group: int, episode: int) -> str:
    """Return where the trace of an episode lies, relative to the run's folder."""
    return f"episodes/{group:06d}/{episode:03d}.json"


def _name(step: int) -> str:
    return f"{step:08d}.json"


def _put(path: Path, value: dict[str, Any]) -> None:
    if not path.exists():
        write_text(path, json.dumps(value))


def _get(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None  # a file never goes away
