"""Layers: folders that sandboxes put above one another and never change.

What a layer holds belongs to the user as whom the workload runs, so that it may write over it. A name that has gone is
a character device 0/0, which is what the kernel's overlay takes for it and which anybody may make.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.sandbox import isolate
from etude.sandbox.diff import lookup

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from etude.sandbox.box import Entry


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
        for missing in reversed(
            [above for above in path.parents if above.is_relative_to(folder) and not above.exists()]
        ):
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
        raise UserError(
            f"cannot write {path}: this file system or kernel refuses the mark for a removed file; choose another folder"
        ) from error
