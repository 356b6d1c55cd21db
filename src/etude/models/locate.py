"""Which model a word means: a run's or a model's folder, a known base, or a hub id, fetched if it is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lineage.tree import find_model
from etude.models.bases import resolve

if TYPE_CHECKING:
    from pathlib import Path

    from etude.lineage.record import Origin
    from etude.models.bases import Base
    from etude.progress import Reporter


def is_run(base: Base) -> bool:
    """Say whether a word means a run's or a stage's folder, whose model lies deeper."""
    return base.place == "folder" and not (base.folder / "config.json").is_file()


def locate(word: str, cache: Path | None, reporter: Reporter) -> tuple[str, Path, Origin | None]:
    """Return what to call the model, its folder, and where it came from if it was not made here."""
    from etude.models.fetch import default_cache, fetch

    base = resolve(word)
    if is_run(base):
        return base.name, find_model(base.folder), None
    fetched = fetch(base, cache.absolute() if cache is not None else default_cache(), reporter)
    return base.name, fetched.folder, fetched.origin
