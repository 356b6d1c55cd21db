"""Between layers and a container: what they show together as a tar, and a tar of the workspace as `diff.differences` reads it."""

from __future__ import annotations

import os
import tarfile
from typing import IO, TYPE_CHECKING, Any

from etude.sandbox.diff import Below

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

KINDS = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link", tarfile.REGTYPE: "file"}
BLOCK = 4096


def pack_layers(layers: Iterable[Path], file: IO[bytes]) -> int:
    """Write what the layers show as a tar; return the bytes that takes in memory."""
    held = 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as out:
        for path, place in _shown(Below(tuple(layers)), ""):
            out.inodes = {}  # type: ignore[attr-defined]  # two names of one file in a layer are two files
            out.add(place, path, recursive=False)
            held += (place.lstat().st_size // BLOCK + 2) * BLOCK
    return held


def _shown(below: Below, prefix: str) -> Iterator[tuple[str, Path]]:
    for name in sorted(below.names()):
        child = below.child(name)
        yield prefix + name, child.file or child.folders[0]
        yield from _shown(child, f"{prefix}{name}/")


def told(packed: IO[bytes]) -> list[tuple[dict[str, Any], bytes]]:
    """Return what a tar of a workspace holds, folders with the names in them. Without content: a file too large to be told."""
    found: list[tuple[dict[str, Any], bytes]] = [({"path": "", "kind": "folder", "mode": 0}, b"")]
    names: dict[str, list[str]] = {"": []}
    with tarfile.open(fileobj=packed, mode="r|") as members:
        for member in members:
            folder, _, name = member.name.rpartition("/")
            names[folder].append(name)
            kind = KINDS.get(member.type, "other")
            header: dict[str, Any] = {"path": member.name, "kind": kind, "mode": member.mode}
            file = members.extractfile(member) if kind == "file" else None
            found.append((header, file.read() if file else os.fsencode(member.linkname)))
            if kind == "folder":
                names[member.name] = []
    for seen, _ in found:
        if seen["kind"] == "folder":
            seen["names"] = names[seen["path"]]
    return found
