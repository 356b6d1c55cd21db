"""Work shared out to processes, one a core: results come as they are ready, and no process outlives its parent.

Processes are started afresh (`spawn`): forking a process with threads, as bars and tokenisers have, can hang.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")

LOOK = 0.2  # seconds between two looks whether the user wants to stop


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, check_stop: Callable[[], None]
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) of every item as they are done. With one worker it all happens in this process, in order."""
    if workers <= 1 or len(items) <= 1:
        for index, item in enumerate(items):
            check_stop()
            yield index, function(item)
        return
    started: dict[int, multiprocessing.process.BaseProcess] = {}
    try:
        yield from _each_in_pool(function, items, min(workers, len(items)), check_stop, started)
    except BrokenProcessPool:  # the pool ends those that are left with SIGTERM
        if any(process.exitcode == -signal.SIGKILL for process in started.values()):
            why = "killed, perhaps for lack of memory; lower `workers` and"
        else:
            why = "ended from outside;"
        raise UserError(f"a worker process was {why} run the same command again") from None


def _each_in_pool(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, check_stop: Callable[[], None],
    started: dict[int, multiprocessing.process.BaseProcess],
) -> Iterator[tuple[int, Result]]:  # fmt: skip
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
