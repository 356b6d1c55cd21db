"""A few dropped documents for each reason, to look at.

Which ones is decided by a hash of their names, not by when they came: the same for any number of workers.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from etude.data.document import Drop

EXCERPT = 400  # characters


class Samples:
    """At most `most` drops for each step and reason."""

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


def excerpt(text: str) -> str:
    """Return the beginning of a text, short enough to show."""
    return text[:EXCERPT]
