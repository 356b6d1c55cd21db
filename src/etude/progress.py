"""Progress with rate and time left, for people, for logs and for `etude status`.

On a terminal: a bar. In a pipe or a log file: a plain line when a task starts to be long (two seconds) and every ten
seconds after that. In both cases each state can also go to a listener; a run uses it to keep `progress.json`.
Everything goes to standard error, so that standard output stays what a script asked for.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import console as rich_console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from etude.errors import LAYOUT, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LONG = 2.0  # seconds after which a task deserves to be seen
LINE_EVERY = 10.0  # seconds between two lines in a log
STATE_EVERY = 0.5  # seconds between two states for the listener
BYTES = "B"
MULTIPLES = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"))
SLOW = 0.1  # units a second; fewer would be shown as 0.0


class Console(rich_console.Console):
    """A terminal that only we steer: control codes in what is printed are shown, whoever wrote them."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        ours = (part if part.control else Segment(visible(part.text, LAYOUT), part.style) for part in buffer)
        return super()._render_buffer(ours)


@dataclass
class Task:
    """One piece of long work: how much is done, of how much, since when."""

    label: str
    total: float
    unit: str
    done: float = 0.0
    started: float = field(default_factory=time.monotonic)
    skipped: float = 0.0  # done by an earlier session: counts as done, not for the rate
    on_change: Callable[[Task], object] | None = None
    next_line: float = LONG  # seconds after the start at which a log gets a line

    def advance(self, amount: float = 1) -> None:
        self.done += amount
        if self.on_change:
            self.on_change(self)

    def skip(self, amount: float = 1) -> None:
        """Count `amount` as done earlier, so that rate and time left speak of this session only."""
        self.skipped += amount
        self.advance(amount)

    @property
    def seconds(self) -> float:
        """Time this session has worked on it."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Units a second in this session."""
        return (self.done - self.skipped) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left; None while nothing is done."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def state(self) -> dict[str, Any]:
        """Return what `etude status` shows of it."""
        shown = ("label", "total", "unit", "done", "skipped", "rate", "seconds_left", "seconds")
        return {name: getattr(self, name) for name in shown}

    def line(self) -> str:
        """Return the state as one plain line."""
        left = duration(self.seconds_left) + " left" if self.seconds_left is not None else "time left unknown"
        share = f"{100 * self.done / self.total:.0f}%" if self.total else "0%"
        return f"{self.label}: {of_total(self)} ({share}), {speed(self)}, {left}"


def amount(value: float, unit: str) -> str:
    """Return a count with its unit; bytes in the usual multiples."""
    if unit != BYTES:
        return f"{value:,.0f} {unit}"
    if value < 1000:
        return f"{value:.0f} B"
    size, multiple = next(((size, name) for size, name in MULTIPLES if value < 1000 * size), MULTIPLES[-1])
    return f"{value / size:.1f} {multiple}"


def counted(counts: Any) -> str:
    """Return counts by name as people write them: 3 kept, 1 too easy."""
    if not isinstance(counts, dict):
        return f"{counts:,}"
    listed = (
        f"{name} ({counted(each)})" if isinstance(each, dict) else f"{each:,} {name or 'none'}"
        for name, each in counts.items()
    )
    return ", ".join(listed) or "none"


def of_total(task: Task) -> str:
    done = amount(task.done, BYTES) if task.unit == BYTES else f"{task.done:,.0f}"
    return f"{done} of {amount(task.total, task.unit)}"


def speed(task: Task) -> str:
    """Return the rate in a form that reads well, slow tasks included: of these, what is done in a minute or an hour."""
    if task.unit == BYTES:
        return amount(task.rate, BYTES) + "/s"
    if 0 < task.rate < SLOW:
        minutely = task.rate * 60
        return f"{minutely:.1f} {task.unit}/min" if minutely >= 1 else f"{minutely * 60:.1f} {task.unit}/h"
    return f"{task.rate:.1f} {task.unit}/s" if task.rate < 100 else f"{task.rate:,.0f} {task.unit}/s"


def duration(seconds: float) -> str:
    """Return seconds as `42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Reporter:
    """Says things and shows tasks, on standard error."""

    def __init__(self, console: rich_console.Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.listener: Callable[[dict[str, Any]], object] | None = None
        # Raises if the user asked to stop. Every advance of a task is a place to stop: what it counted is on disk, or is
        # written again in full.
        self.check_stop: Callable[[], None] = lambda: None

    def say(self, line: str, *, style: str = "") -> None:
        if not self.quiet:
            self.console.print(line, style=style, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def task(self, label: str, total: float, unit: str) -> Iterator[Task]:
        """Show one task while the body runs; the body calls `advance`."""
        with contextlib.ExitStack() as stack:
            show = self._shower(stack, label, total)
            last_state = -STATE_EVERY

            def changed(task: Task) -> None:
                nonlocal last_state
                show(task)
                if self.listener and task.seconds - last_state >= STATE_EVERY:
                    last_state = task.seconds
                    self.listener(task.state())
                self.check_stop()

            task = Task(label, total, unit, on_change=changed)
            changed(task)
            try:
                yield task
            finally:
                if self.listener:
                    # The last news is a courtesy; the work itself reports a full disk.
                    with contextlib.suppress(OSError):
                        self.listener(task.state())

    def _shower(self, stack: contextlib.ExitStack, label: str, total: float) -> Callable[[Task], object]:
        """Return what shows a task: nothing, a bar on a terminal, or lines in a log."""
        if self.quiet:
            return lambda _task: None
        if not self.console.is_terminal:
            return self._line
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
                   TextColumn("{task.fields[note]}"), TimeElapsedColumn())  # fmt: skip
        bar = stack.enter_context(Progress(*columns, console=self.console, transient=True))
        shown = bar.add_task(label, total=total, note="")

        def show(task: Task) -> None:
            left = f"{duration(task.seconds_left)} left" if task.seconds_left is not None else ""
            bar.update(shown, completed=task.done, total=task.total, note=f"{speed(task)}  {left}")

        return show

    def _line(self, task: Task) -> None:
        if task.seconds >= task.next_line:
            task.next_line = task.seconds + LINE_EVERY
            self.console.print(task.line(), markup=False, soft_wrap=True)
