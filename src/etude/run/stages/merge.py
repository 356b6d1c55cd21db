"""The `merge` stage: one model of several of the same shape. Each is a parent in the family tree, with its licences."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import digest_of_files, fsync_tree
from etude.lineage import environment
from etude.lineage.record import LINEAGE_FILE, Parent, load_lineage, load_record
from etude.lineage.tree import find_model
from etude.models.bases import resolve
from etude.models.load import INDEX, digest_files
from etude.models.merge import MergeSettings
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome
from etude.run.stages.training import carry_heads, copy_side_files
from etude.work import Unit

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from etude.lineage.record import Lineage
    from etude.models.bases import Base


@dataclass(frozen=True)
class Source:
    """A model that goes into a merge."""

    folder: Path
    edge: Parent
    lineage: Lineage | None


class MergeStage:
    """Merges the model before it with others."""

    version = 1
    settings = MergeSettings
    makes_model = True
    reads_corpus = False

    def check(self, settings: MergeSettings) -> None:
        """Refuse unknown models."""
        for word in settings.words:
            _resolve(word)

    def inputs(self, settings: MergeSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the settings, and the other models by content; chance has no part in it."""
        if parent_digest is None:
            raise UserError("merge needs a model before it; set `base` in the recipe, or put a stage before it")
        found = settings.model_dump(mode="json", exclude={"others", "ancestor"})
        return {"settings": found, "models": [_identity(_resolve(word)) for word in settings.words]}

    def run(self, settings: MergeSettings, job: Job) -> Outcome:
        """Merge file by file of the model before this stage."""
        from etude.models.merge import Tensors, merging, refuse_unlike, write_merged

        sources = _sources(settings, job)
        opened = [Tensors(source.folder) for source in sources]
        for other in opened[1:]:
            refuse_unlike(opened[0], other)
        model = job.work.folder / MODEL
        merged = merging(settings, opened)
        units = [Unit(file.name, file, file.stat().st_size) for file in opened[0].files]
        for unit in job.work.pending("merging", units, "B"):
            began = time.perf_counter()
            write_merged(unit.item, model / unit.key, merged)
            job.work.metrics.put(unit.key, device_seconds=round(time.perf_counter() - began, 3))
        _place_the_rest(sources[0].folder, model, job)
        return Outcome(
            parents=[source.edge for source in sources],
            lineages=[source.lineage for source in sources if source.lineage],
            licence_folders={source.edge.name: source.folder for source in sources[1:]},
            device=environment.device_name("cpu"),
            summary={"method": settings.method, "models": ", ".join(source.edge.name for source in sources)},
        )

    def show(self, folder: Path, console: Console) -> None:
        """Print what was merged."""
        summary = load_record(folder).summary
        told = f"{summary['method']} of {summary['models']} in {folder / MODEL}"
        console.print(told, highlight=False, soft_wrap=True)


def _resolve(word: str) -> Base:
    """Return which model a word means; of a run or a stage, its model."""
    base = resolve(word)
    if base.place == "folder" and not (base.folder / "config.json").is_file():
        return resolve(str(find_model(base.folder)))
    return base


def _identity(base: Base) -> dict[str, object]:
    """Return a model by its content where a record tells it, so that it may be moved."""
    if base.place == "folder" and (base.folder / LINEAGE_FILE).is_file():
        lineage = load_lineage(base.folder)
        return {"content": lineage.records[lineage.head].content_digest}
    return base.identity()


def _sources(settings: MergeSettings, job: Job) -> list[Source]:
    """Return what goes in: the model before this stage first, the ancestor, if there is one, last."""
    assert job.parent is not None
    record = job.parent.record
    edge = Parent(name=record.stage, role="weights", record=record.id, model_digest=record.model_digest)
    found = [Source(job.parent.folder, edge, job.parent.lineage)]
    for word in settings.words:
        source = _source(word, job, found)
        for known in found:
            if known.edge.model_digest == source.edge.model_digest:
                raise UserError(f"merge: {word} has the very weights of {known.edge.name}; leave one of them out")
        found.append(source)
    return found


def _source(word: str, job: Job, before: list[Source]) -> Source:
    from etude.models.fetch import fetch

    base, taken = _resolve(word), [source.edge.name for source in before]
    folder = fetch(base, job.work.cache, job.work.reporter).folder
    name = base.name if base.name not in taken else f"{base.name}-{len(taken) + 1}"
    files = sorted(folder.glob("*.safetensors"))
    digests = digest_files(files, folder, job.work.reporter, f"{name}: hashing weights")
    digest = digest_of_files({file: found.sha256 for file, found in digests.items()})
    lineage = load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    if lineage and lineage.records[lineage.head].model_digest != digest:
        raise UserError(f"merge: the weights in {folder} are not those that its {LINEAGE_FILE} tells of; restore them")
    trees = [source.lineage for source in before if source.lineage]  # one may have it as its base
    known = {record.model_digest: key for tree in trees for key, record in tree.records.items()}
    record = lineage.head if lineage else known.get(digest)
    return Source(folder, Parent(name=name, role="weights", record=record, model_digest=digest), lineage)


def _place_the_rest(source: Path, model: Path, job: Job) -> None:
    """Copy what is not weights from the model before this stage."""
    from etude.models.mtp_heads import keep_apart

    for file in [source / "config.json", *source.glob(INDEX)]:
        shutil.copyfile(file, model / file.name)
    copy_side_files(source, model)
    if carry_heads(source, model):
        job.work.reporter.say("merge: the MTP heads of the model before it came along untrained; train them again")
    keep_apart(model)
    fsync_tree(model)
