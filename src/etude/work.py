"""Long work in small units that can be stopped and taken up again.

A unit has a key. A unit whose key is in the metrics log is done: a restart skips it. Between two units the work may be
stopped. So whatever is killed, at most one unit of each process is done twice, and none is counted twice.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude import parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from etude.jsonl import MetricsLog
    from etude.progress import Reporter, Task


@dataclass(frozen=True)
class Unit:
    """One piece of work: what it is called, what it works on, how large it is."""

    key: str
    item: Any
    size: float = 1.0


@dataclass
class Work:
    """The surroundings of a stage's work."""

    folder: Path  # where its artefacts go; published when all is done
    metrics: MetricsLog
    reporter: Reporter
    cache: Path
    _task: Task | None = None
    _ticked: float = 0.0

    def pending(self, label: str, units: Sequence[Unit], unit: str) -> Iterator[Unit]:
        """Yield the units that are not done, showing progress; the body writes each unit's row before the next."""
        with self.reporter.task(label, sum(each.size for each in units), unit) as task:
            for each in units:
                if each.key in self.metrics:
                    task.skip(each.size)
                    continue
                self.reporter.check_stop()
                self._task, self._ticked = task, 0.0
                yield each
                assert each.key in self.metrics, f"{each.key} was not written to the metrics"
                task.advance(each.size - self._ticked)
        self._task = None

    def parallel(
        self, label: str, units: Sequence[Unit], unit: str, function: Callable[[Any], dict[str, Any]], workers: int
    ) -> None:
        """Do the units that are not done in several processes; what `function` returns of an item becomes its row."""
        with self.reporter.task(label, sum(each.size for each in units), unit) as task:
            pending = [each for each in units if each.key not in self.metrics]
            task.skip(sum(each.size for each in units) - sum(each.size for each in pending))
            items = [each.item for each in pending]
            for index, row in parallel.each(function, items, workers, self.reporter.check_stop):
                self.metrics.put(pending[index].key, **row)
                task.advance(pending[index].size)

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Write a row with the seconds the body took, so that one can see later where the time went."""
        began = time.perf_counter()
        yield
        number = 1 + sum(1 for _ in self.metrics.rows(f"step/{step}/"))  # an interrupted step is done again
        self.metrics.put(f"step/{step}/{number:03d}", seconds=round(time.perf_counter() - began, 3))

    def tick(self, amount: float) -> None:
        """Say that `amount` of the unit at hand is done: news within long units. The unit itself is still all or nothing."""
        if self._task is not None:
            self._ticked += amount
            self._task.advance(amount)
