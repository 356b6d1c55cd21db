from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.bench import statistics
from etude.bench.statistics import average, estimate, pass_all, pass_at, ratio_interval

Rows = list[tuple[str, str, float]]
RNG = np.random.default_rng


def rows(outcomes: dict[str, dict[str, list[int]]]) -> Rows:
    return [(r, t, float(v)) for r, tasks in outcomes.items() for t, values in tasks.items() for v in values]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_and_pass_all_k_are_the_mean_over_all_ways_to_pick_k_trials(outcomes: list[bool], k: int) -> None:
    found = [estimate([("r", "t", float(each)) for each in outcomes], one(k), least=k) for one in (pass_at, pass_all)]
    if k > len(outcomes):
        assert found == [None, None]
        return
    picks = list(itertools.combinations(outcomes, k))
    exact = [sum(map(each, picks)) / len(picks) for each in (any, all)]
    assert [each.value for each in found if each] == pytest.approx(exact)


Outcomes = dict[str, dict[str, list[int]]]


def mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def exact_bootstrap(outcomes: Outcomes) -> Counter[float]:
    """All draws of repositories, of as many tasks of each, and of trials: means with their chances, deviations shrunk as documented."""
    found: Counter[float] = Counter()
    every = sum(map(len, outcomes.values()))
    middles = {r: mean([mean(trials) for trials in tasks.values()]) for r, tasks in outcomes.items()}

    def slots(repository: str) -> Counter[float]:
        """What one redrawn task of a repository adds, by chance."""
        values: Counter[float] = Counter()
        for trials in outcomes[repository].values():
            for again in itertools.product(trials, repeat=len(trials)):
                value = middles[repository] + (mean(trials) - middles[repository]) / math.sqrt(len(outcomes))
                value += (mean(list(again)) - mean(trials)) / math.sqrt(every)
                values[value] += 1 / len(trials) ** len(trials) / len(outcomes[repository])
        return values

    for drawn in itertools.product(outcomes, repeat=len(outcomes)):
        for picks in itertools.product(*(slots(r).items() for r in drawn for _ in outcomes[r])):
            chance = math.prod(chance for _, chance in picks) / len(outcomes) ** len(outcomes)
            found[round(mean([value for value, _ in picks]), 9)] += chance
    return found


def test_the_bootstrap_draws_as_all_draws_enumerated() -> None:
    outcomes: Outcomes = {"a": {"a1": [0, 1, 1], "a2": [0, 0, 1]}, "b": {"b1": [1, 1]}}
    exact = exact_bootstrap(outcomes)
    assert sum(exact.values()) == pytest.approx(1)
    middle = sum(value * chance for value, chance in exact.items())
    spread = math.sqrt(sum((value - middle) ** 2 * chance for value, chance in exact.items()))
    by_task = statistics._by_task(rows(outcomes), 1)
    sample, worth = statistics._sample(by_task, by_task), np.array([2 / 3, 1 / 3, 1])
    drawn = np.concatenate([statistics._redrawn([sample], worth, average, RNG(seed)) for seed in range(20)])
    assert set(np.round(drawn, 9)) <= set(exact)
    assert drawn.mean() == pytest.approx(middle, abs=4 * spread / math.sqrt(len(drawn)))
    assert drawn.std() == pytest.approx(spread, rel=0.03)
    for value, chance in exact.items():
        assert np.isclose(drawn, value).mean() == pytest.approx(chance, abs=0.015)


@pytest.mark.parametrize(("value", "low", "high"), [(0, 0.0, 1 - 0.025 ** (1 / 30)), (1, 0.025 ** (1 / 30), 1.0)])
def test_tasks_that_all_end_alike_are_no_proof(value: int, low: float, high: float) -> None:
    found = estimate([(f"r{n % 3}", f"t{n}", value) for n in range(30) for _ in range(5)])
    assert found is not None
    assert found == pytest.approx((value, low, high, 30))


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


def test_a_difference_of_rates_stays_within_what_is_possible() -> None:
    after = [
        (package, f"{package}{at}", float(package == "learnt")) for package in ("learnt", "not") for at in range(9)
    ]
    found = estimate(after, against=[(package, task, 0.0) for package, task, _ in after])
    assert found
    assert (found.value, found.high) == (0.5, 1.0)  # two packages: their t would reach to 2
    assert -1.0 <= found.low < 0


