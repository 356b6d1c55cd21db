"""Long work in small units that can be stopped and taken up again.

A unit has a key. A unit whose key is in the metrics log is done: a restart skips it. Between two units the work may be
stopped. So whatever is killed, at most one unit of each process is done twice, and none is counted twice.

Units may be shared out to processes, one a core: results come as they are ready, and no process outlives its parent. Processes are
started afresh (`spawn`): forking a process with threads, as bars and tokenisers have, can hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
    from pathlib import Path

    from etude.jsonl import MetricsLog
    from etude.progress import Reporter, Task

Done = TypeVar("Done")


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
            for index, row in in_processes(function, items, workers, self.reporter.check_stop):
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


LOOK = 0.2  # seconds between two looks whether the user wants to stop


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def together(jobs: Iterable[Coroutine[Any, Any, Done]]) -> list[Done]:
    """Run coroutines at once; return their results. The first error ends all: most often the wish to stop, which several hear."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def in_processes(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, check_stop: Callable[[], None]
) -> Iterator[tuple[int, Any]]:
    """Yield (index, result) of every item as they are done. With one worker it all happens in this process, in order."""
    if workers <= 1 or len(items) <= 1:
        for index, item in enumerate(items):
            check_stop()
            yield index, function(item)
        return
    started: dict[int, multiprocessing.process.BaseProcess] = {}
    try:
        yield from _in_pool(function, items, min(workers, len(items)), check_stop, started)
    except BrokenProcessPool:  # the pool ends those that are left with SIGTERM
        codes = {process.exitcode or 0 for process in started.values()} - {0}
        first = min(codes - {-signal.SIGTERM} or codes, default=0)
        how = f"was ended by signal {-first} ({signal.strsignal(-first)})" if first < 0 else f"left with code {first}"
        memory = ", perhaps for lack of memory; lower `workers` and" if first == -signal.SIGKILL else ";"
        raise UserError(f"a worker process {how}{memory} run the same command again") from None


def _in_pool(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, check_stop: Callable[[], None],
    started: dict[int, multiprocessing.process.BaseProcess],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        ahead = iter(enumerate(items))
        # No more than there are workers: what waits in their queue could not be taken back if the user wants to stop.
        running = {pool.submit(function, item): index for index, item in islice(ahead, workers)}
        started |= pool._processes  # noqa: SLF001 - nothing else tells how a worker ended
        while running:
            done, _ = wait(running, timeout=LOOK, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
                running |= {pool.submit(function, item): index for index, item in islice(ahead, 1)}
            check_stop()
    finally:
        try:
            pool.shutdown(wait=True, cancel_futures=True)  # what runs is let finish: it writes files
        except KeyboardInterrupt:  # asked a second time; Python would wait for the pool again as it leaves
            os._exit(128 + signal.SIGINT)


def _begin() -> None:
    """Leave Ctrl-C to the parent, and go when it goes, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # there is a process a core already
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
