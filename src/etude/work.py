"""Long work in small units that can be stopped and taken up again.

A unit has a key. A unit whose key is in the metrics log is done: a restart skips it. Between two units the work may be
stopped. So whatever is killed, at most one unit is done twice, and none is counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from etude.jsonl import MetricsLog
    from etude.progress import Reporter


@dataclass(frozen=True)
class Unit:
    """One piece of work: what it is called, what it works on, how large it is."""

    key: str
    item: Any
    size: float = 1.0


@dataclass(frozen=True)
class Work:
    """The surroundings of a stage's work."""

    folder: Path  # where its artefacts go; published when all is done
    metrics: MetricsLog
    reporter: Reporter
    cache: Path
    check_stop: Callable[[], None]  # raises Interrupted if the user asked to stop

    def pending(self, label: str, units: Sequence[Unit], unit: str) -> Iterator[Unit]:
        """Yield the units that are not done, showing progress; the body writes each unit's row before the next."""
        with self.reporter.task(label, sum(each.size for each in units), unit) as task:
            for each in units:
                if each.key in self.metrics:
                    task.skip(each.size)
                    continue
                self.check_stop()
                yield each
                assert each.key in self.metrics, f"{each.key} was not written to the metrics"
                task.advance(each.size)

    def all_done(self, units: Sequence[Unit]) -> bool:
        """Whether nothing is left, so that a model need not be loaded."""
        return all(each.key in self.metrics for each in units)
