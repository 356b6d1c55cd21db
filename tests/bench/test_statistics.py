from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from etude.bench import statistics
from etude.bench.statistics import estimate, pass_all, pass_at, ratio_interval

Rows = list[tuple[str, str, float]]
Array = np.ndarray[Any, np.dtype[Any]]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_and_pass_all_k_are_the_mean_over_all_ways_to_pick_k_trials(outcomes: list[bool], k: int) -> None:
    found = [estimate([("r", "t", float(each)) for each in outcomes], one(k), least=k) for one in (pass_at, pass_all)]
    if k > len(outcomes):
        assert found == [None, None]
        return
    picks = list(itertools.combinations(outcomes, k))
    exact = [sum(map(each, picks)) / len(picks) for each in (any, all)]
    assert [each.value for each in found if each] == pytest.approx(exact)


def test_one_trial_of_each_independent_task_gives_clopper_and_pearson() -> None:
    passes = [("r", f"t{n}", float(n < 3)) for n in range(20)]
    exact = stats.binomtest(3, 20).proportion_ci(0.95, "exact")
    found = estimate(passes)
    assert found is not None
    # the variance is estimated with n − 1, so that they count as 19
    assert found[:3] == pytest.approx((3 / 20, exact.low, exact.high), rel=0.07)


def test_one_task_of_each_repository_gives_students_t() -> None:
    one, other = ([(f"r{n}", "t", value) for n, value in enumerate(values)] for values in ((3, 5, 1, 9), (1, 4, 2, 5)))
    exact = stats.ttest_1samp([2.0, 1.0, -1.0, 4.0], 0).confidence_interval(0.95)
    assert estimate(one, against=other, rate=False) == pytest.approx((1.5, exact.low, exact.high, 4))


def test_repositories_of_unlike_sizes_are_left_out_in_turn() -> None:
    """Against the jackknife written out: means without each repository in turn."""
    sizes, passed = [5, 2, 9, 1], [3, 0, 4, 1]
    rows = [(f"r{r}", f"t{t}", float(t < passed[r])) for r in range(4) for t in range(sizes[r])]
    without = [(8 - p) / (17 - s) for p, s in zip(passed, sizes, strict=True)]
    error = math.sqrt(3 / 4 * sum((each - 8 / 17) ** 2 for each in without))
    value, found, t = statistics.spread(np.array(passed), np.array(sizes))
    assert (value, found) == pytest.approx((8 / 17, error))
    assert t == pytest.approx(stats.t.ppf(0.975, 17**2 / (25 + 4 + 81 + 1) - 1))
    apart = estimate(rows, against=[(r, t, 0.0) for r, t, _ in rows])
    assert apart is not None
    assert (apart.low, apart.high) == pytest.approx((value - t * error, value + t * error))


@pytest.mark.parametrize("value", [0, 1])
def test_tasks_that_all_end_alike_are_no_proof(value: int) -> None:
    bounds = []
    for repositories in (1, 3, 10):
        found = estimate([(f"r{n % repositories}", f"t{n}", value) for n in range(30) for _ in range(5)])
        assert found is not None
        bounds.append(found.high if value == 0 else 1 - found.low)
        assert (found.low, found.high)[value] == value
    assert bounds[0] == pytest.approx(
        1 - 0.025 ** (1 / 30)
    )  # of one repository no more is claimed than of its own tasks
    assert bounds[1] > bounds[2] > bounds[0]  # three that agree prove less than ten


def test_one_task_says_next_to_nothing_and_none_says_nothing() -> None:
    found = estimate([("r", "t", 1.0), ("r", "t", 0.0)])
    assert found is not None
    assert found.low <= 0.025
    assert found.high >= 0.975
    assert estimate([]) is None
    assert estimate([("r", "t", 1.0)], against=[("r", "u", 1.0)]) is None


