"""What sources have in common: an open source, and the files of a repository as entries that a worker reads later."""

from __future__ import annotations

import os
import posixpath
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from etude.data.codebase import CODE_SUFFIXES
from etude.data.document import Drop, LicenceFile, Raw
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from etude.data.document import Part

CHUNK = 32_000_000  # bytes that one worker reads at a time
MOST_LICENCES = 32_000_000  # bytes of licence texts of one repository that are looked at: more than anybody has
LICENCE = re.compile(r"(.*/)?((?i:((un)?licen[cs]es?|copying)([-_. ][^/]*)?)|LICENSES/[^/]*)")
NO_LICENCE = CODE_SUFFIXES | {".html", ".json", ".png", ".svg", ".toml", ".xml", ".yaml", ".yml"}


@dataclass(frozen=True)
class OpenSource:
    """Where a source lies, in words; its revision, if it has one; and everything in it."""

    location: str
    revision: str | None
    parts: list[Part]


@dataclass(frozen=True)
class Entry:
    """A file that a source lists: its path in the repository, the key it is read by, and why it is not read, if so."""

    path: str
    key: str
    size: int
    fault: str = ""


def entry_of(path: str, key: str, size: int, fault: str, most_bytes: int) -> Entry:
    """Return the entry of a file, with a fault if its name or its size is one."""
    shown = printable(path)
    fault = fault or ("name not UTF-8" if shown != path else over(most_bytes) if size > most_bytes else "")
    return Entry(shown, key, size, fault)


def printable(path: str) -> str:
    """Return a path as Unicode, whatever bytes are in it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def over(most_bytes: int) -> str:
    """Return the reason to leave out what is too large."""
    return f"over {most_bytes} bytes"


def is_licence(path: str) -> bool:
    """Tell by its name whether a file holds a licence: LICENSE.txt, COPYING, or anything in a folder LICENSES."""
    return LICENCE.fullmatch(path) is not None and posixpath.splitext(path)[1].lower() not in NO_LICENCE


def licence_file(path: str, content: bytes | str) -> LicenceFile:
    """Return a licence text; those in a folder LICENSES speak for the folder around it, as REUSE has it."""
    folder, name = posixpath.split(path)
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    return LicenceFile(re.sub("(^|/)LICENSES$", "", folder), name, text)


def runs_of(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return the indices of `sizes` in runs of about `most` in all."""
    pairs = enumerate(accumulate(sizes))
    return [[index for index, _ in run] for _, run in groupby(pairs, lambda pair: (pair[1] - 1) // most)]


def digest_of_stats(root: Path, paths: Iterable[Path]) -> str:
    """Return a digest that changes when a file does, without reading any: of paths, sizes and times of change."""
    stats = [(printable(os.path.relpath(path, root)), path.lstat()) for path in paths]
    return digest_of(sorted([name, about.st_size, about.st_mtime_ns] for name, about in stats))


@dataclass(frozen=True)
class FilesPart(ABC):
    """Files of one repository; with all the licence texts of that repository, wherever they lie."""

    root: str
    repository: str
    most_bytes: int
    entries: tuple[Entry, ...]
    licences: tuple[LicenceFile, ...] = ()

    kind = "file"
    overhead = 1000  # bytes that could be read in the time it takes to find and open one

    @property
    def size(self) -> int:
        """About how many bytes are to be read."""
        return sum(self._costs())

    def licence_files(self) -> list[LicenceFile]:
        """Return the licence texts of the repository."""
        return [*self.licences]

    def stated_licence(self) -> str | None:
        """Return None: there is no metadata."""
        return None

    def read(self) -> Iterator[Raw | Drop]:
        """Yield each entry, as a document or as a drop."""
        contents = self.contents([entry.key for entry in self.entries if not entry.fault])
        for entry in self.entries:
            content = entry.fault or next(contents)
            if isinstance(content, str):
                yield Drop(self.repository, entry.path, "read", content, entry.size)
            else:
                yield Raw(self.repository, entry.path, content, self.kind)

    @abstractmethod
    def contents(self, keys: list[str]) -> Iterator[bytes | str]:
        """Yield what is behind each key, or the reason why it cannot be had."""

    def with_licences(self) -> FilesPart:
        """Return the same part knowing the licence texts among its files."""
        named = [entry for entry in self.entries if not entry.fault and is_licence(entry.path)]
        totals = accumulate(entry.size for entry in named)
        wanted = tuple(entry for entry, total in zip(named, totals, strict=True) if total <= MOST_LICENCES)
        texts = replace(self, entries=wanted).read()
        found = tuple(licence_file(raw.path, raw.content) for raw in texts if isinstance(raw, Raw))
        return replace(self, licences=found)

    def shared_out(self, most: int = CHUNK) -> list[FilesPart]:
        """Return the same files in parts that workers read side by side."""
        runs = runs_of(self._costs(), most)
        return [replace(self, entries=tuple(self.entries[index] for index in run)) for run in runs]

    def _costs(self) -> list[int]:
        return [self.overhead + (0 if entry.fault else entry.size) for entry in self.entries]
