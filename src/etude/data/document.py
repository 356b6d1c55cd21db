"""A document on its way into the corpus, and how it can leave it: dropped, with the step and the reason.

Nothing disappears: whatever a source lists ends either as a kept document or as a `Drop`, and the manifest asserts that the
two add up (`SourceEntry` counts both, for a unit of work as for a whole source).
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
    evidence: str = ""  # for the licence: spdx-tag, header, text-hash, classifier, metadata, declared


@dataclass(frozen=True, slots=True)
class Raw:
    """A document as its source gives it: bytes of a file, or text of a row."""

    repository: str
    path: str
    content: bytes | str
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


class LicenceFile(NamedTuple):
    """A licence text found in a repository; it speaks for the folder it lies in (`""` is the top) and all below."""

    folder: str
    name: str
    text: str


@dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads: a package, some hundred files, some thousand rows. Picklable."""

    size: int  # about how many bytes it holds, for progress and for sharing work out
    read: Callable[[], Iterator[Raw | Drop]]  # all it holds, in a fixed order: each entry once, as a document or a drop
    licence_files: Callable[[], list[LicenceFile]] = list  # the licence texts that speak for its documents
    stated_licence: Callable[[], str | None] = str  # the licence its metadata state (an SPDX expression), if any
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
