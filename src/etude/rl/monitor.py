"""What somebody should look at while a policy is trained: habits that creep in, and three episodes a step.

Each behaviour is held against itself at the run's beginning. The first steps say what is usual and how much that varies; what is many
deviations away for some steps in a row is flagged, once, until it has come back for as many. Faults are flagged when they grow, all
else in both directions: it may be what was wanted, but somebody should look. Comments crowding the code and the terminal for
everything are known failure modes (Composer 2 cured both by a reward added in mid-run): they have fixed bounds, and are flagged
beyond those from the beginning. Fed the same steps again, a monitor says the same.

Of the episodes of a step the best, the worst, and the one that is least like the others are kept as samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, NamedTuple

from etude.files import link_or_copy, write_json
from etude.rl.exchange import episode_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.rl.ledger import Finished

FAILURE_MODES = {"comment_density": 0.4, "shell_share": 0.9}  # bounds of a step's mean; 2 % of functions pass the first
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
        known = "a known failure mode" if self.usual is None else f"usual in this run: {self.usual:.3g}"
        return f"step {self.step}: {self.behaviour} is {self.value:.3g}, for {PATIENCE} steps {side} {self.bound:.3g} ({known})"


@dataclass
class _Alarm:
    """Believes that something is in (0), above (1) or below (−1) only when it has been so for some steps in a row."""

    believed: int = 0
    seen: int = 0
    streak: int = 0

    def raised(self, side: int) -> bool:
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
    failure: _Alarm = field(default_factory=_Alarm)


@dataclass
class Monitor:
    """Watches the means of behaviours, step by step."""

    window: int = 10  # steps that say what is usual; at least 2, as one has no deviation
    threshold: float = 4.0  # in deviations
    habits: defaultdict[str, _Habit] = field(default_factory=lambda: defaultdict(_Habit))

    def add(self, step: int, means: Mapping[str, float]) -> list[Flag]:
        """Take the means of a step; return what is new to be flagged. A behaviour that a step says nothing of stays as it was."""
        flags = (self._look(step, name, value) for name, value in means.items())
        return [flag for flag in flags if flag]

    def _look(self, step: int, name: str, value: float) -> Flag | None:
        """Return at most one flag: a failure mode is a drift too."""
        habit, flag = self.habits[name], None
        if habit.usual is None:
            habit.first.append(value)
            habit.usual = self._usual(name, habit.first) if len(habit.first) == self.window else None
        elif habit.drift.raised(_side(value, *habit.usual[1:])):
            usual, low, high = habit.usual
            flag = Flag(step, name, value, usual, low if value < low else high)
        if name in FAILURE_MODES and habit.failure.raised(_side(value, -math.inf, FAILURE_MODES[name])):
            flag = Flag(step, name, value, None, FAILURE_MODES[name])
        return flag

    def _usual(self, name: str, first: list[float]) -> tuple[float, float, float]:
        """Return the usual value and the bounds around it."""
        usual = fmean(first)
        deviation = max(stdev(first), LEAST_RELATIVE * abs(usual), LEAST)
        low = -math.inf if name in FAULTS else usual - self.threshold * deviation
        return usual, low, usual + self.threshold * deviation


def _side(value: float, low: float, high: float) -> int:
    return -1 if value < low else int(not value <= high)  # so written, what is no number is out


ABOUT = "about.json"
FAR = 1.4826  # times the median deviation is the standard deviation, where a bell curve is


class Sample(NamedTuple):
    """An episode, and why it was kept."""

    episode: Finished
    reward: float
    why: str


def choose(episodes: Sequence[tuple[Finished, float]]) -> dict[str, Sample]:
    """Return the best, the worst and the strangest of a step's episodes; the first of equals. None is taken twice."""
    left = list(episodes)
    chosen: dict[str, Sample] = {}
    for name, why, pick in (("best", "the largest reward", max), ("worst", "the smallest reward", min)):
        if left:
            place = pick(range(len(left)), key=lambda place: left[place][1])
            chosen[name] = Sample(*left.pop(place), f"{why} of the step")
    if left:
        usual = _typical([event for event, _ in episodes])
        (_, why), event, reward = max(((_strangeness(e, usual), e, r) for e, r in left), key=lambda each: each[0][0])
        chosen["strangest"] = Sample(event, reward, why)
    return chosen


def _typical(episodes: Sequence[Finished]) -> dict[str, tuple[float, float]]:
    """Return the usual value of each behaviour, and how much that varies.

    By medians, so that a strange episode does not move what it is compared with. Where most are alike, any difference counts as a
    share of the value itself.
    """
    numbers = [_numbers(event) for event in episodes]
    usual = {}
    for name in dict.fromkeys(name for each in numbers for name in each):
        values = [each.get(name, 0.0) for each in numbers]
        middle = median(values)
        usual[name] = middle, FAR * median(abs(each - middle) for each in values) or max(abs(middle), 1.0)
    return usual


def _strangeness(event: Finished, usual: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Return how far an episode's most unusual behaviour is from the others', in standard deviations, and in words."""
    distances = [(0.0, "no behaviour differs from the others'")]
    for name, value in _numbers(event).items():
        middle, spread = usual[name]
        distances.append((abs(value - middle) / spread, f"{name} is {value:.4g}; the step's median is {middle:.4g}"))
    return max(distances, key=lambda each: each[0])


def _numbers(event: Finished) -> Mapping[str, float]:
    return {**event.behaviour, "tokens sampled": event.sampled}


def keep_samples(folder: Path, step: int, episodes: Sequence[tuple[Finished, float]]) -> None:
    """Keep the traces that `choose` finds, and say why; doing it again changes nothing. `folder`: the run's."""
    target = folder / "samples" / f"{step:08d}"
    about = {}
    for name, (event, reward, why) in choose(episodes).items():
        link_or_copy(folder / episode_file(event.group, event.episode), target / f"{name}.json")
        place = {"group": event.group, "episode": event.episode}
        about[name] = {**place, "outcome": event.outcome, "reward": reward, "why": why}
    write_json(target / ABOUT, about)
