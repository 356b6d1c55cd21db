"""Schedules at every boundary, against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.training.optimiser import factor
from etude.training.settings import ScheduleSettings

HALF = 0.7071067811865476  # cos 45°


def curve(steps: int, **settings: Any) -> list[float]:
    chosen = ScheduleSettings(**settings)
    return [factor(chosen, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "linear", "warmup": 0.0}, [1, 0.75, 0.5, 0.25, 0]),
        ({"kind": "linear", "warmup": 0.4, "floor": 0.2}, [0.5, 1, 1, 0.6, 0.2]),
        ({"kind": "linear", "warmup": 0.25}, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        ({"kind": "cosine", "warmup": 0.0}, [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0]),
        ({"kind": "cosine", "warmup": 0.5, "floor": 0.1}, [1 / 3, 2 / 3, 1, 1, 0.55, 0.1]),
        ({"kind": "wsd", "warmup": 0.2, "decay": 0.4}, [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"kind": "wsd", "warmup": 0.5, "decay": 0.5, "floor": 0.5}, [0.5, 1, 0.75, 0.5]),
        ({"kind": "wsd", "warmup": 0.0, "decay": 1.0}, [0.75, 0.5, 0.25, 0]),
        (
            {"kind": "infinite", "warmup": 0.2, "cool": 0.2, "decay": 0.2, "constant": 0.5, "floor": 0.1},
            [0.5, 1, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.1],
        ),
        ({"kind": "infinite", "warmup": 0.0, "cool": 0.5, "decay": 0.5, "constant": 0.4}, [0.7, 0.4, 0.2, 0]),
        # Runs so short that a part rounds to nothing, or to everything: they still end at the floor, but for a single step.
        ({"kind": "wsd", "warmup": 0.0, "decay": 0.1}, [1, 0]),
        ({"kind": "linear", "warmup": 0.9}, [1, 0]),
        ({"kind": "infinite", "warmup": 0.4, "cool": 0.5, "decay": 0.1}, [1, 0]),
        ({"kind": "cosine", "warmup": 0.0}, [1]),  # or it would not train at all
    ],
)
def test_exact_numbers(settings: dict[str, Any], expected: list[float]) -> None:
    assert curve(len(expected), **settings) == pytest.approx(expected, abs=1e-12)


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = ("linear", "cosine", "wsd", "infinite")) -> ScheduleSettings:
    """Draw settings that are valid by construction: each part takes some of what those before it have left."""
    part = st.floats(0.01, 0.99)
    kind, left = draw(st.sampled_from(kinds)), 1.0
    given: dict[str, Any] = {"kind": kind}
    for name in {"wsd": ["decay"], "infinite": ["decay", "cool"]}.get(kind, []):
        given[name] = left * draw(part)
        left -= given[name]
    given["warmup"] = draw(st.just(0.0) | part) * left
    if kind == "infinite":
        given["constant"] = draw(part)
    given["floor"] = draw(st.floats(0, 1)) * given.get("constant", 1.0)
    return ScheduleSettings.model_validate(given)


@given(schedules(), st.integers(2, 300))
def test_every_schedule_rises_to_its_peak_then_falls_to_its_floor(settings: ScheduleSettings, steps: int) -> None:
    values = [factor(settings, step, steps) for step in range(steps)]
    rising = min(round(settings.warmup * steps), steps - 1)
    assert all(-1e-12 <= value <= 1 + 1e-12 for value in values)
    assert values[:rising] == pytest.approx([(step + 1) / rising for step in range(rising)])
    rest = values[max(rising - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rest))
    assert values[-1] == pytest.approx(settings.floor, abs=1e-12)


@given(schedules(("wsd", "infinite")), st.integers(50, 300))
def test_the_constant_part_is_constant(settings: ScheduleSettings, steps: int) -> None:
    level = settings.constant if settings.kind == "infinite" else 1.0
    cooled = settings.cool if settings.kind == "infinite" else 0.0
    begin, end = round((settings.warmup + cooled) * steps) + 2, steps - round(settings.decay * steps) - 2
    assert all(factor(settings, step, steps) == level for step in range(begin, end))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "linear", "decay": 0.3}, "`decay` has no effect with the schedule 'linear'"),
        ({"kind": "cosine", "constant": 0.4}, "`constant` has no effect with the schedule 'cosine'"),
        ({"kind": "wsd", "cool": 0.2}, "`cool` has no effect with the schedule 'wsd'"),
        ({"kind": "wsd", "warmup": 0.6, "decay": 0.5}, "take 1.10 of the run, more than all of it"),
        ({"kind": "infinite", "warmup": 0.5, "cool": 0.4}, "take 1.10 of the run, more than all of it"),
        ({"kind": "infinite", "floor": 0.6}, "`floor` 0.6 is above `constant` 0.5, so the last fall would rise"),
        ({"kind": "sawtooth"}, "Input should be 'linear', 'cosine', 'wsd' or 'infinite'"),
        ({"warmup": 1.0}, "less than 1"),
        ({"floor": float("nan")}, "finite number"),
        ({"warm_up": 0.1}, "Extra inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ScheduleSettings.model_validate(settings)
    (error,) = caught.value.errors()
    assert message in error["msg"]
    assert "\n" not in error["msg"]
