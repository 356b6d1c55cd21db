"""Ctrl-C and SIGTERM: stop at the next safe place, keep every finished unit, say how to go on.

A unit at hand is dropped and done again by the next session. A second signal stops at once.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

from etude.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that the user asked to stop. Use as a context manager in the main thread."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: object) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        self.say("stopping at the next safe place; once more to stop at once")

    def check(self) -> None:
        """Raise Interrupted if the user asked to stop. Called where everything so far is on disk."""
        if self.signal_number is not None:
            raise Interrupted(self.signal_number)
