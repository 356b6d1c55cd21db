"""When speculative decoding pays: MTP heads propose k draft tokens, and the model reads them all in one pass (sampler.py).

With few requests a pass over k + 1 tokens of each costs what a pass over one costs, and accepted drafts are gained. With many it
costs more than it gains. Where that turns depends on device, model, heads and text, so `SpeculationSwitch` times both ways now and
then, for each size of batch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST = 8  # steps tried of each way at the beginning
AGAIN, EVERY = 3, 200  # so many steps of the slower way in so many of both
MEMORY, ROUNDS = 16, 64  # steps whose time is remembered, and whose tokens: how many are accepted varies far more
MARGIN = 1.05  # times faster the other way must be: what is equal would change sides all the time


@dataclass
class Way:
    """One way of going on, for one size of batch."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))  # of the last steps
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # a request and step
    steps: int = 0

    def note(self, seconds: float, tokens: float, *, counts: bool) -> None:
        """Take one more step into account; what does not count is better than nothing."""
        self.steps += 1
        if counts or not self.seconds:
            self.seconds.append(seconds)
            self.tokens.append(tokens)

    @property
    def doubt(self) -> float:
        """Standard error of the mean of tokens, as a share of it: what a few rounds accept says little."""
        mean = statistics.fmean(self.tokens)
        return statistics.pstdev(self.tokens, mean) / max(mean, 1e-9) / math.sqrt(len(self.tokens))

    @property
    def rate(self) -> float:
        """Tokens a second of one request. The median: a step may have to compile something, or record a graph, first."""
        return statistics.fmean(self.tokens) / max(statistics.median(self.seconds), 1e-9)


@dataclass
class SpeculationSwitch:
    """Chooses, and says when it changes its mind."""

    say: Callable[[str], None]
    able: bool
    wish: bool | None = None  # True, False: always, never
    clock: Callable[[], float] = time.perf_counter
    _ways: dict[tuple[int, bool], Way] = field(default_factory=lambda: defaultdict(Way))
    _chosen: dict[int, bool] = field(default_factory=dict)
    _last: tuple[int, bool] | None = None

    def ahead(self, requests: int) -> bool:
        """Return whether to use draft tokens with so many requests."""
        if not self.able or not requests:
            return False
        if self.wish is not None:
            return self.wish
        size = requests.bit_length()
        drafting, plain = self._ways[size, True], self._ways[size, False]
        for way, ahead in ((drafting, True), (plain, False)):
            if way.steps < FIRST:
                return ahead
        gain, before = drafting.rate / plain.rate, self._chosen.get(size, True)
        doubt = drafting.doubt
        faster = gain * (1 + doubt) * MARGIN > 1 if before else gain * (1 - doubt) > MARGIN
        if before != faster:
            many = f"{1 << (size - 1)} to {(1 << size) - 1} requests at once" if size > 1 else "one request at a time"
            self.say(
                f"speculative decoding is {'on again' if faster else 'off'} at {many}:"
                f" {gain:.2f} times the speed of one token at a time"
            )
        self._chosen[size] = faster
        return faster if (drafting.steps + plain.steps) % EVERY >= AGAIN else not faster

    @contextlib.contextmanager
    def timed(self, requests: int, *, ahead: bool, written: Callable[[], int]) -> Iterator[None]:
        """Time one step; `written` counts the tokens so far, of all requests.

        On a GPU what is read meanwhile is the step before, so the first one after a change does not count.
        """
        if not self.able:
            yield
            return
        began, before = self.clock(), written()
        yield
        way, tokens = (requests.bit_length(), ahead), (written() - before) / requests if ahead else 1.0
        self._ways[way].note(self.clock() - began, tokens, counts=way == self._last)
        self._last = way
