"""The `merge` stage: one model of several of the same shape. Each is a parent in the family tree, with its licences."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.lineage import environment
from etude.lineage.record import load_record
from etude.lineage.weight_files import INDEX
from etude.models.merge import MergeSettings, Tensors, merging, refuse_unlike, write_merged
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome, Source, Stage, identity_of, resolve_model, source_of
from etude.work import Unit

if TYPE_CHECKING:
    from pathlib import Path


class MergeStage(Stage):
    """Merges the model before it with others."""

    settings = MergeSettings
    needs_model = True
    makes_model = True

    def check(self, settings: MergeSettings) -> None:
        for word in settings.words:
            resolve_model(word)

    def inputs(self, settings: MergeSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the settings, and the other models by content; nothing is random."""
        method = settings.model_dump(mode="json", exclude={"others", "ancestor"})
        return {"settings": method, "models": [identity_of(resolve_model(word)) for word in settings.words]}

    def run(self, settings: MergeSettings, job: Job) -> Outcome:
        """Merge file by file of the model before this stage."""
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

    def show(self, folder: Path) -> list[str]:
        summary = load_record(folder).summary
        return [f"{summary['method']} of {summary['models']} in {folder / MODEL}"]


def _sources(settings: MergeSettings, job: Job) -> list[Source]:
    """Return what goes in: the model before this stage first, the ancestor, if there is one, last."""
    sources = [Source(job.model.folder, job.model.as_parent(), job.model.lineage)]
    for word in settings.words:
        source = source_of(word, job, "weights", sources)
        for other in sources:
            if other.edge.model_digest == source.edge.model_digest:
                raise UserError(f"merge: {word} has the same weights as {other.edge.name}; leave one of them out")
        sources.append(source)
    return sources


def _place_the_rest(source: Path, model: Path, job: Job) -> None:
    """Copy what is not weights from the model before this stage."""
    from etude.run.train import complete_model

    for file in [source / "config.json", *source.glob(INDEX)]:
        shutil.copyfile(file, model / file.name)
    if complete_model(source, model):
        job.work.reporter.say("merge: the MTP heads of the model before it were copied as they are; train them again")
