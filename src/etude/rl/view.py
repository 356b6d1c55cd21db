"""A run on the terminal, while it goes on: numbers, their trend, and what is under way. In a pipe: one line a step.

Everything shown is in the rows of metrics.jsonl, so `etude rl watch` draws the same from the run's folder.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etude.progress import STATE_EVERY, Reporter, Task, duration
from etude.rl.metrics import added, mean, starting, weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from etude.rl.metrics import Row


BARS = "▁▂▃▄▅▆▇█"
TREND = 28  # steps of a trend
MEAN = 8  # steps of a mean
WIDE = 16  # characters of a bar of 100%
LABEL = "rl"


class View:
    """Shows a run, and writes its state for `etude status`. Use as a context manager. `rows`: of earlier sessions."""

    def __init__(self, reporter: Reporter, steps: int, rows: Sequence[Row] = ()) -> None:
        self._reporter, self._rows, self._now = reporter, list(rows), dict[str, int]()
        self._task = Task(LABEL, steps, "steps")
        self._task.skip(len(self._rows))
        self._shown_at = 0.0
        live = reporter.console.is_terminal and not reporter.quiet
        self._live = Live(console=reporter.console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._show(at_once=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the last news is a courtesy; the work itself reports a full disk
            self._show(at_once=True)
        if self._live:
            self._live.stop()

    def step(self, row: Row) -> None:
        self._rows.append(row)
        self._task.done = len(self._rows)
        if self._live is None:
            self._reporter.say(line(row, round(self._task.total)))
        for flag in row.get("flags", {}).values():
            self._reporter.say(flag, style="yellow")
        self._show(at_once=True)

    def pulse(self, now: Mapping[str, int], share: float) -> None:
        """Show what is under way, and the share of the next step that is done; may be called as often as one likes."""
        self._now, self._task.done = dict(now), len(self._rows) + share
        self._show()

    def _show(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._shown_at < STATE_EVERY:
            return
        self._shown_at = time.monotonic()
        state = self._task.state() | {"now": self._now}
        if self._live:
            self._live.update(dashboard(self._rows, state), refresh=True)
        if self._reporter.listener:
            self._reporter.listener(state)


def line(row: Row, steps: int) -> str:
    """Return a step in one plain line."""
    parts = [f"reward {number(row['reward'])}" if "reward" in row else "no episode ended"]
    parts += [f"{words} {show(row[name])}" for name, words, show in LINE if name in row]
    if invalid := sum(starting(row, "invalid_").values()):
        parts.append(f"{invalid} invalid")
    return f"step {row['step']} of {steps}: {', '.join(parts)}"


def number(value: float) -> str:
    """Return a number of any size in few characters."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if value else "0"


def percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 or not value else f"{100 * value:.2g}%"


def milliseconds(value: float) -> str:
    return f"{1000 * value:.3g} ms"


LINE = (
    ("solved", "solved", percent), ("best_of_group", "best of group", percent), ("entropy", "entropy", number), ("kl", "KL", number),
    ("teacher_gap", "to the teacher", number),
    ("mismatch_p99", "mismatch p99", number), ("sampled_per_second", "tokens/s sampled", number),
    ("trained_per_second", "trained", number), ("idle_sampling", "idle: sampling", percent), ("idle_training", "training", percent),
)  # fmt: skip
CURVES = (
    ("solved", "solved", percent), ("best_of_group", "best of group", percent), ("entropy", "entropy", number), ("kl", "KL", number),
    ("teacher_gap", "to the teacher", number),
    ("mismatch_mean", "mismatch, mean", number), ("mismatch_p99", "mismatch, p99", number), ("ratio_max", "ratio, largest", number),
    ("turns", "turns", number), ("sampled_per_second", "tokens/s sampled", number),
    ("trained_per_second", "tokens/s trained", number), ("swap_paused", "paused for weights", milliseconds),
)  # fmt: skip


def sparkline(values: Sequence[float]) -> str:
    """Return a trend as a line of bars; one that does not move is low."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def dashboard(rows: Sequence[Row], state: Mapping[str, Any]) -> RenderableType:
    """Return the whole view; `state` is a task's, with what is under way as `now`."""
    left = f", {duration(state['seconds_left'])} left" if state["seconds_left"] is not None else ""
    head = Text(f"step {int(state['done'])} of {state['total']:.0f}, {duration(state['seconds'])}{left}", "bold")
    counts = (f"{name.replace('_', ' ')} {count}" for name, count in state.get("now", {}).items())
    body = [Columns([_curves(rows), _side(rows)], padding=(0, 3))] if rows else []
    return Group(head, Text("   ".join(counts), "dim"), *body)


def _curves(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "now", f"mean of {MEAN}", f"last {TREND} steps"):
        table.add_column(name, justify="right" if name in {"now", f"mean of {MEAN}"} else "left", no_wrap=True)
    parts = [(f"reward_{part}", f"  {part}", number) for part in starting(rows[-1], "reward_")]
    for name, words, show in (("reward", "reward", number), *parts, *CURVES):
        values = [row[name] for row in rows if name in row]
        if values:
            recent, bold = mean(weighted(rows, name)[-MEAN:]), "bold" if name == "reward" else ""
            trend = Text(sparkline(values[-TREND:]), "cyan")
            table.add_row(Text(words, bold), Text(show(values[-1]), bold), show(recent), trend)
    return table


def _side(rows: Sequence[Row]) -> Text:
    """Return what is no curve: histograms and counts."""
    drawn = Text(no_wrap=True)
    for title, counts, show in _blocks(rows):
        drawn.append(f"{title}\n", "bold")
        for name, count in counts.items():
            drawn.append(f"  {name.replace('_', ' '):<12} {show(count):>6} ")
            drawn.append("█" * round(WIDE * count) * (show is percent) + "\n", "cyan")
    return drawn


def _blocks(rows: Sequence[Row]) -> Iterator[tuple[str, Mapping[str, float], Callable[[float], str]]]:
    if stale := starting(rows[-1], "staleness_"):
        shares = {name: tokens / sum(stale.values()) for name, tokens in stale.items()}
        yield "versions behind, of trained tokens", shares, percent
    yield "idle", starting(rows[-1], "idle_"), percent
    yield "groups so far", added(rows, "groups_"), number
    if causes := added(rows, "invalid_"):
        yield "invalid episodes so far", causes, number
