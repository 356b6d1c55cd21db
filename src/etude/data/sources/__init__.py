"""Where documents come from: a folder, a git repository, packages, tables, a dataset of the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.data.document import OpenSource
from etude.data.sources.package import open_pypi
from etude.data.sources.repository import commit_of, identify_folder, open_folder, open_git, shown
from etude.data.sources.table import identify_tables, open_tables
from etude.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

__all__ = ["OpenSource", "identify_source", "open_source"]


def open_source(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch what is not on this machine, and list what there is. Documents over `most_bytes` are listed, not read."""
    try:
        if settings.folder:
            source = open_folder(settings, most_bytes)
        elif settings.git:
            source = open_git(settings, most_bytes, cache, reporter)
        elif settings.pypi:
            source = open_pypi(settings, most_bytes, cache, reporter)
        else:
            source = open_tables(settings, most_bytes, cache, reporter)
    except UserError:
        reporter.check_stop()  # Ctrl-C reaches git and pip as well: then their failure is no news
        raise
    if not source.parts:
        raise UserError(f"source {settings.name!r} holds no files: {source.location} is empty; fill or remove it")
    return source


def identify_source(settings: SourceSettings) -> dict[str, Any]:
    """Return what changes when the content of a source does, without fetching it or reading all of it."""
    if settings.folder:
        return {"folder": identify_folder(settings)}
    if settings.git:
        return {"git": shown(settings.git), "commit": commit_of(settings)}
    if settings.pypi:
        return {"pypi": list(dict.fromkeys(settings.pypi))}
    return identify_tables(settings)
