"""The course of a run: means over its steps in which every episode counts once.

Episodes end in bursts: one step sees two hundred of them and the next a handful. A mean over steps would let that handful, which are
often the last and the slowest, say what the policy can do: a run that rose was once told to have fallen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Row = Mapping[str, Any]

OF_EPISODES = ("reward", "solved", "best_of_group", "part_", "behaviour_", "episode_", "turns")
Weighted = tuple[float, float]  # a number of a step, and how much it counts


def count(row: Row, name: str) -> float:
    """Return how much a step counts: as often as there were episodes, if the number is a mean over them."""
    return float(row.get("episodes", 1)) if name.startswith(OF_EPISODES) else 1.0


def weighted(rows: Iterable[Row], name: str) -> list[Weighted]:
    """Return a number of the steps that have it, and how much each counts."""
    return [(row[name], count(row, name)) for row in rows if name in row]


def mean(found: Sequence[Weighted]) -> float:
    """Return the mean."""
    return sum(value * times for value, times in found) / sum(times for _, times in found)


def ends(rows: Iterable[Row], name: str) -> tuple[float, float] | None:
    """Return the mean of a number in the first and in the last tenth of a run; a step across the border counts in part."""
    found = weighted(rows, name)
    return (_first_tenth(found), _first_tenth(found[::-1])) if found else None


def _first_tenth(found: Sequence[Weighted]) -> float:
    left, taken = sum(times for _, times in found) / 10, []
    for value, times in found:
        taken.append((value, min(times, left)))
        left -= times
        if left <= 0:
            break
    return mean(taken)


def smooth(found: Sequence[Weighted], reach: int) -> list[float]:
    """Return the mean of each number and those around it, `reach` to each side: centred, so that nothing seems late."""
    return [mean(found[max(0, place - reach) : place + reach + 1]) for place in range(len(found))]
