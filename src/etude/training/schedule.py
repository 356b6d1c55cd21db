"""Learning-rate schedules as pure functions: the factor on the peak rate at a step of a run.

    linear     warm-up, then a line to `floor`. For annealing a model that still has its optimiser state, or a short run
    cosine     warm-up, then half a cosine to `floor`. Re-warm and re-decay of a finished base (Ibrahim et al., 2024)
    wsd        warm-up, constant, then a line to `floor` over the last `decay` of the run
    infinite   warm-up, half a cosine down to `constant` over `cool` of the run, constant, then a line to `floor` over the last
               `decay`. A run can be prolonged from its constant part without warming up again

Steps count from 0. Warm-up reaches the peak at its last step; the last step of a run is the first at `floor`. A run of one
step has it at the peak.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ScheduleSettings(BaseModel):
    """How the learning rate goes."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: Literal["linear", "cosine", "wsd", "infinite"] = Field(default="cosine", description="the form of the curve")
    warmup: float = Field(
        default=0.01, ge=0, lt=1, description="share of the steps in which the rate rises to its peak"
    )
    decay: float = Field(default=0.2, gt=0, le=1, description="wsd, infinite: share of the steps of the last fall")
    cool: float = Field(default=0.1, gt=0, lt=1, description="infinite: share of the steps of the first fall")
    constant: float = Field(default=0.5, gt=0, le=1, description="infinite: the factor between the two falls")
    floor: float = Field(default=0.0, ge=0, le=1, description="the factor at the end")

    @model_validator(mode="after")
    def _parts_fit(self) -> ScheduleSettings:
        own = {"wsd": {"decay"}, "infinite": {"decay", "cool", "constant"}}.get(self.kind, set())
        fields = type(self).model_fields  # a resolved recipe writes all of them out
        if idle := sorted(
            name for name in {"decay", "cool", "constant"} - own if getattr(self, name) != fields[name].default
        ):
            raise ValueError(f"`{idle[0]}` means nothing for the schedule {self.kind!r}")
        used = self.warmup + sum(getattr(self, name) for name in own & {"decay", "cool"})
        if used > 1 + 1e-9:
            raise ValueError(f"the parts of the schedule {self.kind!r} take {used:.2f} of the run, more than all of it")
        if self.kind == "infinite" and self.floor > self.constant:
            raise ValueError(
                f"`floor` {self.floor:g} is above `constant` {self.constant:g}, so the last fall would rise"
            )
        return self


def factor(settings: ScheduleSettings, step: int, steps: int) -> float:
    """Return the factor on the peak learning rate at `step` of `steps`."""
    if steps == 1:
        return 1.0  # at `floor`, which is often 0, it would be no training at all
    rising = min(round(settings.warmup * steps), steps - 1)
    if step < rising:
        return (step + 1) / rising
    rest = steps - rising
    if settings.kind == "linear":
        return _line(1.0, settings.floor, _share(step - rising, rest))
    if settings.kind == "cosine":
        return _cosine(1.0, settings.floor, _share(step - rising, rest))
    falling = max(1, round(settings.decay * steps))
    level = settings.constant if settings.kind == "infinite" else 1.0
    if step >= steps - falling:
        return _line(level, settings.floor, (step - (steps - falling) + 1) / falling)
    cooling = round(settings.cool * steps) if settings.kind == "infinite" else 0
    if step < rising + cooling:
        return _cosine(1.0, level, (step - rising + 1) / cooling)
    return level


def _share(done: int, of: int) -> float:
    """Return how far a fall has come at its step `done`: 0 at the first, 1 at the last."""
    return done / (of - 1) if of > 1 else 1.0


def _line(high: float, low: float, share: float) -> float:
    return high + (low - high) * share


def _cosine(high: float, low: float, share: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2
