"""The training loop: rows in, steps out. It knows nothing of stages, files or what the rows were made of.

A step takes one global batch from its source: a corpus, or the episodes of reinforcement learning. Every rank works on its rows in
micro-batches. The loss is the sum over all tokens of all of them divided by their weight, or by a constant that the source gives,
so that it does not depend on how they were split. Then the gradient is clipped, the guard is asked, and the optimiser moves the
weights.

The guard skips a step that would do harm: a loss or a gradient that is not a number, or a loss far from what it was of late. After
OLMo's SkipStepAdamW: a value is an outlier if it is more than `sigmas` standard deviations above the mean of the last `window`
accepted ones. Skipped values are not remembered, so one spike cannot excuse the next; but after `patience` skips in a row the
world has changed, not the batch, and training must stop rather than go on doing nothing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from etude.errors import UserError
from etude.training.distributed import World, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.training.batch import StepRows
    from etude.training.cuda_graphs import Replay
    from etude.training.experts import Experts
    from etude.training.objectives import Objective
    from etude.training.optimiser import Optimiser, Weights
    from etude.training.settings import GuardSettings

    Fetched = tuple[StepRows, float, dict[str, Any]]


class Source(Protocol):
    """Where the rows of each step come from. It can be taken up where it was left."""

    ahead: bool  # whether the next step's rows may be taken while this one is computed

    def take(self, micro: int, device: torch.device) -> StepRows | None:
        """Return this rank's rows of the next step, `micro` at once; wait for them; None if there will be no more."""
        ...

    def state(self) -> dict[str, Any]:
        """Return where the source stands, fit for JSON."""
        ...

    def load_state(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Step:
    """What one step did, over all ranks."""

    number: int  # from 1
    loss: float  # in nats a token, or whatever the objective counts
    norm: float  # of the gradient, before clipping
    factor: float  # on the peak learning rate
    learnt: float  # what the loss was divided by
    pieces: Counter[int]  # how many pieces of each length went through the model, padding included
    skipped: str | None  # why the weights were not moved
    seconds: float  # without those spent waiting for rows
    metrics: dict[str, float]  # the objective's own, divided as the loss is

    @property
    def tokens(self) -> int:
        return sum(size * count for size, count in self.pieces.items())


class Root(torch.nn.Module):
    """A model as FSDP needs it: whatever is asked of a sharded model must go through its outermost module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ask: Callable[[Any, Any], Any], rows: Any) -> Any:
        """Return what a function of model and rows returns: tensors, or a tuple of them."""
        return ask(self.model, rows)


@dataclass
class Loop:
    """All that a step needs."""

    root: Root
    weights: Weights
    optimiser: Optimiser
    objective: Objective
    source: Source
    factor: Callable[[int], float]  # step from 0 → factor on the learning rate
    guard: Guard
    clip: float
    micro: int  # rows at once
    device: torch.device
    world: World
    # told the share of the step that each micro-batch but the last was
    on_part: Callable[[float], object] = lambda _: None
    graphs: Replay | None = None  # how a small model on a GPU does not wait for its host
    experts: Experts | None = None
    done: int = 0  # steps
    position: dict[str, Any] = field(default_factory=dict)  # of the source after the last step: it may be one ahead
    _ahead: Fetched | None = (
        None  # the next step's rows on the device, this rank's weight of them, the source after them
    )

    def steps(self, until: float = math.inf) -> Iterator[Step]:
        """Train until so many steps are done or the source ends, and yield after every step."""
        while self.done < until:
            began = time.perf_counter()
            if (fetched := self._ahead or self._fetch()) is None:
                return
            yield self._step(*fetched, began + fetched[0].waited, last=self.done + 1 >= until)

    def _fetch(self) -> Fetched | None:
        rows = self.source.take(self.micro, self.device)
        if rows is None:
            return None
        weight = 0.0 if rows.divisor else sum(self.objective.weight(part) for part in rows.parts)
        return replace(rows, parts=[part.to(self.device) for part in rows.parts]), weight, self.source.state()

    def _step(self, rows: StepRows, own: float, position: dict[str, Any], began: float, *, last: bool) -> Step:
        weight = rows.divisor or self.world.sum(own)
        if weight <= 0:
            raise UserError(f"step {self.done + 1}: the batch has no token to train on; its mask hides every one")
        if self.experts:
            self.experts.begin(rows.parts, self.world)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        loss, metrics = self.backward(rows.parts, weight)
        # A GPU is still at work on that: time to get the next batch ready.
        self._ahead = self._fetch() if self.source.ahead and not last else None
        mean = self.world.sum(float(loss)) / weight
        norm = float(whole(torch.nn.utils.clip_grad_norm_(list(self.weights.masters.values()), self.clip)))
        # A long gradient is clipped; only one that is no number at all must not be used.
        skipped = self.guard.objection(self.done + 1, loss=mean, **({} if math.isfinite(norm) else {"gradient": norm}))
        factor = self.factor(self.done)
        if not skipped:
            self.optimiser.set_rate(factor)
            (self.graphs.step if self.graphs else self.optimiser.update)()
        self.weights.publish()
        self.done, self.position = self.done + 1, position
        means = {name: self.world.sum(float(value)) / weight for name, value in metrics.items()}
        if self.experts:
            means |= self.experts.end(self.done, self.world, skipped=bool(skipped))
        if self.device.type == "cuda":
            means["peak_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        seconds = time.perf_counter() - began
        return Step(self.done, mean, norm, factor, weight, rows.pieces, skipped, seconds, means)

    def backward(self, parts: list[Any], weight: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Add the gradient of this rank's rows, divided by `weight`, to that of the masters; return loss and metrics, as sums."""
        # FSDP takes the mean over ranks; the sum is meant.
        scale = torch.full((), self.world.size / weight, device=self.device)
        sums: dict[str, torch.Tensor] = {}
        for place, part in enumerate(parts, 1):
            values = self.graphs.rows(part, scale) if self.graphs else self.learn(part, scale)
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + value
            if place < len(parts):
                self.on_part(1 / len(parts))
        return sums.pop("loss"), sums

    def learn(self, part: Any, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Do this for one micro-batch."""
        with self.experts.working_on(part) if self.experts else contextlib.nullcontext():
            loss, metrics = self.root(self.objective.loss, part)
            (loss * scale).backward()
        self.weights.collect()
        return {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


class Guard:
    """Remembers what is usual. Without `outliers`, only what is not a number is skipped."""

    def __init__(self, settings: GuardSettings, *, outliers: bool = True) -> None:
        self._settings, self._outliers = settings, outliers
        self._recent: dict[str, deque[float]] = {}
        self.in_a_row = 0

    def objection(self, step: int, **values: float) -> str | None:
        """Return why a step should be skipped, or None; remember its values if it should not."""
        reason = next((why for name, value in values.items() if (why := self._wrong(name, value))), None)
        self.in_a_row = self.in_a_row + 1 if reason else 0
        if self.in_a_row > self._settings.patience:
            raise UserError(f"training stopped at step {step}: {self.in_a_row} steps in a row were skipped ({reason}); lower the"
                            " learning rate, or look at the data")  # fmt: skip
        if self._outliers and not reason:
            for name, value in values.items():
                self._recent.setdefault(name, deque(maxlen=self._settings.window)).append(value)
        return reason

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
        self.in_a_row = state["in_a_row"]
        self._recent = {name: deque(values, maxlen=self._settings.window) for name, values in state["recent"].items()}