def test_values_that_are_no_rates_keep_the_plain_interval() -> None:
    found = estimate([("r", f"t{n}", 1000.0) for n in range(9)], rate=False)
    assert found == (1000.0, 1000.0, 1000.0, 9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_what_cannot_be_negative_has_no_negative_interval(values: list[float]) -> None:
    rows = [(f"r{n % 3}", f"t{n}", value) for n, value in enumerate(values)]
    clipped, free = (estimate(rows, rate=False, signed=signed) for signed in (False, True))
    assert clipped is not None
    assert free is not None
    assert clipped == free._replace(low=max(0.0, free.low))


def test_differences_and_signed_values_may_be_negative() -> None:
    skewed = [("r", f"t{n}", float(1000 * (n == 0))) for n in range(8)]
    none = [("r", f"t{n}", 0.0) for n in range(8)]
    below = [estimate(skewed, rate=False, signed=True), estimate(none, against=skewed, rate=False)]
    assert all(each and each.low < 0 for each in below)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=20))
def test_a_rate_and_its_interval_are_between_0_and_1(tasks: list[tuple[int, int]]) -> None:
    passes = [(f"r{r}", f"t{n}", float(k < p)) for n, (r, p) in enumerate(tasks) for k in range(5)]
    for statistic in (statistics.average, pass_at(3), pass_all(3)):
        found = estimate(passes, statistic, least=3)
        assert found is not None
        assert 0 <= found.low <= found.value + 1e-12
        assert found.value - 1e-12 <= found.high <= 1
    apart = estimate(passes, against=[(r, t, 1 - v) for r, t, v in passes])
    assert apart is not None
    assert -1 <= apart.low <= apart.value <= apart.high <= 1


def test_models_that_never_differ_may_still_differ() -> None:
    same = [("r", f"t{n}", float(n % 2)) for n in range(20) for _ in range(4)]
    bound = 1 - 0.025 ** (1 / 20)
    assert estimate(same, against=same) == pytest.approx((0.0, -bound, bound, 20))


def test_only_common_tasks_are_compared() -> None:
    one = [("r", "easy", 1.0), ("r", "hard", 1.0), ("r", "hard", 0.0)]
    found = estimate(one, against=[("r", "hard", 0.0), ("r", "other", 1.0)])
    assert found is not None
    assert (found.value, found.tasks) == (0.5, 1)


def test_equal_observations_have_no_spread() -> None:
    assert ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0))


def test_one_observation_says_nothing_of_spread() -> None:
    assert ratio_interval([2.0], [1.0]) is None


# --- how often intervals hold the truth

TIMES = 300


def trials(sizes: list[int], k: int, rate: float, alike: float, seed: int, gain: float = 0.0) -> tuple[Rows, Rows]:
    """Return trials of a model on packages of so many tasks, and of one that solves `gain` more. The ease of packages varies, the
    more the smaller `alike` is, and that of tasks within them; its mean over all possible packages is `rate`.
    """
    rng = np.random.default_rng(seed)
    packages = rng.beta(rate * alike, (1 - rate) * alike, len(sizes))
    found: tuple[Rows, Rows] = [], []
    for package, size in enumerate(sizes):
        middle = np.clip(packages[package], 1e-9, 1 - 1e-9)
        ease = rng.beta(2 * middle, 2 * (1 - middle), size)
        for rows, chance in zip(found, (ease, ease + gain * (1 - ease) / (1 - rate)), strict=True):
            passed = rng.random((size, k)) < chance[:, None]
            rows += [(str(package), f"{package}/{t}", float(v)) for t in range(size) for v in passed[t]]
    return found


UNLIKE = [25, 25, 5, 5, 5, 5, 5]
# Tasks of each package, mean, and how alike packages are: 1, most are solved or not; 5, they differ much; 30, little
RATES = [
    ([8] * 11, 0.1, 5), ([8] * 11, 0.1, 30), ([8] * 11, 0.03, 5), ([8] * 11, 0.03, 30), ([8] * 11, 0.03, 1), ([8] * 11, 0.4, 5),
    ([10] * 3, 0.4, 1), ([10] * 3, 0.4, 5), ([10] * 3, 0.1, 5), ([3] * 6, 0.3, 5), (UNLIKE, 0.4, 5), (UNLIKE, 0.1, 5), ([8] * 20, 0.4, 30),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "rate", "alike"), RATES)
