"""A folder of files: one repository, or a folder of repositories.

In a git checkout the tracked files count, elsewhere all but those in hidden, installed and built folders. Links are never
followed, so there are no loops and no ways out.
"""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.codebase import git_revision, passed_over, tracked_files, walked
from etude.data.sources.source import TOO_LARGE, OpenSource, entry_of, licences_among, local, printable, share_out
from etude.errors import UserError
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.settings import SourceSettings

FAULTS = {stat.S_IFREG: "", stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder not entered"}


def identify_folder(settings: SourceSettings) -> str:
    """Return a digest of what is listed; files by size and time of change, without reading any."""
    root = _root(settings)
    listed = [path for paths in _repositories(root).values() for path in paths]
    return digest_of(sorted([printable(os.path.relpath(path, root)), *_status(path)] for path in listed))


def open_folder(settings: SourceSettings, most_bytes: int) -> OpenSource:
    """List the files of each repository, and share them out in parts."""
    root = _root(settings)
    parts = []
    for folder, paths in _repositories(root).items():
        entries = []
        for path in sorted(paths):
            name, (fault, size, _) = os.path.relpath(path, folder), _status(path)
            entries.append(entry_of(name, name, size, fault, most_bytes))
        contents = partial(_contents, folder, most_bytes)
        parts += share_out(folder.name, entries, contents, licences_among(entries, contents))
    return OpenSource(printable(f"folder {settings.folder}"), git_revision(root), parts)


def _root(settings: SourceSettings) -> Path:
    root = local(settings.folder or "").resolve()
    if not root.is_dir():
        raise UserError(f"source {settings.name!r}: there is no folder {settings.folder!r} (looked in {Path.cwd()})")
    return root


def _repositories(root: Path) -> dict[Path, list[Path]]:
    """Return what lies in each repository.

    A folder of repositories has nothing but folders in it, or checkouts; what lies loose beside those is its own.
    """
    tracked = tracked_files(root)
    top = sorted(root.iterdir())
    folders = [path for path in top if path.is_dir()]
    of_repositories = len(folders) == len(top) or any(os.path.lexists(folder / ".git") for folder in folders)
    if tracked or os.path.lexists(root / ".git") or not of_repositories:
        return {root: tracked or list(walked(root))}
    entered = {folder: tracked_files(folder) or list(walked(folder)) for folder in folders if not passed_over(folder)}
    return entered | {root: [path for path in top if path not in entered]}


def _status(path: Path) -> tuple[str, int, int]:
    """Return why a path is not read, if so; else its size and time of change."""
    try:
        about = path.lstat()
    except OSError:  # it vanished meanwhile, or its folder gives no more than names
        return "unreadable", 0, 0
    fault = FAULTS.get(stat.S_IFMT(about.st_mode), "a special file")
    return (fault, 0, 0) if fault else ("", about.st_size, about.st_mtime_ns)


def _contents(root: Path, most_bytes: int, names: list[str]) -> Iterator[bytes | str]:
    """Read each file, in bounded memory even if it has grown since it was listed."""
    for name in names:
        try:
            with (root / name).open("rb") as file:
                content = file.read(most_bytes + 1)
        except OSError:
            yield "unreadable"
        else:
            yield content if len(content) <= most_bytes else TOO_LARGE
