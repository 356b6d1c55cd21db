"""What a sandbox has changed: what was written above its layers, compared with the layers. No kernel involved.

The keeper tells what lies in the upper layer, and for each folder of it all names now seen there. A name that the layers have and
the folder no longer shows has gone: so the kernel's own marks, which differ by version and privilege, need not be understood.
A folder that was only passed through, and a file written with what it already held, are no differences.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.sandbox.box import Entry, Kind, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


def is_whiteout(found: os.stat_result) -> bool:
    """Whether a layer says by this that what lies below it has gone."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


@dataclass(frozen=True)
class Below:
    """One path as the layers show it together: a folder of several, or one file, or nothing."""

    folders: tuple[Path, ...] = ()
    file: Path | None = None
    found: os.stat_result | None = field(default=None, compare=False)  # of the uppermost

    def child(self, name: str) -> Below:
        """Return what lies under a name in this folder. No link is followed."""
        folders: list[Path] = []
        first = None
        for folder in self.folders:
            path = folder / name
            try:
                found = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if is_whiteout(found):
                break
            if not stat.S_ISDIR(found.st_mode):
                return Below(tuple(folders), None, first) if folders else Below((), path, found)
            first = first or found
            folders.append(path)
        return Below(tuple(folders), None, first)

    def names(self) -> set[str]:
        """Return the names in this folder."""
        every = {name for folder in self.folders for name in os.listdir(folder)}  # noqa: PTH208 - names that are no text
        return {name for name in every if self.child(name).there}

    @property
    def there(self) -> bool:
        """Whether the layers have anything here."""
        return bool(self.folders) or self.file is not None

    def same(self, kind: str, mode: int, content: bytes) -> bool:
        """Whether a file or link is what the layers have."""
        if self.file is None or self.found is None or stat.S_IFMT(self.found.st_mode) != FORMATS.get(kind):
            return False
        if kind == "link":
            return os.fsencode(self.file.readlink()) == content
        if stat.S_IMODE(self.found.st_mode) != mode or self.found.st_size != len(content):
            return False
        return self.file.read_bytes() == content


FORMATS = {"file": stat.S_IFREG, "link": stat.S_IFLNK}
KINDS: tuple[Kind, ...] = ("file", "link", "folder", "other")


def checked(path: str) -> str:
    """Return a path from inside, which must lead nowhere but into the workspace."""
    if path and any(part in {"", ".", ".."} for part in path.split("/")):
        raise SandboxError(f"the sandbox named an impossible path: {path!r}")
    return path


def lookup(layers: Iterable[Path], path: str) -> Below:
    """Return what the layers have at a path."""
    below = Below(tuple(layers))
    for part in path.split("/") if path else []:
        below = below.child(part)
    return below


def differences(layers: tuple[Path, ...], told: Iterable[tuple[dict[str, Any], bytes]]) -> list[Entry]:
    """Return how the workspace differs from the layers, sorted by path."""
    return sorted(_differences(layers, told), key=lambda entry: entry.path)


def _differences(layers: tuple[Path, ...], told: Iterable[tuple[dict[str, Any], bytes]]) -> Iterator[Entry]:
    for header, content in told:
        path, kind, mode = checked(header["path"]), header["kind"], header["mode"]
        below = lookup(layers, path)
        if kind == "folder":
            if path and (below.found is None or not below.folders or stat.S_IMODE(below.found.st_mode) != mode):
                yield Entry(path, "folder", 0, mode)
            for name in below.names() - set(header["names"]):
                yield Entry(f"{path}/{name}" if path else name, "gone")
        elif kind == "other":
            yield Entry(path, "other", 0, mode)
        elif kind in KINDS and not below.same(kind, mode, content):
            yield Entry(path, kind, len(content), 0o777 if kind == "link" else mode, content)
