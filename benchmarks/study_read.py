"""Read what benchmarks/study.py measured: runs by arm and seed, solve rates with intervals, the course of RL, tables in Markdown."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from scipy.stats import t as student

from etude.bench.statistics import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

BLUE, RED, GREEN, GREY, GOLD = "#3b6ea8", "#b5532a", "#6a9a3b", "#777777", "#c29b2b"
LEAST = 6  # steps of rl that are worth telling of
TINY = 1e-9
Trials = list[dict[str, Any]]


class Study:
    """Runs by arm and seed."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.runs = found["runs"]

    def seeds(self, arm: str, stage: str) -> list[int]:
        """Return the seeds of an arm whose stage is there."""
        return [seed for seed in range(10) if stage in self.runs.get(f"{arm}-{seed}", {})]

    def stage(self, arm: str, seed: int, stage: str) -> dict[str, Any]:
        """Return what is known of a stage."""
        found: dict[str, Any] = self.runs[f"{arm}-{seed}"][stage]
        return found

    def steps(self, arm: str, seed: int) -> list[dict[str, Any]]:
        """Return the steps of an arm's RL."""
        found: list[dict[str, Any]] = self.stage(arm, seed, "rl").get("steps", [])
        return found

    def trials(self, arm: str, stage: str, seed: int | None = None) -> Trials:
        """Return the valid attempts of an arm's benchmark, of all seeds or of one."""
        seeds = self.seeds(arm, stage) if seed is None else [seed]
        rows = [row for each in seeds for row in self.stage(arm, each, stage).get("trials", [])]
        return [row for row in rows if row["outcome"] != "invalid"]

    def finished(self, arm: str, stage: str) -> bool:
        """Return whether there is anything to tell."""
        return bool(self.trials(arm, stage))


def solved(trials: Trials, against: Trials | None = None) -> Estimate | None:
    """Return the solve rate, or by how much it is above another's."""
    found, other = (
        [(row["package"], row["task"], float(row["outcome"] == "pass")) for row in rows]
        for rows in (trials, against or [])
    )
    return estimate(found, against=other if against is not None else None)


def percent(found: Estimate | None, *, signed: bool = False) -> str:
    """Return an estimate in words."""
    if found is None:
        return "–"
    form = "{:+.1f}" if signed else "{:.1f}"
    return f"{form.format(100 * found.value)} [{form.format(100 * found.low)}, {form.format(100 * found.high)}]"


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def mean(trials: Trials, name: str) -> float:
    """Return the mean of a number over the attempts that have it."""
    values = [float(row[name]) for row in trials if row.get(name) is not None]
    return fmean(values) if values else float("nan")


def binned(
    steps: list[dict[str, Any]], name: str, bins: int = 6, at: Sequence[float] | None = None
) -> list[tuple[float, float]]:
    """Return (episodes so far, mean of a number) in bins of as many episodes; or, for the first, what the step is `at`.

    Where groups wait for the newest weights, episodes end in bursts: one step sees two hundred of them, the next ones none. So a step
    that lies across a border counts on both sides, by how many of its episodes lie there.
    """
    size = sum(step["episodes"] for step in steps) / bins
    found: list[tuple[float, float]] = []
    known, room, total = (
        0.0,
        size,
        0.0,
    )  # episodes whose number is known, places left, and the sum in the bin that is being filled
    for place, step in enumerate(steps):
        left = float(step["episodes"])
        while left > 0:
            part = min(left, room)
            if step.get(name) is not None:
                known, total = known + part, total + part * step[name]
            left, room = left - part, room - part
            if room < TINY * size:
                found.append((at[place] if at else round((len(found) + 1) * size), total / max(known, TINY)))
                known, room, total = 0.0, size, 0.0
    return found


def ends(steps: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return a number over the first and the last third of the episodes."""
    found = [value for _, value in binned(steps, name, 3)]
    return found[0], found[-1]


def over_seeds(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Return the mean over seeds with a 95 % interval of Student's t: wide, for seeds are few. One seed has none."""
    middle = form.format(fmean(values))
    if len(values) < 2:
        return f"{middle} (one seed)"
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f"{middle} ± {form.replace('+', '').format(half)}"
