"""A folder of files: one repository, or a folder of repositories.

In a git checkout the tracked files count, elsewhere all but those in hidden, installed and built folders. Links are never
followed, so there are no loops and no ways out.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.codebase import SKIPPED_FOLDERS, git_revision, tracked_files
from etude.data.sources.opened import Entry, FilesPart, OpenSource, digest_of_stats, entry_of, over
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.settings import SourceSettings

FAULTS = {stat.S_IFREG: "", stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder not entered"}


def identify_folder(settings: SourceSettings) -> str:
    """Return a digest of what is listed, by size and time of change."""
    root = _root(settings)
    return digest_of_stats(root, [path for paths in _repositories(root).values() for path in paths])


def open_folder(settings: SourceSettings, most_bytes: int) -> OpenSource:
    """List the files of each repository, and share them out in parts."""
    root = _root(settings)
    parts: list[FilesPart] = []
    for folder, paths in _repositories(root).items():
        entries = tuple(_entry(path, folder, most_bytes) for path in sorted(paths))
        parts += FolderPart(str(folder), folder.name, most_bytes, entries).with_licences().shared_out()
    return OpenSource(f"folder {root}", git_revision(root), [*parts])


def _root(settings: SourceSettings) -> Path:
    root = Path(settings.folder or "").expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"source {settings.name!r}: there is no folder {settings.folder!r} (looked in {Path.cwd()})")
    return root


def _repositories(root: Path) -> dict[Path, list[Path]]:
    """Return what lies in each repository; a folder with nothing but folders in it is one of repositories."""
    tracked = tracked_files(root)
    top = sorted(root.iterdir())
    if tracked or (root / ".git").exists() or not all(path.is_dir() for path in top):
        return {root: tracked or list(_walked(root))}
    entered = {folder: tracked_files(folder) or list(_walked(folder)) for folder in top if not _passed(folder)}
    return entered | {root: [folder for folder in top if folder not in entered]}


def _passed(folder: Path) -> bool:
    return folder.name in SKIPPED_FOLDERS or folder.name.startswith(".") or folder.is_symlink()


def _walked(root: Path) -> Iterator[Path]:
    """Yield what lies below a folder; one that is not or cannot be entered stands for all that is in it."""
    closed: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=closed.append):
        passed = [name for name in folders if _passed(Path(folder, name))]
        folders[:] = [name for name in folders if name not in passed]
        yield from (Path(folder, name) for name in [*names, *passed])
    yield from (Path(error.filename) for error in closed)


def _entry(path: Path, root: Path, most_bytes: int) -> Entry:
    about = path.lstat()
    fault = FAULTS.get(stat.S_IFMT(about.st_mode), "a special file")
    return entry_of(os.path.relpath(path, root), str(path), 0 if fault else about.st_size, fault, most_bytes)


class FolderPart(FilesPart):
    """Some files of a folder."""

    def contents(self, keys: list[str]) -> Iterator[bytes | str]:
        """Read each file, in bounded memory even if it grows meanwhile."""
        for key in keys:
            try:
                with Path(key).open("rb") as file:
                    content = file.read(self.most_bytes + 1)
            except OSError:
                yield "unreadable"
            else:
                yield content if len(content) <= self.most_bytes else over(self.most_bytes)
