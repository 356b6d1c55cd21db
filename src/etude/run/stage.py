"""What a stage is: settings, the inputs that decide its result, and the work.

Every stage lives in `run/stages/`, one file each, and is listed there in STAGES. The runner does what all have in common:
folders, reuse, digests, licences, records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel
    from rich.console import Console

    from etude.lineage.record import DataUse, Lineage, Origin, Parent, Record
    from etude.work import Work


@dataclass(frozen=True)
class Model:
    """A finished model that a stage starts from."""

    folder: Path
    record: Record
    lineage: Lineage


@dataclass(frozen=True)
class Job:
    """One stage to do."""

    name: str
    work: Work
    parent: Model | None
    seed: int
    corpus: Path | None = None  # the run's own, for stages that read it


@dataclass(frozen=True)
class Outcome:
    """What a stage tells about its work, for the record. Its artefacts lie in the work folder."""

    parents: list[Parent] = field(default_factory=list)
    lineages: list[Lineage] = field(default_factory=list)  # of the parents that have one
    origin: Origin | None = None
    licence_folders: dict[str, Path] = field(default_factory=dict)  # of ancestors other than the job's parent, by name
    data: list[DataUse] = field(default_factory=list)
    device: str | None = None
    summary: dict[str, float | int | str | None] = field(default_factory=dict)


class Stage(Protocol):
    """One kind of stage."""

    @property
    def version(self) -> int:
        """A number to raise when the same inputs would give another result: finished work is then done again."""
        ...

    @property
    def settings(self) -> type[BaseModel]:
        """The model of its settings in a recipe."""
        ...

    @property
    def makes_model(self) -> bool:
        """Whether it turns its parent into a child, or into a report."""
        ...

    @property
    def reads_corpus(self) -> bool:
        """Whether the run's corpus, if there is one, decides its result."""
        ...

    def check(self, settings: Any) -> None:
        """Raise UserError for what can be seen to be wrong before anything is done, such as a missing folder."""
        ...

    def inputs(self, settings: Any, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return everything that decides the result besides the parent's weights, as JSON-like values."""
        ...

    def run(self, settings: Any, job: Job) -> Outcome:
        """Do the work in `job.work.folder`."""
        ...

    def show(self, folder: Path, console: Console) -> None:
        """Print what a finished stage achieved, in a few lines."""
        ...
