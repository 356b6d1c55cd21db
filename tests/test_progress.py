from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from etude.errors import Interrupted
from etude.progress import Reporter, Task, amount, duration, speed


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7799, "2 h 09 min"), (59.4, "59 s")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(999, "B", "999 B"), (93e6, "B", "93.0 MB"), (5e12, "B", "5000.0 GB"), (16384, "tokens", "16,384 tokens")],
)
def test_amounts(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown


def test_rate_and_time_left_speak_of_this_session() -> None:
    task = Task("x", total=100, unit="steps", started=time.monotonic() - 10)
    task.skip(50)
    task.advance(25)
    assert task.rate == pytest.approx(2.5, rel=0.01)
    assert task.seconds_left == pytest.approx(10, rel=0.01)
    assert "75 of 100 steps (75%), 2.5 steps/s, 10 s left" in task.line()


@pytest.mark.parametrize(
    ("done", "seconds", "shown"),
    [(0, 10, "0.0 x/s"), (11, 100, "0.1 x/s"), (9, 100, "5.4 x/min"), (1, 500, "7.2 x/h"), (0, 0, "0.0 x/s")],
)
def test_slow_work_is_told_by_the_minute_or_the_hour(done: int, seconds: float, shown: str) -> None:
    assert speed(Task("", 100, "x", done, started=time.monotonic() - seconds)) == shown


def test_a_log_gets_plain_lines_and_only_for_long_tasks() -> None:
    log = io.StringIO()
    reporter = Reporter(Console(file=log))
    with reporter.task("quick", 2, "steps") as task:
        task.advance()
    assert log.getvalue() == ""
    with reporter.task("slow", 2, "steps") as task:
        task.started -= 3
        task.advance()
    assert log.getvalue().startswith("slow: 1 of 2 steps (50%)")
    assert "\x1b" not in log.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    with Reporter(Console(file=screen, force_terminal=True, width=100)).task("work", 2, "steps") as task:
        task.advance(2)
    assert "work" in screen.getvalue()
    assert "100%" in screen.getvalue()


def test_the_listener_hears_the_last_state() -> None:
    reporter = Reporter(quiet=True)
    heard: list[dict[str, object]] = []
    reporter.listener = heard.append
    with reporter.task("work", 3, "steps") as task:
        for _ in range(3):
            task.advance()
    assert heard[0]["done"] == 0
    assert heard[-1]["done"] == 3


def test_every_advance_is_a_place_to_stop() -> None:
    reporter = Reporter(quiet=True)

    def stop() -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted), reporter.task("work", 3, "steps") as task:
        reporter.check_stop = stop
        task.advance()
