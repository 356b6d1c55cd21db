"""CUDA graphs for small models: what a step launches is recorded once and replayed.

A step of sprout (5M parameters, 32 rows of 2,048 tokens) keeps an H200 busy for 16 ms, but its host needs 28 ms to launch the kernels
of forward pass, backward pass and optimiser one by one (docs/lab-notes.md). A large model is not held up by its host and does
without: a graph keeps the memory of its pass for itself.

A graph reads and writes fixed addresses. So rows are copied into tensors that stay, gradients are added to those of the masters,
which stay, and the number of pieces is filled up with empty ones to a power of two, so that there are few graphs.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.training.batch import Rows

    Tensors = dict[str, torch.Tensor]

SMALL = 50_000_000  # parameters
WARM = 2  # runs before one is recorded: kernels are compiled, states made
FEWEST_PIECES = 64


class Graph:
    """A function without arguments that always works on the same tensors; recorded at its third call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, stream: torch.cuda.Stream, pool: Any) -> Any:
        """Do it; the result is overwritten by the next call."""
        if self._graph is None and self._calls < WARM:
            self._calls += 1
            # On the stream of the recording: autograd remembers where gradients were added up.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._result = self._function()
            torch.cuda.current_stream().wait_stream(stream)
            return self._result
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # A collected tensor or graph would give memory back meanwhile, and a thread that saves a checkpoint copies: both
            # end a recording that minds everything in the process.
            gc.disable()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._result = self._function()
            finally:
                gc.enable()
            self._graph = graph
        self._graph.replay()
        return self._result


@dataclass
class Replay:
    """Stands for a function of rows and a scale, and for one of nothing (the optimiser's step), by graphs that share memory."""

    learn: Callable[[Rows, torch.Tensor], Tensors]
    update: Callable[[], None]
    _held: dict[tuple[Any, ...], tuple[Rows, torch.Tensor, Graph]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._update = Graph(self.update)

    def rows(self, rows: Rows, scale: torch.Tensor) -> Tensors:
        """Do what `learn` does."""
        rows = with_empty_pieces(rows)
        key = (rows.tokens_BT.shape, len(rows.bounds), rows.whole)
        if key not in self._held:
            still = rows.each(torch.Tensor.clone)
            torch._dynamo.maybe_mark_dynamic(still.bounds, 0)  # noqa: SLF001 - as Rows.to does
            factor = scale.clone()
            self._held[key] = (still, factor, Graph(lambda: self.learn(still, factor)))
        still, factor, graph = self._held[key]
        for place, value in zip((*still.tensors(), factor), (*rows.tensors(), scale), strict=True):
            place.copy_(value)
        values: Tensors = graph(self._stream, self._pool)
        return values

    def step(self) -> None:
        """Do what `update` does."""
        self._update(self._stream, self._pool)


def with_empty_pieces(rows: Rows) -> Rows:
    """Return rows whose number of pieces is a power of two: pieces of length 0 at the end change nothing."""
    count = max(FEWEST_PIECES, 1 << (len(rows.bounds) - 2).bit_length()) + 1
    end = rows.bounds[-1:].expand(count - len(rows.bounds))
    return replace(rows, bounds=torch.cat([rows.bounds, end]))
