"""A document on its way into the corpus, and how it can leave it: dropped, with the step and the reason.

Nothing disappears: whatever a source lists ends either as a kept document or as a `Drop`, and the build asserts that the
two add up.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PROSE = frozenset(
    {"asciidoc", "bib", "markdown", "mdx", "myst", "org", "plain-text", "pod", "quarto", "rst", "tex", "texinfo"}
)
UNKNOWN = "unknown"  # a licence that could not be told


@dataclass(slots=True)
class Document:
    """One text and where it came from. Filters may change `text` and fill in what they find out."""

    repository: str  # what is held out as a whole: `toolz-1.2.0`, a git repository, or for loose rows the row itself
    path: str  # inside the repository; for a commit its id
    text: str
    kind: str = "file"  # file, commit or row
    language: str = ""  # tag of the library `identify`: python, markdown, plain-text, …
    licence: str = UNKNOWN  # SPDX expression
    evidence: str = ""  # what told the licence: spdx-tag, header, text-hash, classifier, metadata, declared


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


@dataclass(frozen=True)
class LicenceFile:
    """A licence text found in a repository; it speaks for the folder it lies in (`""` is the top) and all below."""

    folder: str
    name: str
    text: str


class Part(Protocol):
    """A piece of a source that one worker reads: a package, some hundred files, some thousand rows. Picklable."""

    @property
    def size(self) -> int:
        """About how many bytes it holds, for progress and for sharing work out."""

    def licence_files(self) -> list[LicenceFile]:
        """Return the licence texts that speak for its documents; none for rows."""

    def stated_licence(self) -> str | None:
        """Return the licence its metadata states (an SPDX expression), if there is any."""

    def read(self) -> Iterator[Raw | Drop]:
        """Yield everything it holds, in a fixed order: each entry once, as a document or as a drop."""


class Samples:
    """At most `most` drops for each step and reason, to look at.

    Which ones is decided by a hash of their names, not by when they came: the same for any number of workers.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[str, list[tuple[str, dict[str, Any]]]] = {}

    def offer(self, drop: Drop) -> None:
        """Keep a drop if it is among the chosen ones of its reason."""
        self.offer_all([asdict(drop)])

    def offer_all(self, drops: Iterable[dict[str, Any]]) -> None:
        """Keep those of earlier found samples that are among the chosen ones."""
        for drop in drops:
            kept = self._kept.setdefault(f"{drop['step']}: {drop['reason']}", [])
            place = hashlib.blake2b(f"{drop['repository']}\0{drop['path']}".encode(errors="replace")).hexdigest()
            if len(kept) < self.most or (kept and place < kept[-1][0]):
                kept.append((place, drop))
                kept.sort(key=lambda entry: entry[0])
                del kept[self.most :]

    def all(self) -> list[dict[str, Any]]:
        """Return what was kept, by reason."""
        return [drop for reason in sorted(self._kept) for _, drop in self._kept[reason]]
