"""Reading prompts: a pass over the next tokens of some requests, through the model and its heads.

A layer is a dozen launches, and to make them takes the host four times as long as the device needs for them, even for 8,192 tokens.
So on a GPU such a pass is a CUDA graph too, one for each number of tokens (as in decoding.py). Where each token goes is worked out on
the device, inside the graph, from three small tables; tokens and requests that fill it up are nobody's.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import torch

from etude.inference.decoding import bucket, capture
from etude.inference.kv_cache import Plan, locate, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from etude.inference.model_runner import Runner

LEAST = 64  # tokens of a graph: fewer are filled up

Places = list[tuple[list[int], int, int]]  # pages, first new position and new tokens of each request


class Prefill:
    """Passes over prompts on one device."""

    def __init__(self, runner: Runner, chunk: int, rows: int, pages: int, *, graphs: bool) -> None:
        self.runner, self.chunk = runner, max(chunk, LEAST)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] | None = None
        if graphs and runner.lean:
            self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
            depths = 1 + (runner.heads.depth if runner.heads else 0)
            self._tokens = torch.zeros(depths, self.chunk, dtype=torch.int64, device=runner.device)
            self._table = torch.zeros(rows, pages, dtype=torch.int32, device=runner.device)
            self._length = torch.zeros(rows, dtype=torch.int32, device=runner.device)
            self._begin = torch.zeros(rows + 1, dtype=torch.int32, device=runner.device)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(
        self, tokens: Sequence[Sequence[int]], places: Places, wanted: Sequence[int], *, watched: bool
    ) -> tuple[Tensor, Tensor]:
        """Return logits of the wanted tokens and the hidden states of all, which the next pass may overwrite.

        `tokens`: those to read, then for each head those that follow them. `watched`: somebody looks into the model meanwhile.
        """
        if self._graphs is None or watched:
            return self._without_graph(tokens, places, wanted)
        count = len(tokens[0])
        size = bucket(max(count, LEAST), self.chunk)
        self._lay_out(tokens, places, size)
        if size not in self._graphs:
            for _ in range(2):  # kernels are compiled, libraries begun; what it writes into the cache is written again
                self._pass(size)
            self._graphs[size] = capture(partial(self._pass, size), self._pool)
        graph, hidden = self._graphs[size]
        graph.replay()
        return self.runner.head(hidden[self.runner.send(wanted)]), hidden[:count]

    def _without_graph(
        self, tokens: Sequence[Sequence[int]], places: Places, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        runner = self.runner
        where = plan(places, runner.cache.size, runner.device)
        logits, hidden = runner.run(runner.send(tokens[0]), where, runner.send(wanted))
        drafted = hidden
        for depth, following in enumerate(tokens[1:]):
            drafted = runner.draft(depth, drafted, runner.send(following), where)
        return logits, hidden

    def _lay_out(self, tokens: Sequence[Sequence[int]], places: Places, size: int) -> None:
        """Put what a pass needs to know where its graph will look."""
        rows, width = self._table.shape
        send, count, more = self.runner.send, len(tokens[0]), rows - len(places)
        self._tokens[:, :size] = send([[*each, *([0] * (size - count))] for each in tokens])
        table = [[*pages, *([0] * (width - len(pages)))] for pages, _, _ in places]
        self._table[: len(places)] = send(table)
        begin = list(itertools.accumulate((new for _, _, new in places), initial=0))
        self._length.copy_(send([first + new for _, first, new in places] + [0] * more))
        self._begin.copy_(send(begin + [count] * more))

    def _pass(self, size: int) -> Tensor:
        runner, most = self.runner, min(size, len(self._length))
        table, length, begin = self._table[:most], self._length[:most], self._begin[: most + 1]
        located = locate(table, length, begin, size, runner.cache.size)
        where = Plan(*located, table, length, begin, 0, size)
        hidden = drafted = runner.hidden(self._tokens[0, :size], where)
        for depth, following in enumerate(self._tokens[1:, :size]):
            drafted = runner.draft(depth, drafted, following, where)
        return hidden
