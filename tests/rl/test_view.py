from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from etude.progress import Reporter
from etude.rl.view import BARS, View, line, number, percent, sparkline
from tests.rl.runs import rows


def reporter(*, terminal: bool, width: int = 140) -> tuple[Reporter, io.StringIO]:
    said = io.StringIO()
    return Reporter(Console(file=said, force_terminal=terminal, width=width, height=60, highlight=False)), said


def test_in_a_pipe_each_step_is_one_line_and_so_is_a_flag() -> None:
    news, said = reporter(terminal=False)
    told: list[dict[str, Any]] = []
    news.listener = told.append
    made = rows(4)
    with View(news, 6, made[:1]) as view:
        view.pulse({"open": 3}, 0.25)
        for row in made[1:]:
            view.step(row)
    assert said.getvalue().splitlines() == [
        line(made[1], 6),
        line(made[2], 6),
        "step 3: calls is 4.5, for 3 steps above 4 (usual in this run: 1)",
        line(made[3], 6),
    ]
    assert (told[-1]["done"], told[-1]["total"], told[-1]["skipped"], told[-1]["now"]) == (4.0, 6, 1.0, {"open": 3})


def test_the_line_of_a_step() -> None:
    assert line(rows(2)[1], 9) == (
        "step 2 of 9: reward 0.25, solved 50%, best of group 100%, entropy 0.5, tokens/s sampled 20, trained 50, "
        "idle: sampling 100%, training 50%, 1 invalid"
    )
    assert line({"step": 3}, 9) == "step 3 of 9: no episode ended"


def test_a_terminal_shows_all_of_it_and_is_left_clean() -> None:
    news, said = reporter(terminal=True)
    with View(news, 6) as view:
        for row in rows(4):
            view.step(row)
        view.pulse({"open": 3}, 0.25)
        view._show(at_once=True)
        shown = said.getvalue()
    for words in ("step 4 of 6", "open 3", "reward", "outcome", "length", "solved", "best of group", "entropy", "versions behind",
                  "idle", "training", "ready", "flat", "sandbox did not start", "tokens/s sampled", "paused for weights", "20 ms"):  # fmt: skip
        assert words in shown, words
    assert "\x1b[2K" in said.getvalue()[len(shown) :]  # the last picture is wiped away


def test_a_quiet_reporter_shows_nothing() -> None:
    news, said = reporter(terminal=True)
    news.quiet = True
    with View(news, 6) as view:
        view.step(rows(1)[0])
    assert said.getvalue() == ""


def test_a_full_disk_at_the_end_does_not_hide_why_it_ended() -> None:
    news, _ = reporter(terminal=False)

    def full(_: object) -> None:
        raise OSError

    with pytest.raises(ZeroDivisionError), View(news, 6):
        news.listener = full
        raise ZeroDivisionError


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_a_trend_goes_as_its_values_go(values: list[float]) -> None:
    drawn = sparkline(values)
    heights = [BARS.index(bar) for bar in drawn]
    assert len(drawn) == len(values)
    for one, height in zip(values, heights, strict=True):
        for other, against in zip(values, heights, strict=True):
            assert one <= other or height >= against
    if values and max(values) > min(values):
        assert (min(heights), max(heights)) == (0, len(BARS) - 1)


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0, 0.123456, -0.00012345, 12.3456, 1234.5, 1e7)] == [
        "0", "0.123", "-0.000123", "12.3", "1,234", "10,000,000"
    ]  # fmt: skip
    assert [percent(value) for value in (0, 0.0123, 0.456, 1)] == ["0%", "1.2%", "46%", "100%"]
