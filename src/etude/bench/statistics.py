"""How sure a benchmark's numbers are.

Three estimates of a task's worth from c passes in n valid trials, each unbiased: avg = c/n; pass@k = 1 − C(n−c, k)/C(n, k), one of k
passes; pass^k = C(c, k)/C(n, k), all k pass. A model's score is their mean over tasks, each task counting once.

Tasks of one repository are alike, and trials of one task are more so; so the bootstrap draws repositories, in each of them tasks, and
of each task trials, all with replacement. But means of repositories already vary by what tasks and trials add to them, so drawing
all levels at full weight counts that noise up to three times (measured: differences of models 1.6 times too wide). Below the first
level, deviations are therefore shrunk (in the spirit of Davison and Hinkley 1997, §3.8): those of tasks from their repository by the
root of the number of repositories, those of redrawn trials from their task by that of all tasks. With one repository this is the
bootstrap of its tasks, with one task that of its trials. Deviations are then stretched as for a t distribution, for there are few
repositories to draw from.

Redrawn trials hold repeats, which biases pass@k and pass^k: the interval is moved so that its middle is where the estimate is.
Two things no bootstrap can see are put right: a rate's interval never excludes what would not surprise us if all n tasks had ended
alike (0 passes of 100 tasks is no proof of 0: up to 1 − 0.025^(1/n), Clopper and Pearson), and two models that differ on no task
may still differ that much on others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]
    Statistic = Callable[[Array, Array], Array]  # sums and numbers of trials, a task each → the task's worth
    Row = tuple[str, str, float]  # repository, task, value of one valid trial

RESAMPLES = 1000
CELLS = 4_000_000  # trials redrawn at once, so that memory stays bounded
TAIL = 0.025


class Estimate(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float
    tasks: int


class Sample(NamedTuple):
    """Trials as flat arrays, sorted by repository and task."""

    tasks: tuple[tuple[str, str], ...]
    sizes: Array  # tasks of each repository
    counts: Array  # trials of each task
    values: Array  # of the trials


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
    rows: Iterable[Row],
    statistic: Statistic = average,
    *,
    against: Iterable[Row] | None = None,
    least: int = 1,
    rate: bool = True,
    signed: bool = False,
    seed: int = 0,
) -> Estimate | None:
    """Return the mean over tasks that have at least `least` trials, with its interval; None if there are no such tasks.

    `against`: by how much it is above that of another model, on tasks that both have. Tasks are redrawn in pairs, so what makes a
    task hard for both cancels; trials of each are redrawn on their own. `rate`: values lie between 0 and 1;
    `signed`: they may lie below 0.
    """
    by_task = [_by_task(each, least) for each in (rows, against) if each is not None]
    common = set.intersection(*(set(each) for each in by_task))
    if not common:
        return None
    samples = [_sample(each, common) for each in by_task]
    sums = [np.add.reduceat(each.values, _starts(each.counts)) for each in samples]
    worth = _difference([statistic(total, each.counts) for total, each in zip(sums, samples, strict=True)])
    value, redrawn = float(worth.mean()), _redrawn(samples, worth, statistic, np.random.default_rng(seed))
    ends = _stretch(samples[0].sizes) * (np.quantile(redrawn, [TAIL, 1 - TAIL]) - redrawn.mean())
    low, high = min(value + float(ends[0]), value), max(value + float(ends[1]), value)
    if against is None and not signed:
        low = max(low, 0.0)  # that of skewed values, stretched to both sides, may reach where no truth can be
    if rate:
        unseen = 1 - TAIL ** (1 / len(common))
        if against is None:
            low, high = max(0.0, min(low, 1 - unseen)), min(1.0, max(high, unseen))
        elif not worth.any():
            low, high = -unseen, unseen
        low, high = max(low, -1.0), min(high, 1.0)  # stretched, those of a difference may reach beyond, too
    return Estimate(value, low, high, len(common))


def _by_task(rows: Iterable[Row], least: int) -> dict[tuple[str, str], list[float]]:
    trials: dict[tuple[str, str], list[float]] = {}
    for repository, task, value in rows:
        trials.setdefault((repository, task), []).append(value)
    return {name: values for name, values in trials.items() if len(values) >= least}


def _sample(trials: dict[tuple[str, str], list[float]], wanted: Container[tuple[str, str]]) -> Sample:
    tasks = tuple(sorted(name for name in trials if name in wanted))
    _, sizes = np.unique([repository for repository, _ in tasks], return_counts=True)
    counts = np.array([len(trials[name]) for name in tasks])
    return Sample(tasks, sizes, counts, np.array([value for name in tasks for value in trials[name]], float))


def _difference(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else parts[0] - parts[1]


def _starts(lengths: Array) -> Array:
    return np.cumsum(lengths) - lengths


def _stretch(sizes: Array) -> float:
    """Return how much wider an interval from so few units is than one from many: n/(n−1), and t against normal to first order."""
    left = (len(sizes) if len(sizes) > 1 else int(sizes[0])) - 1
    return float(np.sqrt((left + 1) / left) * (1 + 1.21 / left)) if left else 1.0


def _redrawn(samples: Sequence[Sample], worth: Array, statistic: Statistic, rng: np.random.Generator) -> Array:
    """Return the mean over tasks in each resample; of two samples, which have the same tasks, the mean difference."""
    sizes = samples[0].sizes
    means = np.add.reduceat(worth, _starts(sizes)) / sizes
    block = max(1, CELLS // sum(len(each.values) for each in samples))
    parts = []
    for begun in range(0, RESAMPLES, block):
        number = min(block, RESAMPLES - begun)
        drawn = rng.integers(len(sizes), size=(number, len(sizes)))
        owners = np.repeat(np.arange(number), sizes[drawn].sum(axis=1))
        repositories = np.repeat(drawn, sizes[drawn.ravel()])  # as many tasks of each as it has
        tasks = _starts(sizes)[repositories] + rng.integers(sizes[repositories])
        again = _difference([statistic(*_redrawn_trials(each, tasks, rng)) for each in samples])
        values = means[repositories] + (worth[tasks] - means[repositories]) / np.sqrt(len(sizes))
        values += (again - worth[tasks]) / np.sqrt(len(worth))
        parts.append(np.bincount(owners, values, number) / np.bincount(owners, minlength=number))
    return np.concatenate(parts)


def _redrawn_trials(sample: Sample, tasks: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return sums and numbers of the trials redrawn of each redrawn task."""
    counts = sample.counts[tasks]
    places = np.repeat(_starts(sample.counts)[tasks], counts) + rng.integers(np.repeat(counts, counts))
    return np.add.reduceat(sample.values[places], _starts(counts)), counts


RATIO_RESAMPLES = 2000


def ratio_interval(parts: Sequence[float], wholes: Sequence[float], seed: int) -> tuple[float, float] | None:
    """Return the 95% bootstrap interval of sum(parts) / sum(wholes), drawing pairs; None for fewer than two pairs."""
    if len(parts) < 2:
        return None
    numerators, denominators = np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(parts), size=(RATIO_RESAMPLES, len(parts)))
    ratios = numerators[draws].sum(axis=1) / denominators[draws].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
