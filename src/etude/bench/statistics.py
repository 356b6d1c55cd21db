"""How sure a benchmark's numbers are.

Three estimates of a task's worth from c passes in n valid trials, each unbiased: avg = c/n; pass@k = 1 − C(n−c, k)/C(n, k), one of k
passes; pass^k = C(c, k)/C(n, k), all k pass. A model's score is their mean over tasks, each task counting once.

Tasks of one repository are alike, and trials of one task are more so. What varies from repository to repository holds the noise of
both, so repositories are the units, and a score is a ratio of sums over them: worth by number of tasks. (Of one repository, its tasks
are the units.) Its error is the jackknife's, each unit left out in turn. The quantile is t's, with one degree of freedom less than the
number of units of equal size that would vary as much, (Σ size)² / Σ size² (Carter, Schnepel and Steigerwald 2017).

- A difference of two models on the same tasks: value ± t · error. With two repositories t is 12.7: next to nothing is proven.
- A rate: Clopper and Pearson's exact interval for as many trials as would have this error, at most one a task, fewer for want of
  degrees of freedom (Korn and Graubard 1998). It holds near 0 and 1, where t misses; 0 passes are no proof of 0.
- Bits per byte, distances and other ratios of positive numbers over files: t on the logarithm, as a few large ones skew them.

tests/bench/test_statistics.py simulates how often these hold the truth; docs/benchmark.md has its table, and where they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]
    Statistic = Callable[[Array, Array], Array]  # sums and numbers of trials, a task each → the task's worth
    Row = tuple[str, str, float]  # repository, task, value of one valid trial

TAIL = 0.025


class Estimate(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float
    tasks: int


def average(sums: Array, counts: Array) -> Array:
    return sums / counts


def pass_all(k: int) -> Statistic:
    """Return the statistic of tasks that all of k trials pass; each needs k trials."""
    steps = np.arange(k)
    return lambda sums, counts: np.prod(np.maximum(sums[:, None] - steps, 0) / (counts[:, None] - steps), axis=1)


def pass_at(k: int) -> Statistic:
    """Return the statistic of tasks that at least one of k trials passes; each needs k trials."""
    return lambda sums, counts: 1 - pass_all(k)(counts - sums, counts)


def estimate(
    rows: Iterable[Row], statistic: Statistic = average, *, against: Iterable[Row] | None = None, least: int = 1, rate: bool = True,
    signed: bool = False,
) -> Estimate | None:  # fmt: skip
    """Return the mean over tasks that have at least `least` trials, with its interval; None if there are no such tasks.

    `against`: by how much it is above that of another model, on tasks that both have: in pairs, so that what makes a task hard for
    both cancels. `rate`: values lie between 0 and 1; `signed`: they may lie below 0.
    """
    by_task = [_by_task(each, least) for each in (rows, against) if each is not None]
    tasks = sorted(set.intersection(*map(set, by_task)))
    if not tasks:
        return None
    worths = [statistic(*np.array([(sum(each[task]), len(each[task])) for task in tasks]).T) for each in by_task]
    worth = worths[0] if against is None else worths[0] - worths[1]
    _, unit_of = np.unique([repository for repository, _ in tasks], return_inverse=True)
    if not unit_of.any():  # one repository
        unit_of = np.arange(len(tasks))
    value, error, t = spread(np.bincount(unit_of, worth), np.bincount(unit_of))
    if rate and against is None:
        return Estimate(value, *_rate_interval(value, error, t, len(tasks)), len(tasks))
    margin = t * error
    if rate and not worth.any():  # two models that differ on no task may still differ on others
        margin = 1 - TAIL ** (1 / len(tasks))
    least_possible = -1.0 if rate else -np.inf if signed or against is not None else 0.0
    low, high = max(value - margin, least_possible), min(value + margin, 1.0 if rate else np.inf)
    return Estimate(value, float(low), float(high), len(tasks))


def _by_task(rows: Iterable[Row], least: int) -> dict[tuple[str, str], list[float]]:
    trials: dict[tuple[str, str], list[float]] = {}
    for repository, task, value in rows:
        trials.setdefault((repository, task), []).append(value)
    return {name: values for name, values in trials.items() if len(values) >= least}


def spread(parts: Array, wholes: Array) -> tuple[float, float, float]:
    """Return sum(parts) / sum(wholes), its standard error over units, 0 for one alone, and t's quantile for a 95% interval."""
    from scipy.special import stdtrit

    total, units = wholes.sum(), len(parts)
    value = float(parts.sum() / total)
    freedom = max(float(total**2 / (wholes.astype(float) ** 2).sum()) - 1, 1.0)
    without = (parts - value * wholes) / (total - wholes) if units > 1 else np.zeros(1)
    return value, float(np.sqrt((units - 1) / units * (without**2).sum())), float(stdtrit(freedom, 1 - TAIL))


def _rate_interval(value: float, error: float, t: float, tasks: int) -> tuple[float, float]:
    from scipy.special import betaincinv, stdtrit

    like = min(value * (1 - value) / error**2, tasks) if error > 0 else tasks  # so many independent tasks
    like *= float(stdtrit(max(tasks - 1, 1), 1 - TAIL) / t) ** 2
    passes, fails = value * like, (1 - value) * like
    low = float(betaincinv(passes, fails + 1, TAIL)) if passes > 0 else 0.0
    return low, float(betaincinv(passes + 1, fails, 1 - TAIL)) if fails > 0 else 1.0


def ratio_interval(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of sum(parts) / sum(wholes) over pairs; None for fewer than two."""
    if len(parts) < 2:
        return None
    value, error, t = spread(np.asarray(parts, float), np.asarray(wholes, float))
    if min(parts) >= 0 < value:
        factor = float(np.exp(t * error / value))
        return value / factor, value * factor
    return value - t * error, value + t * error
