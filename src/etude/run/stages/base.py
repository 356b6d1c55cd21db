"""The stage that starts a tree: fetch the base, check it, place it in the run with its licence and its facts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from etude.files import link_or_copy, read_json
from etude.lineage.record import LINEAGE_FILE, Parent, load_lineage, load_record
from etude.models.bases import resolve
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from etude.models.fetch import Fetched


class BaseSettings(BaseModel):
    """The base, as the recipe names it."""

    model_config = ConfigDict(extra="forbid")

    base: str


class BaseStage:
    """Places a base into the run."""

    version = 1
    settings = BaseSettings
    makes_model = True
    reads_corpus = False

    def check(self, settings: BaseSettings) -> None:
        """Refuse an unknown base."""
        resolve(settings.base)

    def inputs(self, settings: BaseSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return what decides the base's bytes; chance has no part in it."""
        assert parent_digest is None
        return resolve(settings.base).identity()

    def run(self, settings: BaseSettings, job: Job) -> Outcome:
        """Fetch and check the base, and link its files."""
        from etude.models.fetch import fetch, model_files
        from etude.models.load import weight_files

        fetched = fetch(resolve(settings.base), job.work.cache, job.work.reporter)
        weight_files(fetched.folder)
        for file in model_files(fetched):
            _place(file, job.work.folder / MODEL / file.relative_to(fetched.folder), fetched)
        # A base that Etude itself made carries its tree: ours goes on from there.
        lineages = [load_lineage(fetched.folder)] if (fetched.folder / LINEAGE_FILE).is_file() else []
        heads = [lineage.records[lineage.head] for lineage in lineages]
        return Outcome(
            parents=[
                Parent(name=head.stage, role="weights", record=head.id, model_digest=head.model_digest)
                for head in heads
            ],
            lineages=lineages,
            origin=fetched.origin,
            licence_folders={fetched.origin.name: fetched.folder},
            summary={"base": fetched.origin.name},
        )

    def show(self, folder: Path, console: Console) -> None:
        """Print what the base is."""
        record = load_record(folder)
        config = read_json(folder / MODEL / "config.json")
        licences = sorted({licence.licence or "unknown text" for licence in record.licences}) or ["no licence file"]
        size = sum(file.bytes for file in record.weights.values()) / 1e6
        assert record.origin is not None
        console.print(
            f"base: {record.origin.name} ({config.get('model_type')}, {size:,.0f} MB, {', '.join(licences)}) in {folder / MODEL}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _place(source: Path, target: Path, fetched: Fetched) -> None:
    """Link what only we write, copy what is part of the program, point at what is the user's and may be huge."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if fetched.place == "link":
        link_or_copy(source, target)
    elif fetched.place == "copy":
        shutil.copyfile(source, target)
    else:
        target.symlink_to(source.resolve())
