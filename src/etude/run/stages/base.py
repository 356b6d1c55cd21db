"""The stage that starts a tree: fetch the base, check it, place it in the run with its licence and its facts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from etude.files import link_or_copy, read_json
from etude.lineage.record import load_record
from etude.models.bases import resolve
from etude.models.fetch import Fetched, fetch, model_files
from etude.models.load import weight_files
from etude.models.shape import heads_shape, model_shape
from etude.run.folder import MODEL
from etude.run.stage import Ahead, Job, Model, Outcome, Stage, lineage_in


class BaseSettings(BaseModel, extra="forbid"):
    """The base, as the recipe names it."""

    base: str


class BaseStage(Stage):
    """Places a base into the run."""

    settings = BaseSettings
    makes_model = True

    def check(self, settings: BaseSettings) -> None:
        if (base := resolve(settings.base)).place == "folder":
            weight_files(base.folder)

    def leaves(self, settings: BaseSettings, ahead: Ahead) -> Ahead:
        """Return what the base's config or its known facts say, without fetching it."""
        base = resolve(settings.base)
        if base.place in {"folder", "shipped"}:
            folder = Path(base.where)
            heads = heads_shape(folder) is not None
            return replace(ahead, context=model_shape(folder).context, heads=heads, tokens=folder)
        return replace(ahead, context=base.known.context if base.known else None)

    def inputs(self, settings: BaseSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        return resolve(settings.base).identity()

    def run(self, settings: BaseSettings, job: Job) -> Outcome:
        fetched = fetch(resolve(settings.base), job.work.cache, job.work.reporter)
        weight_files(fetched.folder)
        for file in model_files(fetched):
            _place(file, job.work.folder / MODEL / file.relative_to(fetched.folder), fetched)
        lineage = lineage_in(fetched.folder)  # of a base that Etude itself made: the tree goes on from there
        made = [Model(fetched.folder, lineage.records[lineage.head], lineage)] if lineage else []
        return Outcome(
            parents=[model.as_parent() for model in made],
            lineages=[model.lineage for model in made],
            origin=fetched.origin,
            licence_folders={fetched.origin.name: fetched.folder},
            summary={"base": fetched.origin.name},
        )

    def show(self, folder: Path) -> list[str]:
        record = load_record(folder)
        family = read_json(folder / MODEL / "config.json").get("model_type")
        licences = sorted({licence.licence or "unknown text" for licence in record.licences}) or ["no licence file"]
        size = sum(file.bytes for file in record.weights.values()) / 1e6
        about = f"{family}, {size:,.0f} MB, {', '.join(licences)}"
        return [f"base: {record.summary['base']} ({about}) in {folder / MODEL}"]


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
