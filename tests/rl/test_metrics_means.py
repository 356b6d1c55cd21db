"""Means over the steps of a run, against a list in which every episode stands once."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.metrics import ENOUGH, ends, smooth, weighted

STEPS = st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 40)), min_size=1, max_size=60)


def rows(steps: list[tuple[float, int]], name: str = "reward") -> list[dict[str, object]]:
    return [{"step": at, name: value, "episodes": episodes} for at, (value, episodes) in enumerate(steps, 1)]


@given(STEPS)
def test_the_tenths_are_those_of_a_list_of_all_episodes(steps: list[tuple[float, int]]) -> None:
    each = [
        value for value, episodes in steps for _ in range(10 * episodes)
    ]  # ten times, so that a tenth is a whole number
    tenth = max(len(each) // 10, 10 * ENOUGH)
    found = ends(rows(steps), "reward")
    border = [at for at, (_, episodes) in enumerate(steps) for _ in range(10 * episodes)]  # the step of each
    if len(each) < 2 * tenth or border[tenth - 1] >= border[-tenth]:
        assert found is None
    else:
        assert found == pytest.approx((fmean(each[:tenth]), fmean(each[-tenth:])), abs=1e-9)


@given(STEPS)
def test_what_is_no_mean_of_episodes_counts_once_a_step(steps: list[tuple[float, int]]) -> None:
    alike = [(value, 1) for value, _ in steps]
    assert ends(rows(steps, "entropy"), "entropy") == ends(rows(alike, "entropy"), "entropy")


def test_a_last_step_of_a_few_failures_does_not_make_a_run_fall() -> None:
    found = ends(rows([(0.2, 64), (0.4, 64), (0.7, 64), (0.0, 2)], "solved"), "solved")
    assert found == pytest.approx((0.2, 0.7 * 28 / 30))
    assert ends([{"step": 1, "episodes": 0}], "solved") is None


@pytest.mark.parametrize("steps", [
    [(0.27, 26), (0.5, 2)], [(0.27, 200), (0.5, 2)], [(0.27, 200), (0.5, 29)], [(0.27, 29), (0.5, 29)]
])  # fmt: skip
def test_a_change_takes_enough_episodes_on_both_sides_and_in_other_steps(steps: list[tuple[float, int]]) -> None:
    assert ends(rows(steps, "solved"), "solved") is None
    assert ends(rows([(0.27, 30), *steps, (0.5, 30)], "solved"), "solved") is not None
    assert ends(rows([(0.5, 1000)], "solved"), "solved") is None


@given(STEPS, st.integers(0, 5))
def test_a_mean_of_neighbours_is_centred_and_counts_episodes(steps: list[tuple[float, int]], reach: int) -> None:
    brute = [
        fmean(value for at, (value, episodes) in enumerate(steps) if abs(at - place) <= reach for _ in range(episodes))
        for place in range(len(steps))
    ]
    assert smooth(weighted(rows(steps), "reward"), reach) == pytest.approx(brute, abs=1e-9)
