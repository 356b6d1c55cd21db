"""What a stage is: settings, the inputs that decide its result, and the work.

Every kind of stage is a class in `run/stages/`, one file each, listed there in STAGES. The runner does what all have in
common: folders, reuse, digests, licences, records.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from etude.data.codebase import Codebase, git_revision
from etude.errors import UserError
from etude.files import digest_of_files, sha256_file
from etude.lineage.record import LINEAGE_FILE, DataUse, Lineage, Origin, Parent, Record, load_lineage
from etude.lineage.tree import find_model
from etude.models.bases import Base, is_run, resolve
from etude.models.fetch import fetch
from etude.models.load import digest_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from pydantic import BaseModel
    from rich.console import RenderableType

    from etude.work import Work

Role = Literal["weights", "compared", "teacher"]


@dataclass(frozen=True)
class Model:
    """A finished model that a stage starts from."""

    folder: Path
    record: Record
    lineage: Lineage

    def as_parent(self, role: Role = "weights", name: str = "") -> Parent:
        """Return the edge of the family tree from a child to this model."""
        record = self.record
        return Parent(name=name or record.stage, role=role, record=record.id, model_digest=record.model_digest)


@dataclass(frozen=True)
class Job:
    """One stage to run."""

    name: str
    work: Work
    parent: Model | None
    seed: int
    corpus: Path | None = None  # the run's own, for stages that read it
    benchmarks: tuple[Path, ...] = ()  # the run's own so far, for stages that read them

    @property
    def model(self) -> Model:
        """The parent, which a stage with `needs_model` always has."""
        assert self.parent is not None
        return self.parent


@dataclass(frozen=True)
class Ahead:
    """What is known before anything runs of what a stage will get; None: it is not known yet."""

    corpus: Any = None  # settings of the run's own, if it has one
    made_by: tuple[str, ...] = ()  # the stages that make the model it starts from
    changed_by: tuple[str, ...] = ()  # the stages after it that make another
    context: int | None = None  # of that model
    tokens: Path | None = None  # a folder with its tokeniser
    heads: tuple[int, bool] | bool | None = (
        None  # whether that model has MTP heads; (depth, shared) of those a stage made
    )


@dataclass(frozen=True)
class Outcome:
    """What a stage reports for its record. Its artefacts are in the work folder."""

    parents: list[Parent] = field(default_factory=list)
    lineages: list[Lineage] = field(default_factory=list)  # of the parents that have one
    origin: Origin | None = None
    licence_folders: dict[str, Path] = field(default_factory=dict)  # of ancestors other than the job's parent, by name
    data: list[DataUse] = field(default_factory=list)
    corpus: Record | None = None  # of the corpus that was trained on
    device: str | None = None
    summary: dict[str, float | int | str | None] = field(default_factory=dict)


class Stage:
    """One kind of stage."""

    version = 1  # to be raised when the same inputs give another result: finished work is then done again
    settings: type[BaseModel]
    needs_model = False  # whether it is refused as the first stage of a recipe without a base
    makes_model = False  # else it makes a report
    reads_corpus = False  # whether the run's corpus, if there is one, decides its result
    reads_benchmarks = False  # whether the results of the benchmarks before it do

    def check(self, settings: Any) -> None:
        """Raise UserError for what can be seen to be wrong before any stage runs, such as a missing folder."""

    def check_order(self, settings: Any, ahead: Ahead) -> None:
        """Raise UserError for what is seen to be wrong by the stages before it: `check` sees its own settings only."""

    def leaves(self, settings: Any, ahead: Ahead) -> Ahead:  # noqa: ARG002 - for those that change more
        """Return what is known of the model after it, if it makes one."""
        return ahead

    def inputs(self, settings: Any, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return everything that decides the result besides the parent's model, as JSON-like values."""
        raise NotImplementedError

    def run(self, settings: Any, job: Job) -> Outcome:
        """Do the work in `job.work.folder`."""
        raise NotImplementedError

    def show(self, folder: Path) -> Iterable[RenderableType]:
        """Return the results of a finished stage in a few lines, or as a table."""
        raise NotImplementedError


def file_used(path: Path, name: str, licences: dict[str, int] | None = None) -> DataUse:
    """Return a file as data of a record."""
    content = {"digest": sha256_file(path), "files": 1, "bytes": path.stat().st_size, "left_out": {}}
    about = {"name": name, "source": f"file {path.absolute()}", "revision": None, "licences": licences or {}}
    return DataUse.model_validate(about | content)


def code_used(folder: Path, code: Codebase, licences: dict[str, int] | None = None) -> DataUse:
    """Return a folder of source code as data of a record."""
    content = {"digest": code.digest, "files": len(code.files), "bytes": code.bytes, "left_out": dict(code.left_out)}
    about = {"name": "code", "source": f"folder {folder.absolute()}", "licences": licences or {}}
    return DataUse.model_validate({**about, "revision": git_revision(folder), **content})


def free_gpu_memory() -> None:
    """Give a GPU's memory back: the stages after this one may work in processes of their own."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def lineage_in(folder: Path) -> Lineage | None:
    """Return the family tree that a model's folder carries, if Etude made it."""
    return load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None


@dataclass(frozen=True)
class Source:
    """Another model that a stage reads besides its parent."""

    folder: Path
    edge: Parent
    lineage: Lineage | None


def fetch_source(base: Base, job: Job, role: Role, taken: Collection[str]) -> Source:
    """Fetch a model and hash its weights; its name is numbered if another one has it."""
    folder = fetch(base, job.work.cache, job.work.reporter).folder
    names = (f"{base.name}-{number}" if number > 1 else base.name for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    files = digest_files(folder.glob("*.safetensors"), folder, job.work.reporter, f"{name}: hashing weights")
    digest = digest_of_files({file: each.sha256 for file, each in files.items()})
    lineage = lineage_in(folder)
    edge = Parent(name=name, role=role, record=lineage.head if lineage else None, model_digest=digest)
    return Source(folder, edge, lineage)


def resolve_model(word: str) -> Base:
    """Return which model a word means; of a run or a stage, its model."""
    base = resolve(word)
    return resolve(str(find_model(base.folder))) if is_run(base) else base


def identity_of(base: Base) -> dict[str, object]:
    """Return a model by its content where a record has it, so that the model may be moved."""
    lineage = lineage_in(base.folder) if base.place == "folder" else None
    return {"content": lineage.records[lineage.head].content_digest} if lineage else base.identity()


def source_of(word: str, job: Job, role: Role, before: list[Source]) -> Source:
    """Fetch the model that a word means, to be a parent beside those `before` it: with its record, if any of their trees has one."""
    source = fetch_source(resolve_model(word), job, role, [each.edge.name for each in before])
    digest, lineage = source.edge.model_digest, source.lineage
    if lineage and lineage.records[lineage.head].model_digest != digest:
        wrong = f"the weights in {source.folder} are not those its {LINEAGE_FILE} names"
        raise UserError(f"{job.name}: {wrong}; restore them")
    trees = [each.lineage for each in before if each.lineage]  # one may have it as its base
    known = {record.model_digest: key for tree in trees for key, record in tree.records.items()}
    edge = source.edge.model_copy(update={"record": source.edge.record or known.get(digest)})
    return Source(source.folder, edge, lineage)
