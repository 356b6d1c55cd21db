"""Requests on their way through the engine, and the rows of the batch as the host sees them.

With hundreds of rows and a step every few milliseconds the host has no time to ask each request: what is asked in every step is in
arrays, and what few requests wish (top-p, alternatives, experts) is counted.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.inference.prefix_cache import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from etude.inference.policy import Completion, OnTokens, Sampling, Token

    OnEnd = Callable[[Completion | Exception], None]


@dataclass(eq=False)
class Request:
    """One request on its way."""

    number: int
    sampling: Sampling
    seed: int
    tokens: list[int]  # prompt and completion, as far as the host knows
    stop: Stop
    on_tokens: OnTokens
    on_end: OnEnd
    held: Held = field(default_factory=Held)
    row: int = -1
    computed: int = 0  # positions in the cache, as of what was launched; while it runs, its row knows
    prefix: int = -1  # positions that were in the cache when it began, this time; −1: it has not begun yet
    cached: int = 0  # the same, the first time
    written: list[Token] = field(default_factory=list)
    trail: torch.Tensor | None = None  # hidden states of the last positions read, for heads
    routed: list[Any] = field(default_factory=list)  # experts, pass by pass
    over: bool = False

    @property
    def cut(self) -> bool:
        """Whether it asks for top-k or top-p."""
        return self.sampling.temperature > 0 and (self.sampling.top_p < 1 or self.sampling.top_k > 0)

    @property
    def seeded(self) -> bool:
        """Whether it asks for tokens that can be had again: those of a round are drawn otherwise than those of a step."""
        return self.sampling.seed is not None and self.sampling.temperature > 0

    @property
    def alone(self) -> bool:
        """Whether it asks for what only single steps give."""
        return self.sampling.alternatives > 0 or self.sampling.experts


@dataclass(frozen=True)
class Launched:
    """A step that the device has been given."""

    of: list[Request | None]  # by index in the result
    result: torch.Tensor  # [3, R, written], on its way to the host
    event: Any
    version: int
    alternatives: list[torch.Tensor]  # log-probs and tokens, likeliest first, where anybody asked


@dataclass
class Counts:
    """What happened so far."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafts: int = 0  # draft tokens proposed; `accepted` of them were what the model samples
    accepted: int = 0


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
        self.left[row] = request.sampling.max_tokens - len(request.written)
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


class Stop:
    """Watches one request. A stop text may begin or end anywhere in a token, so the last tokens are read as text together."""

    def __init__(self, sampling: Sampling, decode: Callable[[list[int]], str]) -> None:
        self._tokens, self._texts, self._decode = sampling.stop_tokens, sampling.stop, decode
        # A token may be part of a character only, and the text's first token too: some more than the longest has bytes.
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + 8
        self._last: list[int] = []
        self.by: int | str | None = None

    def feed(self, token: int) -> bool:
        """Take the next token; return whether this is the end."""
        if token in self._tokens:
            self.by = token
        elif self._texts:
            self._last = [*self._last[1 - self._tail :], token]
            written = self._decode(self._last)
            self.by = min((text for text in self._texts if text in written), key=written.find, default=None)
        return self.by is not None