def test_intervals_of_rates_hold_the_truth(sizes: list[int], rate: float, alike: float) -> None:
    found = [estimate(trials(sizes, 3, rate, alike, seed)[0]) for seed in range(TIMES)]
    assert sum(each.low <= rate <= each.high for each in found if each) / TIMES >= 0.93


@pytest.mark.parametrize(("sizes", "alike"), [([8] * 12, 5), ([8] * 11, 1), ([10] * 3, 5), (UNLIKE, 5), ([3] * 6, 30)])
def test_differences_hold_the_truth_and_pairing_narrows_them(sizes: list[int], alike: float) -> None:
    held, narrower = 0, 0
    for seed in range(TIMES):
        one, other = trials(sizes, 3, 0.4, alike, seed, gain=0.12)
        apart = estimate(other, against=one)
        alone = [each for each in (estimate(one), estimate(other)) if each]
        assert apart is not None
        assert apart.value == pytest.approx(alone[1].value - alone[0].value)
        held += apart.low <= 0.12 <= apart.high
        narrower += apart.high - apart.low < math.hypot(*(each.high - each.low for each in alone))
    assert 0.93 <= held / TIMES <= 0.99
    assert narrower / TIMES > 0.9


def test_two_packages_prove_next_to_nothing() -> None:
    found = [
        estimate(other, against=one) for one, other in (trials([10, 10], 3, 0.4, 5, s, gain=0.3) for s in range(TIMES))
    ]
    assert sum(each.low > 0 for each in found if each) / TIMES < 0.4  # of a gain of 30 points
    five = [
        estimate(other, against=one) for one, other in (trials([4] * 5, 3, 0.4, 5, s, gain=0.3) for s in range(TIMES))
    ]
    assert sum(each.low > 0 for each in five if each) / TIMES > 0.6  # of as many tasks


def files(number: int, size_spread: float, bits_spread: float, slope: float, seed: int) -> tuple[Array, Array]:
    """Return bits and bytes of files: sizes and bits per byte are log-normal, small files cost more where `slope` is below 0."""
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(0, size_spread, (4000, number))
    return sizes * rng.lognormal(0, bits_spread, (4000, number)) * sizes**slope, sizes


@pytest.mark.parametrize("number", [3, 4, 5, 10, 30])
@pytest.mark.parametrize("world", [(0.6, 0.3, 0.0), (1.0, 0.3, 0.0), (1.0, 0.4, -0.2), (1.5, 0.4, 0.0)])
def test_intervals_over_files_hold_the_truth(number: int, world: tuple[float, float, float]) -> None:
    size_spread, bits_spread, slope = world
    tilted = (size_spread * (1 + slope)) ** 2 / 2 - size_spread**2 / 2
    truth = math.exp(bits_spread**2 / 2 + tilted)
    bits, sizes = files(number, *world, seed=number)
    found = [ratio_interval(list(b), list(s)) for b, s in zip(bits[:1000], sizes[:1000], strict=True)]
    assert sum(each[0] <= truth <= each[1] for each in found if each) / 1000 >= 0.93


@pytest.mark.parametrize("number", [3, 5, 10, 30])
def test_differences_over_files_hold_the_truth(number: int) -> None:
    sizes = files(number, 1.0, 0.4, 0.0, seed=number)[1]
    noise = np.array(np.random.default_rng(9).normal(0.02, 0.05, sizes.shape))
    held = 0
    for size, gap in zip(sizes[:1000], noise[:1000], strict=True):
        low, high = ratio_interval(list(gap * size), list(size)) or (0.0, 0.0)
        held += low <= 0.02 <= high
    assert 0.93 <= held / 1000 <= 0.99
