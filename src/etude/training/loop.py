"""The training loop: batches in, steps out. It knows nothing of stages, files or schedules' names.

A step takes one global batch. Every rank works on its rows in micro-batches; the loss is the sum over all tokens of all of
them, divided by their weight, so that it does not depend on how they were split. Then the gradient is clipped, the guard is
asked, and the optimiser moves the weights.

Skip a step that would do harm: a loss or a gradient that is not a number, or a loss far from what it was of late.

After OLMo's SkipStepAdamW: a value counts as an outlier if it is more than `sigmas` standard deviations above the mean of the last
`window` accepted ones. Skipped values do not enter the memory, so one spike cannot excuse the next; but after `patience`
skips in a row the world has changed, not the batch, and training must stop rather than go on doing nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from etude.errors import UserError
from etude.training.batch import cut, micro_batches, piece_bounds
from etude.training.distributed import World, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.data.loader import Batch
    from etude.training.batch import Rows
    from etude.training.cuda_graphs import Replay
    from etude.training.objectives import Objective
    from etude.training.optimiser import Optimiser, Weights


class Batches(Protocol):
    """An endless series of batches that can be taken up where it was left."""

    def __next__(self) -> Batch: ...
    def state(self) -> dict[str, Any]:
        """Return where the series stands."""
        ...

    def load_state(self, state: Any) -> None:
        """Go on from a state."""
        ...

    def achieved(self) -> dict[str, dict[str, float]]:
        """Return shares of the tokens handed over so far: by source, by domain; and epochs by source."""
        ...


@dataclass(frozen=True)
class Step:
    """What one step did, over all ranks."""

    number: int  # from 1
    loss: float  # in nats a token, or whatever the objective counts
    norm: float  # of the gradient, before clipping
    factor: float  # on the peak learning rate
    tokens: int  # that went through the model, padding included
    learnt: float  # the weight the loss was divided by
    pieces: Counter[int]  # how many pieces of each length this rank had
    skipped: str | None  # why the weights were not moved
    seconds: float
    metrics: dict[str, float]  # the objective's own, divided as the loss is


@dataclass(frozen=True)
class Fetched:
    """A batch on the device."""

    parts: list[Rows]
    weight: float
    pieces: Counter[int]
    position: dict[str, Any]  # of the batches, after this one


class Forward(torch.nn.Module):
    """A model with its objective: one call from the loss down, as FSDP needs it to gather what is sharded."""

    def __init__(self, model: Any, objective: Any) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, rows: Rows, method: str = "loss") -> Any:
        """Return what a method of the objective says of some rows."""
        result = getattr(self.objective, method)(self.model, rows)
        return (result.sum, result.metrics) if method == "loss" else result


@dataclass
class Loop:
    """All that a step needs."""

    forward: Forward
    weights: Weights
    optimiser: Optimiser
    objective: Objective
    batches: Batches
    factor: Callable[[int], float]  # step from 0 → factor on the learning rate
    guard: Guard
    clip: float
    length: int
    micro: int  # rows at once
    device: torch.device
    world: World
    replay: Replay | None = None  # how a small model on a GPU does not wait for its host
    done: int = 0  # steps
    position: dict[str, Any] = field(default_factory=dict)  # of the batches after the last step: `batches` is one ahead
    _ahead: Fetched | None = None

    def steps(self, until: int) -> Iterator[Step]:
        """Train, and yield after every step."""
        while self.done < until:
            yield self._step(until)

    def _step(self, until: int) -> Step:
        began = time.perf_counter()
        batch = self._ahead or self._fetch()
        weight = self.world.sum(batch.weight)
        if weight <= 0:
            raise UserError(f"step {self.done + 1}: a whole batch has no token to learn from; its mask hides every one")
        total, metrics = self._backward(batch.parts, weight)
        # A GPU is still at work on that: time to get the next batch ready.
        self._ahead = self._fetch() if self.done + 1 < until else None
        loss = self.world.sum(float(total)) / weight
        norm = self._clipped()
        # A long gradient is clipped; only one that is no number at all must not be used.
        values = {"loss": loss} if math.isfinite(norm) else {"loss": loss, "gradient": norm}
        skipped = self.guard.objection(self.done + 1, **values)
        factor = self.factor(self.done)
        if not skipped:
            self.optimiser.set_rate(factor)
            (self.replay.step if self.replay else self.optimiser.update)()
        self.weights.publish()
        self.done, self.position = self.done + 1, batch.position
        own = {name: self.world.sum(float(value)) / weight for name, value in metrics.items()}
        tokens = sum(size * count for size, count in batch.pieces.items()) * self.world.size
        return Step(
            self.done, loss, norm, factor, tokens, weight, batch.pieces, skipped, time.perf_counter() - began, own
        )

    def _fetch(self) -> Fetched:
        batch = cut(next(self.batches), self.length)
        parts = list(micro_batches(batch, self.micro, whole_first=self.device.type == "cuda"))
        return Fetched(
            [part.to(self.device) for part in parts],
            sum(self.objective.weight(part) for part in parts),
            Counter(np.diff(piece_bounds(batch.positions)).tolist()),
            self.batches.state(),
        )

    def _backward(self, parts: list[Rows], weight: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # FSDP takes the mean over ranks; the sum is meant.
        scale = torch.full((), self.world.size / weight, device=self.device)
        sums: dict[str, torch.Tensor] = {}
        for part in parts:
            found = self.replay.rows(part, scale) if self.replay else self.learn(part, scale)
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + value
        return sums.pop("loss"), sums

    def learn(self, part: Rows, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Add the gradient of some rows to what is there; return their loss and metrics, as sums."""
        loss, metrics = self.forward(part)
        (loss * scale).backward()
        self.weights.collect()
        return {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}

    def _clipped(self) -> float:
        """Scale the gradient down if it is too long, and return how long it was."""
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.masters.values()), self.clip)
        return float(whole(norm))


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
