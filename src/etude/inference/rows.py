"""The rows of the batch as the host sees them: who has which, how far it is, what it may still write.

With hundreds of rows and a step every few milliseconds the host has no time to ask each request: what is asked in every step is in
arrays, and what few requests wish (top-p, alternatives, experts) is counted.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from etude.inference.request import Request

NEVER = np.iinfo(np.int64).max


class Rows:
    """Places in the batch. A row is reserved when its request is admitted, and active once its prompt is read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.of: list[Request | None] = [None] * count
        self.computed = np.zeros(count, np.int64)  # positions in the cache, as of what was launched
        self.left = np.full(count, NEVER)  # tokens it may still be asked for
        self.room = np.full(count, NEVER)  # positions its pages have
        self.active = np.zeros(count, bool)
        # How many ask for top-k or top-p; for single steps; to be looked into; for the same tokens again.
        self.cut = self.alone = self.watched = self.seeded = 0
        self._free = list(range(count))

    def __len__(self) -> int:
        return int(self.active.sum())

    def reserve(self) -> int | None:
        """Return a free row, the lowest, or None."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, row: int) -> None:
        """Take back a row that was reserved."""
        heapq.heappush(self._free, row)

    def start(self, row: int, request: Request, room: int) -> None:
        """Make a row active."""
        self.of[row] = request
        self.computed[row], self.room[row] = request.computed, room
        self.left[row] = request.sampling.max_tokens - request.launched
        self.active[row] = True
        self._count(request, 1)

    def stop(self, row: int) -> None:
        """Make a row idle and free."""
        request = self.of[row]
        assert request is not None
        request.computed = int(self.computed[row])
        self.of[row] = None
        self.active[row], self.left[row], self.room[row], self.computed[row] = False, NEVER, NEVER, 0
        self._count(request, -1)
        self.give_back(row)

    def _count(self, request: Request, by: int) -> None:
        self.cut += by * request.cut
        self.alone += by * request.alone
        self.seeded += by * request.seeded
        self.watched += by * request.sampling.experts

    def requests(self) -> list[Request]:
        """Return those of active rows."""
        return [request for request in self.of if request is not None]

    def last(self) -> int:
        """Return the highest active row."""
        return int(np.flatnonzero(self.active)[-1])

    def launched(self) -> None:
        """Note that every active row was asked for a token."""
        self.computed[self.active] += 1
        self.left[self.active] -= 1

    def done(self) -> list[int]:
        """Return rows that have been asked for all they may write."""
        return np.flatnonzero(self.left <= 0).tolist()

    def short_of_pages(self, more: int) -> list[int]:
        """Return rows whose pages have no room for the next token and `more` after it, the oldest request first."""
        rows = np.flatnonzero(self.computed + 1 + more > self.room).tolist()
        return sorted(rows, key=lambda row: self.of[row].number)  # type: ignore[union-attr]
