"""Documents, drops (a document left out, with step and reason), and helpers that all sources share.

Everything that a source lists ends as a kept document or as a `Drop`. The manifest asserts that the two add up (`SourceEntry` counts
both, for a unit of work and for a whole source).
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from etude.data.codebase import CODE_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Contents = Callable[[list[str]], Iterator[bytes | str]]  # from keys: what is behind each, or why it cannot be had

T = TypeVar("T")
UNKNOWN = "unknown"  # a licence that could not be determined


@dataclass(slots=True)
class Document:
    """One text and where it came from. Filters may change `text` and fill in what they find out."""

    repository: str  # what is held out as a whole: `toolz-1.2.0`, a git repository, or for loose rows the row itself
    path: str  # inside the repository; for a commit its id
    text: str
    kind: str = "file"  # file, commit or row
    language: str = ""  # tag of the library `identify`: python, markdown, plain-text, …
    licence: str = UNKNOWN  # SPDX expression
    # What duplicates are compared by, if not by the text: the repair of one function is one in any surroundings.
    identity: str = ""
    evidence: str = ""  # for the licence: spdx-tag, header, text-hash, classifier, metadata, declared


@dataclass(frozen=True, slots=True)
class Raw:
    """A document as its source gives it."""

    repository: str
    path: str
    content: bytes
    kind: str = "file"
    licence: str | None = None  # what the source itself says of this one (a column), if it does


@dataclass(frozen=True, slots=True)
class Drop:
    """A document that is left out: where, why, and the beginning of it for looking at."""

    repository: str
    path: str
    step: str
    reason: str
    size: int  # bytes
    excerpt: str = ""


@dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads: a package, some hundred files, some thousand rows. Picklable."""

    size: int  # about how many bytes it holds, for progress and for sharing work out
    read: Callable[[], Iterator[Raw | Drop]]  # all it holds, in a fixed order: each entry once, as a document or a drop
    licences: Callable[[], dict[str, bytes]] = dict  # by path: texts that speak for all in their folders, and PKG-INFO
    archive: str = ""  # path of the archive it is, if it is one


class Samples:
    """At most `most` drops for each step and reason, to look at, each as a dictionary.

    Which ones is decided by a hash of their names, not by when they came: the same for any number of workers.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._chosen: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)

    def offer(self, drop: dict[str, Any]) -> None:
        """Keep a drop if it is among the chosen ones of its reason."""
        chosen = self._chosen[f"{drop['step']}: {drop['reason']}"]
        place = hashlib.blake2b(f"{drop['repository']}\0{drop['path']}".encode(errors="replace")).hexdigest()
        insort(chosen, (place, drop), key=lambda entry: entry[0])
        del chosen[self.most :]

    def all(self) -> list[dict[str, Any]]:
        """Return what was kept, by reason."""
        return [drop for reason in sorted(self._chosen) for _, drop in self._chosen[reason]]


def in_groups(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield groups of neighbours of at most `most` together; a larger one stands alone."""
    group: list[T] = []
    room = most
    for item in items:
        if group and size_of(item) > room:
            yield group
            group, room = [], most
        group.append(item)
        room -= size_of(item)
    if group:
        yield group


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
    own_fault = "name not UTF-8" if shown != path else TOO_LARGE if size > most_bytes else ""
    return Entry(shown, key, size, fault or own_fault)


def printable(path: str) -> str:
    """Return a path as Unicode, whatever bytes are in it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def local(path: str) -> Path:
    """Return a path as the user means it; `~nobody` is left as it is, to be found missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - the method raises there


def share_out(
    repository: str, entries: list[Entry], contents: Contents, licences: dict[str, bytes], kind: str = "file"
) -> list[Part]:
    """Return the files of a repository, or its commits, in parts that workers read side by side."""
    parts = []
    for start in range(0, len(entries), AT_ONCE):
        some = entries[start : start + AT_ONCE]
        size = sum(COSTS[kind] + (0 if entry.fault else entry.size) for entry in some)
        read = partial(_read, printable(repository), kind, some, contents)
        parts.append(Part(size, read, partial(dict, licences)))
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


def licences_among(entries: list[Entry], contents: Contents) -> dict[str, bytes]:
    """Return the licence texts among the files of a repository, by path."""
    named = [entry for entry in entries if not entry.fault and is_licence(entry.path)]
    totals = accumulate(entry.size for entry in named)
    wanted = [entry for entry, total in zip(named, totals, strict=True) if total <= MOST_LICENCES]
    texts = zip(wanted, contents([entry.key for entry in wanted]), strict=True)
    return {entry.path: text for entry, text in texts if isinstance(text, bytes)}
