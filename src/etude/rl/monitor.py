"""Habits that creep in while a policy is trained: each behaviour against itself at the run's beginning, two against fixed bounds.

The first steps of a run say what is usual and how much that varies. What is many deviations away for some steps in a row is flagged,
once, until it has come back for as many. Faults are flagged when they grow, all else in both directions: it may be what was wanted,
but somebody should look. Comments crowding the code and the terminal for everything are known diseases (Composer 2 cured both by a
reward added in mid-run) and flagged wherever they stand, also from the beginning. Fed the same steps again, it says the same.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DISEASES = {"comment_density": 0.4, "shell_share": 0.9}  # bounds of a step's mean; 2 % of functions pass the first
FAULTS = frozenset({
    "malformed", "failed_calls", "open_todos", "unverified", "silent", "vague", "lint", "scratch_files", "comment_density",
    "shell_share",
})  # fmt: skip
PATIENCE = 3  # steps in a row
LEAST_RELATIVE, LEAST = 0.05, 0.01  # deviations taken; smaller ones are chance, and would make an alarm of anything


@dataclass(frozen=True)
class Flag:
    """A behaviour that somebody should look at."""

    step: int
    behaviour: str
    value: float
    usual: float | None  # None: a fixed bound is passed
    bound: float

    def __str__(self) -> str:
        side = "above" if self.value > self.bound else "below"
        known = "a known disease" if self.usual is None else f"usual in this run: {self.usual:.3g}"
        return f"step {self.step}: {self.behaviour} is {self.value:.3g}, for {PATIENCE} steps {side} {self.bound:.3g} ({known})"


@dataclass
class _Alarm:
    """Believes that something is in (0), above (1) or below (−1) only when it has been so for some steps in a row."""

    believed: int = 0
    seen: int = 0
    streak: int = 0

    def tells(self, side: int) -> bool:
        """Take the side of a step; return whether something is newly believed to be out."""
        self.streak = self.streak + 1 if side == self.seen else 1
        self.seen = side
        if self.streak < PATIENCE or side == self.believed:
            return False
        self.believed = side
        return side != 0


@dataclass
class _Habit:
    """One behaviour over the run."""

    first: list[float] = field(default_factory=list)
    usual: tuple[float, float, float] | None = None  # and the bounds around it
    drift: _Alarm = field(default_factory=_Alarm)
    disease: _Alarm = field(default_factory=_Alarm)


class Monitor:
    """Watches the means of behaviours, step by step. `window`: steps that say what is usual; `threshold`: in deviations."""

    def __init__(self, window: int = 10, threshold: float = 4.0) -> None:
        assert window >= 2, "one step has no deviation"
        self.window, self.threshold = window, threshold
        self.habits: dict[str, _Habit] = {}

    def add(self, step: int, means: Mapping[str, float]) -> list[Flag]:
        """Take the means of a step; return what is new to be flagged. A behaviour that a step says nothing of stays as it was."""
        found = (self._look(step, name, value) for name, value in means.items())
        return [flag for flag in found if flag]

    def _look(self, step: int, name: str, value: float) -> Flag | None:
        """Return at most one flag: a disease is a drift too."""
        habit = self.habits.setdefault(name, _Habit())
        flag = None
        if habit.usual is None:
            habit.first.append(value)
            habit.usual = self._usual(name, habit.first) if len(habit.first) == self.window else None
        elif habit.drift.tells(_side(value, *habit.usual[1:])):
            usual, low, high = habit.usual
            flag = Flag(step, name, value, usual, low if value < low else high)
        if name in DISEASES and habit.disease.tells(_side(value, -math.inf, DISEASES[name])):
            flag = Flag(step, name, value, None, DISEASES[name])
        return flag

    def _usual(self, name: str, first: list[float]) -> tuple[float, float, float]:
        """Return the usual value and the bounds around it."""
        usual = statistics.fmean(first)
        deviation = max(statistics.stdev(first), LEAST_RELATIVE * abs(usual), LEAST)
        low = -math.inf if name in FAULTS else usual - self.threshold * deviation
        return usual, low, usual + self.threshold * deviation


def _side(value: float, low: float, high: float) -> int:
    return -1 if value < low else int(not value <= high)  # so written, what is no number is out
