from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.monitor import FAILURE_MODES, PATIENCE, Flag, Monitor


def flags(values: Iterable[float], name: str = "turns", **given: float) -> list[Flag]:
    monitor = Monitor(**given)  # type: ignore[arg-type]
    return [flag for step, value in enumerate(values, 1) for flag in monitor.add(step, {name: value})]


CALM = [10.0, 11.0] * 5  # mean 10.5, deviation 0.527, so 4 of them end at 12.6 and 8.4


def test_a_drift_is_flagged_when_it_has_lasted() -> None:
    assert flags([*CALM, 13.0, 13.0]) == []
    assert flags([*CALM, 13.0, 13.0, 10.0, 13.0, 13.0]) == []
    (flag,) = flags([*CALM, 13.0, 13.0, 13.0])
    assert (flag.step, flag.behaviour, flag.value, flag.usual) == (13, "turns", 13.0, 10.5)
    assert flag.bound == pytest.approx(10.5 + 4 * math.sqrt(10 * 0.25 / 9))
    assert str(flag) == "step 13: turns is 13, for 3 steps above 12.6 (usual in this run: 10.5)"


def test_it_is_flagged_once_until_it_came_back_for_as_long() -> None:
    out, back = [20.0] * PATIENCE, [10.5] * PATIENCE
    assert len(flags([*CALM, *out * 9])) == 1
    assert len(flags([*CALM, *out, 10.5, *out])) == 1
    assert [flag.step for flag in flags([*CALM, *out, *back, *out])] == [13, 19]


def test_what_falls_is_flagged_but_not_faults_that_do() -> None:
    fallen = [*CALM, 5.0, 5.0, 5.0]
    (flag,) = flags(fallen)
    assert "for 3 steps below 8.39" in str(flag)
    assert flags(fallen, "malformed") == []
    assert len(flags([*CALM, 15.0, 15.0, 15.0], "malformed")) == 1


def test_what_never_varied_needs_more_than_a_trifle() -> None:
    assert flags([*[0.0] * 10, *[0.04] * 5], "summaries") == []
    assert len(flags([*[0.0] * 10, *[0.05] * 5], "summaries")) == 1
    assert flags([*[100.0] * 10, *[119.0] * 5]) == []
    assert len(flags([*[100.0] * 10, *[121.0] * 5])) == 1


@pytest.mark.parametrize("name", FAILURE_MODES)
def test_known_failure_modes_are_flagged_wherever_they_stand(name: str) -> None:
    bound = FAILURE_MODES[name]
    from_the_beginning = flags([bound + 0.05] * 20, name)
    assert [(flag.step, flag.usual, flag.bound) for flag in from_the_beginning] == [(PATIENCE, None, bound)]
    assert "a known failure mode" in str(from_the_beginning[0])
    assert flags([bound] * 20, name) == []
    grown = flags([*[0.1] * 10, *[bound - 0.05] * 5, *[bound + 0.05] * 5], name)
    assert [(flag.step, flag.usual) for flag in grown] == [(13, pytest.approx(0.1)), (18, None)]
    assert len(flags([*[0.1] * 10, *[bound + 0.05] * 5], name)) == 1  # a failure mode and a drift at once


def test_behaviours_are_watched_apart_and_a_step_may_say_nothing_of_one() -> None:
    monitor = Monitor(window=2, threshold=4.0)
    for step in (1, 2):
        monitor.add(step, {"turns": 10.0, "calls": 5.0})
    found = [monitor.add(step, {"turns": 99.0} | ({"calls": 99.0} if step % 2 else {})) for step in range(3, 9)]
    assert [[flag.behaviour for flag in each] for each in found] == [[], [], ["turns"], [], ["calls"], []]


def test_a_value_that_is_no_number_is_out() -> None:
    assert len(flags([*CALM, *[math.nan] * 3])) == 1
    assert len(flags([math.nan] * 3, "shell_share")) == 1


def test_noise_alone_hardly_ever_flags_and_a_drift_within_it_is_found() -> None:
    false, found, runs = 0, set[int](), 30
    for seed in range(runs):
        drawn, monitor = random.Random(seed), Monitor()
        for step in range(200):
            told = monitor.add(
                step, {f"b{n}": drawn.gauss(10, 2) for n in range(20)} | {"worse": drawn.gauss(10 + step / 5, 2)}
            )
            false += sum(flag.behaviour != "worse" for flag in told)
            found |= {seed for flag in told if flag.behaviour == "worse"}
    assert false / runs <= 0.1  # 0.05 in 150 runs
    assert len(found) == runs


def test_swinging_from_side_to_side_is_no_drift() -> None:
    assert flags([*CALM, *[5.0, 15.0] * 9]) == []
    assert [flag.value for flag in flags([*CALM, *[15.0] * 3, *[5.0] * 3])] == [15.0, 5.0]


@given(st.lists(st.floats(0, 1), min_size=30, max_size=30), st.integers(0, 30))
def test_fed_again_after_a_kill_it_says_the_same(values: list[float], killed: int) -> None:
    whole = flags(values, "shell_share", window=5)
    again = Monitor(window=5)
    for step, value in enumerate(values[:killed], 1):
        again.add(step, {"shell_share": value})
    rest = [
        flag
        for step, value in enumerate(values[killed:], killed + 1)
        for flag in again.add(step, {"shell_share": value})
    ]
    assert rest == [flag for flag in whole if flag.step > killed]
