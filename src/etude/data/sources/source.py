"""What sources have in common: an open source, its parts, and the files of a repository that workers read later."""

from __future__ import annotations

import os
import posixpath
import re
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from etude.data.codebase import CODE_SUFFIXES
from etude.data.document import Drop, LicenceFile, Part, Raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Contents = Callable[[list[str]], Iterator[bytes | str]]  # from keys: what is behind each, or why it cannot be had

AT_ONCE = 100  # files of one part: git gives them together, and each may have max_bytes
COSTS = {"file": 1000, "commit": 100_000}  # bytes that could be read in the time it takes to find one
USUAL_RATIO = 4  # text to compressed text
TOO_LARGE = "over max_bytes"
MOST_LICENCES = 32_000_000  # bytes of licence texts of one repository that are looked at: more than anybody has
LICENCE = re.compile(r"(.*/)?((?i:((un)?licen[cs]es?|copying)([-_. ][^/]*)?)|LICENSES/[^/]*)")
NO_LICENCE = CODE_SUFFIXES | {".html", ".json", ".png", ".svg", ".toml", ".xml", ".yaml", ".yml"}


class OpenSource(NamedTuple):
    """Where a source lies, in words; its revision, if it has one; and everything in it."""

    location: str
    revision: str | None
    parts: list[Part]


class Entry(NamedTuple):
    """A file that a source lists: its path in the repository, the key it is read by, and why it is not read, if so."""

    path: str
    key: str
    size: int
    fault: str = ""


def entry_of(path: str, key: str, size: int, fault: str, most_bytes: int) -> Entry:
    """Return the entry of a file, with a fault if its name or its size is one."""
    shown = printable(path)
    return Entry(
        shown, key, size, fault or ("name not UTF-8" if shown != path else TOO_LARGE if size > most_bytes else "")
    )


def printable(path: str) -> str:
    """Return a path as Unicode, whatever bytes are in it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def local(path: str) -> Path:
    """Return a path as the user means it; `~nobody` is left as it is, to be found missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - the method raises there


def share_out(
    repository: str, entries: list[Entry], contents: Contents, licences: list[LicenceFile], kind: str = "file"
) -> list[Part]:
    """Return the files of a repository, or its commits, in parts that workers read side by side."""
    parts = []
    for start in range(0, len(entries), AT_ONCE):
        some = entries[start : start + AT_ONCE]
        size = sum(COSTS[kind] + (0 if entry.fault else entry.size) for entry in some)
        read = partial(_read, printable(repository), kind, some, contents)
        parts.append(Part(size, read, partial(list, licences)))
    return parts


def _read(repository: str, kind: str, entries: list[Entry], contents: Contents) -> Iterator[Raw | Drop]:
    """Yield each entry, as a document or as a drop."""
    readable = contents([entry.key for entry in entries if not entry.fault])
    for entry in entries:
        content = entry.fault or next(readable)
        if isinstance(content, str):
            yield Drop(repository, entry.path, "read", content, entry.size)
        else:
            yield Raw(repository, entry.path, content, kind)


def is_licence(path: str) -> bool:
    """Tell by its name whether a file holds a licence: LICENSE.txt, COPYING, or anything in a folder LICENSES."""
    return LICENCE.fullmatch(path) is not None and posixpath.splitext(path)[1].lower() not in NO_LICENCE


def licence_file(path: str, content: bytes) -> LicenceFile:
    """Return a licence text; those in a folder LICENSES speak for the folder around it, as REUSE has it."""
    folder, name = posixpath.split(path)
    return LicenceFile(re.sub("(^|/)LICENSES$", "", folder), name, content.decode("utf-8", "replace"))


def licences_among(entries: list[Entry], contents: Contents) -> list[LicenceFile]:
    """Return the licence texts among the files of a repository."""
    named = [entry for entry in entries if not entry.fault and is_licence(entry.path)]
    totals = accumulate(entry.size for entry in named)
    wanted = [entry for entry, total in zip(named, totals, strict=True) if total <= MOST_LICENCES]
    texts = zip(wanted, contents([entry.key for entry in wanted]), strict=True)
    return [licence_file(entry.path, text) for entry, text in texts if isinstance(text, bytes)]
