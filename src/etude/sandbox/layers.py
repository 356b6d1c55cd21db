"""Layers: folders that sandboxes put above one another and never change.

What a layer holds belongs to the user as whom the workload runs, so that it may write over it. A name that has gone is
a character device 0/0, which is what the kernel's overlay takes for it and which anybody may make.

What a sandbox has changed: what was written above its layers, compared with the layers. No kernel involved.

The keeper tells what lies in the upper layer, and for each folder of it all names now seen there. A name that the layers have and
the folder no longer shows has gone: so the kernel's own marks, which differ by version and privilege, need not be understood.
A folder that was only passed through, and a file written with what it already held, are no differences.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.sandbox import isolate
from etude.sandbox.box import Entry, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:  # the mark for what has gone
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
        if not below.there:  # a path of an agent's may be thousands of folders deep
            break
    return below


def differences(layers: tuple[Path, ...], told: Iterable[tuple[dict[str, Any], bytes]]) -> list[Entry]:
    """Return how the workspace differs from the layers, sorted by path."""
    entries = []
    for header, content in told:
        path, kind, mode = checked(header["path"]), header["kind"], header["mode"]
        below = lookup(layers, path)
        if kind == "folder":
            if path and (below.found is None or not below.folders or stat.S_IMODE(below.found.st_mode) != mode):
                entries.append(Entry(path, "folder", 0, mode))
            gone = below.names() - set(header["names"])
            entries += [Entry(f"{path}/{name}" if path else name, "gone") for name in gone]
        elif kind == "other":
            entries.append(Entry(path, "other", 0, mode))
        elif kind in FORMATS and not below.same(kind, mode, content):
            entries.append(Entry(path, kind, len(content), 0o777 if kind == "link" else mode, content))
    return sorted(entries, key=lambda entry: entry.path)


def prepare(source: Path, target: Path) -> int:
    """Copy a tree into a new layer, times and links kept; return how many special files (sockets, devices, …) were left out."""
    left_out = 0
    target.mkdir(parents=True)
    for folder, folders, files in os.walk(source):
        inside = target / os.path.relpath(folder, source)
        for name in [*folders, *files]:
            path, copy = os.path.join(folder, name), inside / name  # noqa: PTH118
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                copy.symlink_to(os.readlink(path))  # noqa: PTH115
            elif stat.S_ISDIR(mode):
                copy.mkdir()
            elif stat.S_ISREG(mode):
                shutil.copyfile(path, copy)
            else:
                left_out += 1
    _finish(source, target)
    return left_out


def _finish(source: Path, target: Path) -> None:
    """Set owners, modes and times, a folder's after those of what is in it."""
    owner = isolate.owner()
    for folder, folders, files in os.walk(target, topdown=False):
        origin = source / os.path.relpath(folder, target)
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]:  # noqa: PTH114, PTH118
            _adopt(os.path.join(folder, name), os.lstat(origin / name), owner)  # noqa: PTH118
        _adopt(folder, origin.stat(), owner)


def _adopt(path: str, origin: os.stat_result, owner: tuple[int, int]) -> None:
    os.chown(path, *owner, follow_symlinks=False)
    if not stat.S_ISLNK(origin.st_mode):
        os.chmod(path, plain_mode(origin.st_mode))  # noqa: PTH101
    os.utime(path, ns=(origin.st_atime_ns, origin.st_mtime_ns), follow_symlinks=False)


def plain_mode(mode: int) -> int:
    """Return a mode without set-id bits, and with all its owner needs to read and change it: a layer must be readable."""
    return mode & 0o777 | (0o700 if stat.S_ISDIR(mode) else 0o600)


def write_layer(folder: Path, entries: Iterable[Entry], layers: tuple[Path, ...]) -> Path:
    """Write differences from layers as a new one. What is neither file, link nor folder does not live on; it leaves a gap.

    Folders on the way to a difference cover those of the layers below, so they are given the same modes.
    """
    folder.mkdir(parents=True)
    owner = isolate.owner()
    os.chown(folder, *owner)
    for entry in entries:
        path = folder / entry.path
        above = [each for each in path.parents if each.is_relative_to(folder) and not each.exists()]
        for missing in reversed(above):
            missing.mkdir()
            below = lookup(layers, str(missing.relative_to(folder))).found
            missing.chmod(plain_mode(below.st_mode if below else stat.S_IFDIR | 0o755))
            os.chown(missing, *owner)
        content = entry.content or b""
        if entry.kind == "file":
            path.write_bytes(content)
            path.chmod(plain_mode(stat.S_IFREG | entry.mode))
        elif entry.kind == "link":
            path.symlink_to(os.fsdecode(content))
        elif entry.kind == "folder":
            path.mkdir()
            path.chmod(plain_mode(stat.S_IFDIR | entry.mode))
        else:
            _write_gap(path)
            continue
        os.chown(path, *owner, follow_symlinks=False)
    return folder


def _write_gap(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError as error:
        refused = "this file system or kernel refuses the mark for a removed file"
        raise UserError(f"cannot write {path}: {refused}; choose another folder") from error
