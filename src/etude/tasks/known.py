"""Scores that need no test run: of code that is as it was, and of changes that were scored before.

In groups of attempts at one task, as training and benchmarks make them, many leave the same code behind. Tests of the same code end
alike, but for flaky ones, which validation sought to keep out of tasks; and the luck of a cheat (`score.tried`) is drawn once for
all who left it, not worse than for each. So it is scored once: those who come while that is being done wait for it. What the
machinery did wrong is never remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from etude.files import digest_of
from etude.parallel import cores
from etude.sandbox.box import Entry
from etude.tasks.score import Score, score, taken
from etude.tasks.suite import Ready
from etude.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterable

Scorer = Callable[[Task, Ready, Sequence[Entry]], Awaitable[Score]]
MOST = 20_000  # changes remembered: a few megabytes


def one_a_core(scorer: Scorer = score) -> Scorer:
    """Return a scorer that has no more tests run at once than there are cores.

    Tests have time limits: crowded, they would fail for no fault of the agent's.
    """
    free = asyncio.Semaphore(cores())

    async def scored(task: Task, codebase: Ready, entries: Sequence[Entry]) -> Score:
        async with free:
            return await scorer(task, codebase, entries)

    return scored


@dataclass
class _Slot:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    score: Score | None = None


class Scores:
    """The scores of one set of tasks, in which an id means one task."""

    def __init__(self, scorer: Scorer, *, most: int = MOST) -> None:
        self._scorer, self._most = scorer, most
        self._slots: dict[str, _Slot] = {}

    async def of(self, task: Task, codebase: Ready, entries: Sequence[Entry]) -> Score:
        """Score an agent's changes (differences from the tree it saw), by tests only if that cannot be known."""
        changes, ignored = taken(task, codebase, entries)
        if not changes:  # as validation found
            return Score("fail", 0.0, 1.0, "the code is as it was", ignored, how="idle")
        slot = self._slot(change_digest(task, changes))
        async with slot.lock:
            if slot.score:
                return replace(slot.score, ignored=ignored, how="known")
            found = await self._scorer(task, codebase, entries)
            if found.outcome != "invalid":
                slot.score = found
            return found

    def _slot(self, key: str) -> _Slot:
        """Return the place for a change, and forget the one that was left unasked for longest if there are too many."""
        self._slots[key] = slot = self._slots.pop(key, None) or _Slot()
        if len(self._slots) > self._most:
            del self._slots[next(iter(self._slots))]
        return slot


def change_digest(task: Task, changes: Iterable[Entry]) -> str:
    """Return a digest of a task and all that is taken over of an agent's work on it."""
    told = sorted(
        (each.path, each.kind, each.mode, None if each.content is None else sha256(each.content).hexdigest())
        for each in changes
    )
    return digest_of([task.id, told])
