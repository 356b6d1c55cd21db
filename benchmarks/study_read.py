"""Read what benchmarks/study.py measured: runs by arm and seed, solve rates with intervals, the course of RL, tables in Markdown."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from etude.bench.agent.statistics import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

BLUE, RED, GREEN, GREY, GOLD = "#3b6ea8", "#b5532a", "#6a9a3b", "#777777", "#c29b2b"
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # by how many seeds: Student's t for 95 %
LEAST = 6  # steps of rl that are worth telling of
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


def binned(steps: list[dict[str, Any]], name: str, bins: int = 6) -> list[tuple[float, float]]:
    """Return (episodes so far, mean of a number) in bins of about as many episodes.

    Where groups wait for the newest weights, episodes end in bursts: one step sees two hundred of them, the next ones none.
    """
    total, seen = sum(step["episodes"] for step in steps), 0
    found: list[tuple[float, float]] = []
    begun: list[dict[str, Any]] = []
    for step in steps:
        begun.append(step)
        seen += step["episodes"]
        if seen >= (len(found) + 1) * total / bins:
            found.append((seen, weighted(begun, name)))
            begun = []
    return found


def weighted(steps: list[dict[str, Any]], name: str) -> float:
    """Return the mean of a number over episodes, not over steps."""
    known = [(step["episodes"], step[name]) for step in steps if step.get(name) is not None and step["episodes"]]
    return float(sum(count * value for count, value in known) / max(1, sum(count for count, _ in known)))


def ends(steps: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return a number over the first and the last third of the episodes."""
    found = [value for _, value in binned(steps, name, 3)]
    return found[0], found[-1]


def over_seeds(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Return the mean over seeds with a 95 % interval of Student's t: wide, for seeds are few. One seed has none."""
    middle = form.format(fmean(values))
    if len(values) < 2:
        return f"{middle} (one seed)"
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{middle} ± {form.replace('+', '').format(half)}"
