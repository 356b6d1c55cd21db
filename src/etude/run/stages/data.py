"""The stage that builds the corpus: `[data]` in a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.build import Build
from etude.data.filters.contamination import read_tasks
from etude.data.settings import DataSettings
from etude.data.sources import identify_source
from etude.errors import UserError
from etude.files import digest_of_files, files_below, sha256_file
from etude.lineage import environment
from etude.lineage.record import DataUse
from etude.models.load import choose_device
from etude.report.corpus import shown, write_report
from etude.run.stage import Ahead, Job, Outcome, Stage
from etude.tasks.repairs import Repairs, benchmark_packages

if TYPE_CHECKING:
    from rich.console import RenderableType

    from etude.data.manifest import Manifest


class DataStage(Stage):
    """Builds the corpus of a run."""

    version = 3
    settings = DataSettings

    def check(self, settings: DataSettings) -> None:
        for source in settings.source:
            identify_source(source)
        read_tasks(_tasks(settings))
        benchmark_packages(_tasks(settings))
        for folder in _tokeniser(settings):
            if not folder.is_dir():
                named = settings.tokeniser.source
                raise UserError(f'data.tokeniser.source {named!r} is neither "base" nor "train" nor a folder')

    def check_order(self, settings: DataSettings, ahead: Ahead) -> None:
        if not ahead.made_by and settings.tokeniser.source == "base":
            raise UserError('data.tokeniser needs a base; set `base` in the recipe, or data.tokeniser.source = "train"')
        if settings.replay and settings.replay.source == "self":
            if not ahead.made_by:
                raise UserError("data.replay needs a base; set `base` in the recipe")
            if ahead.context and (length := settings.replay.length) >= ahead.context:
                fits = f"does not fit the base's context of {ahead.context}"
                raise UserError(f"data.replay.length {length} {fits}; lower it")

    def inputs(self, settings: DataSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the sources by identity, the tasks and the tokeniser by content, and the settings."""
        chosen = settings.model_dump(mode="json", exclude={"workers", "seed"})
        for source in chosen["source"]:
            if source["kind"] == "files":
                del source["kind"], source["repair"]  # they came later: a corpus of before is still what it was
        return {
            "settings": chosen,
            "sources": [identify_source(source) for source in settings.source],
            "files": [_digest(path) for path in [*_tasks(settings), *_tokeniser(settings)]],
            "seed": _seed(settings, seed),
        }

    def run(self, settings: DataSettings, job: Job) -> Outcome:
        seed, named = _seed(settings, job.seed), benchmark_packages(_tasks(settings))
        base = job.parent.folder if job.parent else None
        manifest = Build(settings, job.work, seed, base, lambda source: Repairs(source.repair, seed, named)).run()
        write_report(job.work.folder, job.work.folder, in_run=True)
        teachers = [job.model] if any(source.generated_by for source in manifest.sources) else []
        return Outcome(
            parents=[model.as_parent("teacher") for model in teachers],
            lineages=[model.lineage for model in teachers],
            data=_data_uses(manifest),
            device=environment.device_name(choose_device("auto").type) if teachers else None,
            summary={
                "tokens": sum(source.tokens["train"] for source in manifest.sources),
                "heldout_tokens": sum(source.tokens["heldout"] for source in manifest.sources),
                "documents": sum(source.kept for source in manifest.sources),
                "corpus": manifest.digest,
            },
        )

    def show(self, folder: Path) -> list[RenderableType]:
        return shown(folder, folder)


def _tasks(settings: DataSettings) -> list[Path]:
    return [Path(name).expanduser() for name in settings.contamination.tasks]


def _tokeniser(settings: DataSettings) -> list[Path]:
    """Return the folder of a tokeniser that is neither the base's nor trained on the corpus."""
    named = settings.tokeniser.source
    return [] if named in {"base", "train"} else [Path(named).expanduser()]


def _seed(settings: DataSettings, seed: int) -> int:
    """Return the corpus's own seed, so that runs that differ in theirs can share it; or the run's."""
    return seed if settings.seed is None else settings.seed


def _digest(path: Path) -> str:
    files = [path] if path.is_file() else files_below(path)
    return digest_of_files({str(file.relative_to(path)): sha256_file(file) for file in files})


def _data_uses(manifest: Manifest) -> list[DataUse]:
    uses = []
    for source in manifest.sources:
        about = {"source": source.location, "files": source.kept, "bytes": source.kept_bytes, "left_out": source.drops}
        same = source.model_dump(include={"name", "revision", "digest", "licences"})
        uses.append(DataUse.model_validate({**same, **about, "tokens": source.tokens["train"]}))
    return uses
