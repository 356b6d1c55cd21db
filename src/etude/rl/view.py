"""A run on the terminal, while it goes on: numbers, their trend, and what is under way. In a pipe: one line a step.

Everything shown is in the rows of metrics.jsonl, so `etude rl watch` draws the same from the run's folder.

The course of a run: means over its steps in which every episode counts once.

Episodes end in bursts: one step sees two hundred of them and the next a handful. A mean over steps would let that handful, which are
often the last and the slowest, say what the policy can do: a run that rose was once told to have fallen.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etude.progress import STATE_EVERY, Task, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Row = Mapping[str, Any]
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

    from etude.progress import Reporter


OF_EPISODES = ("reward", "solved", "best_of_group", "part_", "behaviour_", "episode_", "turns")
Weighted = tuple[float, float]  # a number of a step, and how much it counts


def count(row: Row, name: str) -> float:
    """Return how much a step counts: as often as there were episodes, if the number is a mean over them."""
    return float(row.get("episodes", 1)) if name.startswith(OF_EPISODES) else 1.0


def weighted(rows: Iterable[Row], name: str) -> list[Weighted]:
    """Return a number of the steps that have it, and how much each counts."""
    return [(row[name], count(row, name)) for row in rows if name in row]


def mean(found: Sequence[Weighted]) -> float:
    """Return the mean."""
    return sum(value * times for value, times in found) / sum(times for _, times in found)


def ends(rows: Iterable[Row], name: str) -> tuple[float, float] | None:
    """Return the mean of a number in the first and in the last tenth of a run; a step across the border counts in part."""
    found = weighted(rows, name)
    return (_first_tenth(found), _first_tenth(found[::-1])) if found else None


def _first_tenth(found: Sequence[Weighted]) -> float:
    left, taken = sum(times for _, times in found) / 10, []
    for value, times in found:
        taken.append((value, min(times, left)))
        left -= times
        if left <= 0:
            break
    return mean(taken)


def smooth(found: Sequence[Weighted], reach: int) -> list[float]:
    """Return the mean of each number and those around it, `reach` to each side: centred, so that nothing seems late."""
    return [mean(found[max(0, place - reach) : place + reach + 1]) for place in range(len(found))]


BARS = "▁▂▃▄▅▆▇█"
TREND = 28  # steps of a trend
MEAN = 8  # steps of a mean
WIDE = 16  # characters of a bar of 100%
LABEL = "rl"


class View:
    """Shows a run and tells `etude status` of it. Use as a context manager."""

    def __init__(self, reporter: Reporter, steps: int, rows: Sequence[Row] = ()) -> None:
        """`rows`: of earlier sessions."""
        self._reporter, self._rows, self._now = reporter, list(rows), dict[str, int]()
        self._task = Task(LABEL, steps, "steps")
        self._task.skip(len(self._rows))
        self._told = 0.0
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
        """A step is trained."""
        self._rows.append(row)
        self._task.advance()
        if self._live is None:
            self._reporter.say(line(row, round(self._task.total)))
        for flag in row.get("flags", {}).values():
            self._reporter.say(flag, style="yellow")
        self._show(at_once=True)

    def pulse(self, now: Mapping[str, int]) -> None:
        """Tell what is under way; may be called as often as one likes."""
        self._now = dict(now)
        self._show()

    def _show(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._told < STATE_EVERY:
            return
        self._told = time.monotonic()
        state = self._task.state() | {"now": self._now}
        if self._live:
            self._live.update(dashboard(self._rows, state), refresh=True)
        if self._reporter.listener:
            self._reporter.listener(state)


def line(row: Row, steps: int) -> str:
    """Return a step in one plain line."""
    known = [
        (f"reward {number(row['reward'])}" if "reward" in row else "no episode ended"),
        *(f"{words} {show(row[name])}" for name, words, show in LINE if name in row),
        *([f"{count} invalid"] if (count := sum(starting(row, "invalid_").values())) else []),
    ]
    return f"step {row['step']} of {steps}: {', '.join(known)}"


def number(value: float) -> str:
    """Return a number of any size in few characters."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if value else "0"


def percent(value: float) -> str:
    """Return a share."""
    return f"{value:.0%}" if value >= 0.1 or not value else f"{100 * value:.2g}%"


def milliseconds(value: float) -> str:
    """Return a short time."""
    return f"{1000 * value:.3g} ms"


LINE = (
    ("solved", "solved", percent), ("best_of_group", "best of group", percent), ("entropy", "entropy", number), ("kl", "KL", number),
    ("mismatch_p99", "mismatch p99", number), ("sampled_per_second", "tokens/s sampled", number),
    ("trained_per_second", "trained", number), ("idle_sampling", "idle: sampling", percent), ("idle_training", "training", percent),
)  # fmt: skip
CURVES = (
    ("solved", "solved", percent), ("best_of_group", "best of group", percent), ("entropy", "entropy", number), ("kl", "KL", number),
    ("mismatch_mean", "mismatch, mean", number), ("mismatch_p99", "mismatch, p99", number), ("ratio_max", "ratio, largest", number),
    ("turns", "turns", number), ("sampled_per_second", "tokens/s sampled", number),
    ("trained_per_second", "tokens/s trained", number), ("swap_paused", "paused for weights", milliseconds),
)  # fmt: skip


def starting(row: Row, prefix: str) -> dict[str, Any]:
    """Return the numbers whose names begin so, without that."""
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def sparkline(values: Sequence[float]) -> str:
    """Return a trend as a line of bars; one that does not move is low."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def dashboard(rows: Sequence[Row], state: Mapping[str, Any]) -> RenderableType:
    """Return the whole view; `state` is a task's, with what is under way as `now`."""
    left = f", {duration(state['seconds_left'])} left" if state["seconds_left"] is not None else ""
    head = Text(f"step {state['done']:.0f} of {state['total']:.0f}, {duration(state['seconds'])}{left}", "bold")
    under_way = Text(
        "   ".join(f"{name.replace('_', ' ')} {count}" for name, count in state.get("now", {}).items()), "dim"
    )
    if not rows:
        return Group(head, under_way)
    return Group(head, under_way, Columns([_curves(rows), _side(rows)], padding=(0, 3)))


def _curves(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "now", f"mean of {MEAN}", f"last {TREND} steps"):
        table.add_column(name, justify="right" if name in {"now", f"mean of {MEAN}"} else "left", no_wrap=True)
    parts = [(f"reward_{part}", f"  {part}", number) for part in starting(rows[-1], "reward_")]
    for name, words, show in (("reward", "reward", number), *parts, *CURVES):
        values = [row[name] for row in rows if name in row]
        if values:
            recent = mean(weighted(rows, name)[-MEAN:])
            bold = "bold" if name == "reward" else ""
            table.add_row(
                Text(words, bold), Text(show(values[-1]), bold), show(recent), Text(sparkline(values[-TREND:]), "cyan")
            )
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
    stale = starting(rows[-1], "staleness_")
    if stale:
        yield (
            "versions behind, of trained tokens",
            {name: share / sum(stale.values()) for name, share in stale.items()},
            percent,
        )
    yield "idle", starting(rows[-1], "idle_"), percent
    yield "groups so far", added(rows, "groups_"), number
    if causes := added(rows, "invalid_"):
        yield "invalid episodes so far", causes, number


def added(rows: Sequence[Row], prefix: str) -> Counter[str]:
    """Return counts whose names begin so, added up over the steps, the largest first."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(starting(row, prefix))
    return Counter(dict(found.most_common()))
