"""Skip a step that would do harm: a loss or a gradient that is not a number, or a loss far from what it was of late.

After OLMo's SkipStepAdamW: a value counts as an outlier if it is more than `sigmas` standard deviations above the mean of the last
`window` accepted ones. Skipped values do not enter the memory, so one spike cannot excuse the next; but after `patience`
skips in a row the world has changed, not the batch, and training must stop rather than go on doing nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from etude.errors import UserError


class GuardSettings(BaseModel):
    """When a step is skipped."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    sigmas: float = Field(default=6.0, gt=0, description="a loss this many deviations above the mean is an outlier")
    window: int = Field(
        default=128, ge=8, description="accepted steps that mean and deviation are taken over; fewer: no outliers"
    )
    patience: int = Field(
        default=50, ge=1, description="skipped steps in a row after which training stops with an error"
    )


class Guard:
    """Remembers what is usual."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._recent: dict[str, deque[float]] = {}
        self.in_a_row = 0

    def objection(self, step: int, **values: float) -> str | None:
        """Return why a step should be skipped, or None; remember its values if it should not."""
        found = next((why for name, value in values.items() if (why := self._wrong(name, value))), None)
        self.in_a_row = self.in_a_row + 1 if found else 0
        if self.in_a_row > self._settings.patience:
            raise UserError(f"training stopped at step {step}: {self.in_a_row} steps in a row were skipped ({found}); lower the"
                            " learning rate, or look at the data")  # fmt: skip
        if not found:
            for name, value in values.items():
                self._recent.setdefault(name, deque(maxlen=self._settings.window)).append(value)
        return found

    def _wrong(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} is not finite"
        recent = self._recent.get(name, ())
        if len(recent) < self._settings.window:
            return None
        mean, deviation = statistics.fmean(recent), statistics.pstdev(recent)
        if value > mean + self._settings.sigmas * deviation:
            return f"{name} {value:.3g} is far above {mean:.3g}"
        return None

    def state(self) -> dict[str, Any]:
        """Return what is remembered, fit for JSON."""
        return {"in_a_row": self.in_a_row, "recent": {name: list(values) for name, values in self._recent.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what was remembered."""
        self.in_a_row = state["in_a_row"]
        self._recent = {name: deque(values, maxlen=self._settings.window) for name, values in state["recent"].items()}