@pytest.mark.parametrize("statistic", [pass_at(3), pass_all(3)])
def test_an_interval_holds_its_estimate_though_redrawn_trials_are_biased(statistic: statistics.Statistic) -> None:
    found = estimate(
        [(f"r{n % 4}", f"t{n}", float(m == 0 or n % 2)) for n in range(20) for m in range(3)], statistic, least=3
    )
    assert found is not None
    assert 0 <= found.low <= found.value <= found.high <= 1


def noisy(repositories: int, tasks: int, k: int, seed: int, shift: float = 0.0, a: float = 2.0, b: float = 3.0) -> Rows:
    """Trials of tasks whose ease varies by repository and task; the mean over all possible tasks is a / (a + b), plus `shift`."""
    dice, trials, found = Random(f"{repositories} {seed}"), Random(f"{shift} {seed}"), []
    for repository in range(repositories):
        middle = dice.betavariate(a, b)
        for task in range(tasks):
            ease = dice.betavariate(2 * middle + 1e-9, 2 * (1 - middle) + 1e-9)
            chance = ease + shift * (1 - ease) / 0.6
            found += [(str(repository), f"{repository}/{task}", float(trials.random() < chance)) for _ in range(k)]
    return found


@pytest.mark.parametrize(("a", "b", "least", "most"), [(2, 3, 0.87, 0.99), (0.1, 4.9, 0.95, 1.0)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(a: float, b: float, least: float, most: float) -> None:
    found = [estimate(noisy(12, 8, 3, seed, a=a, b=b), seed=seed) for seed in range(100)]
    covered = sum(each.low <= a / (a + b) <= each.high for each in found if each) / len(found)
    assert least <= covered <= most


def test_differences_cover_the_truth_and_pairing_narrows_them() -> None:
    covered, narrower, width = 0, 0, 0.0
    for seed in range(40):
        one, other = noisy(12, 8, 3, seed, shift=0.12), noisy(12, 8, 3, seed)
        apart = estimate(one, against=other, seed=seed)
        alone = [each for each in (estimate(one, seed=seed), estimate(other, seed=seed)) if each]
        assert apart is not None
        assert apart.value == pytest.approx(alone[0].value - alone[1].value)
        covered += apart.low <= 0.12 <= apart.high
        width += apart.high - apart.low
        narrower += apart.high - apart.low < math.hypot(*(each.high - each.low for each in alone))
    assert covered / 40 >= 0.85
    assert width / 40 < 0.2  # 1.6 times as much, were all levels drawn at full weight
    assert narrower >= 38


def test_models_that_never_differ_may_still_differ() -> None:
    same = [("r", f"t{n}", float(n % 2)) for n in range(20) for _ in range(4)]
    bound = 1 - 0.025 ** (1 / 20)
    assert estimate(same, against=same) == pytest.approx((0.0, -bound, bound, 20))


def test_only_common_tasks_are_compared() -> None:
    one = [("r", "easy", 1.0), ("r", "hard", 1.0), ("r", "hard", 0.0)]
    found = estimate(one, against=[("r", "hard", 0.0), ("r", "other", 1.0)])
    assert found is not None
    assert (found.value, found.tasks) == (0.5, 1)


def test_the_same_seed_gives_the_same_numbers_in_any_order_of_rows() -> None:
    plain = noisy(5, 4, 3, seed=1)
    mixed = sorted(plain, key=lambda row: row[1][::-1])
    assert estimate(plain, seed=7) == estimate(mixed, seed=7) != estimate(plain, seed=8)


def test_many_trials_are_redrawn_in_blocks() -> None:
    many = noisy(20, 50, 9, seed=0)
    assert statistics.CELLS // len(many) < statistics.RESAMPLES
    by_task = statistics._by_task(many, 1)
    worth = np.array([mean(by_task[name]) for name in sorted(by_task)])
    drawn = statistics._redrawn([statistics._sample(by_task, by_task)], worth, average, RNG(0))
    assert drawn.shape == (statistics.RESAMPLES,)
    assert drawn.mean() == pytest.approx(sum(value for *_, value in many) / len(many), abs=0.02)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        sizes = rng.uniform(50, 150, size=40)
        parts = sizes * rng.normal(1.0, 0.3, size=40)
        interval = ratio_interval(parts.tolist(), sizes.tolist(), seed=trial)
        assert interval is not None
        covered += interval[0] <= 1.0 <= interval[1]
    assert 0.88 <= covered / 200 <= 0.99


def test_equal_observations_have_no_spread() -> None:
    assert ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], seed=0) == pytest.approx((2.0, 2.0))


def test_one_observation_says_nothing_of_spread() -> None:
    assert ratio_interval([2.0], [1.0], seed=0) is None
