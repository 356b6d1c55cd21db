"""What the device does for many requests: the decoding step, and passes over their prompts.

What a step reads and writes stays on the device. A row is a place in the batch. The token a row wrote is its next input, so the
host has nothing to do between two steps but to set rows that begin or end, and to give rows more pages. On a GPU a step is a CUDA
graph for each size of batch; the host reads what was written while the next step runs.

With heads (MTP) a step may be a round: draft k tokens, read them all, keep what the model would have written. A head's layer has
keys and values of its own; those of the last positions depend on drafts that may have been refused, so each round computes the
last k + 1 positions of every depth again, from the hidden states of the model there (`trail`) and the tokens after them (`known`).

Reading prompts is a pass over the next tokens of some requests, through the model and its heads. A layer is a dozen launches, and to
make them takes the host four times as long as the device needs for them, even for 8,192 tokens. So on a GPU such a pass is a CUDA
graph too, one for each number of tokens. Where each token goes is worked out on the device, inside the graph, from three small
tables; tokens and requests that fill it up are nobody's.

Shapes: R rows, P pages a row, k drafts, W = k + 1, D width of the model, V vocabulary.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from etude.inference.kv_cache import Plan, locate, plan
from etude.inference.sampler import (
    Choice,
    certain,
    distribution,
    draft,
    judge,
    lookup,
    raw_logprobs,
    sample_packed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from etude.inference.engine import Request
    from etude.inference.model_runner import Runner


# What a step wrote, [3, R, written]: token (−1: none), log-prob, raw log-prob; its logits; the experts of what it read, [R, read, …].
Written = tuple["Tensor", "Tensor", "Tensor | None"]
Places = list[tuple[list[int], int, int]]  # pages, first new position and new tokens of each request

LEAST = 64  # tokens of a graph of a prefill: fewer are filled up


class Decoder:
    """Rows of a batch on a device."""

    def __init__(self, runner: Runner, rows: int, pages: int, *, graphs: bool, lookup: int = 0) -> None:
        self.runner, self.rows = runner, rows
        device = runner.device
        integers = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5))
        self.token, self.position, self.active, top_k, seed = integers  # `active` 0: an idle row stays where it is
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.choice = Choice(torch.zeros(rows, device=device), torch.ones(rows, device=device), top_k, seed)
        self._pages: list[list[int]] = [[0] for _ in range(rows)]  # as `table`, for a CPU
        depth = runner.heads.depth if runner.heads else 0
        self.drafts = depth or lookup
        self.window = depth + 1 if depth else 0
        # What each row has read and written, by position, where drafts are looked up in it.
        self.history = torch.zeros(rows, pages * runner.cache.size if lookup else 0, dtype=torch.int64, device=device)
        width = runner.model.get_input_embeddings().weight.shape[1]
        self.trail = torch.zeros(rows, self.window, width, device=device, dtype=runner.dtype)
        self.known = torch.zeros(rows, self.window, dtype=torch.int64, device=device)
        # Hundreds of rows of a large vocabulary in float32: compiled, they are gone through a few times less.
        fast: Any = partial(torch.compile, dynamic=True) if graphs and runner.compiled else lambda function: function
        self._sample, self._judge, self._draw = fast(sample_packed), fast(judge), fast(_drawn)
        self.bits: Tensor | None = None  # [R, words]: which tokens each row may draw, once anybody is limited
        self._graphs: dict[tuple[int, bool, bool, bool], tuple[torch.cuda.CUDAGraph, Written]] | None = (
            {} if graphs else None
        )
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def begin(self, requests: Sequence[Request], logits_RV: Tensor, *, cut: bool, bits: Tensor | None = None) -> Tensor:
        """Set rows that begin, draw their first token from the logits of their prompts' ends; return what `sample_packed` does."""
        send = self.runner.send
        index, position = send([each.row for each in requests]), send([len(each.tokens) for each in requests])
        asked, most = [each.sampling for each in requests], self.runner.vocabulary
        scales, shares = [float(each.temperature) for each in asked], [float(each.top_p) for each in asked]
        counts, seeds = [min(each.top_k, most) for each in asked], [each.seed for each in requests]
        choice = Choice(*map(send, (scales, shares, counts, seeds)))
        packed = sample_packed(logits_RV, choice, position, cut=cut, bits_RW=bits)
        token = packed[0].long()
        for target, values in zip(self.choice, choice, strict=True):
            target[index] = values
        self.token[index], self.position[index], self.active[index] = token, position, 1
        for each, first in zip(requests if self.history.shape[1] else (), token, strict=False):
            self.history[each.row, : len(each.tokens)] = send(each.tokens)
            self.history[each.row, len(each.tokens)] = first
        for number, each in enumerate(requests if self.window else ()):
            assert each.trail is not None
            self.trail[each.row] = 0
            self.trail[each.row, self.window - len(each.trail) :] = each.trail
            known = send(([0] * self.window + each.tokens)[1 - self.window :])
            self.known[each.row] = torch.cat([known, token[number : number + 1]])
        return packed

    def set_pages(self, rows: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Say which pages rows have; a row without any writes to page 0, which nobody reads."""
        width = self.table.shape[1]
        values = [[*each, *([0] * (width - len(each)))] for each in pages]
        self.table[self.runner.send(rows)] = self.runner.send(values).int()
        for row, each in zip(rows, pages, strict=True):
            self._pages[row] = list(each) or [0]
        if idle := [row for row, each in zip(rows, pages, strict=True) if not each]:
            index = self.runner.send(idle)
            self.position[index] = 0
            self.active[index] = 0

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self, rows: int, *, cut: bool, ahead: bool, bits: Tensor | None = None) -> Written:
        """Do a step or a round of the first rows. On a GPU the result is overwritten by the next one.

        `bits`: see `sample`; for steps only.
        """
        single = partial(self._single, limited=bits is not None)
        function: Callable[..., Written] = self._round if ahead else single
        if bits is not None:
            if self.bits is None:
                self.bits = torch.full((self.rows, bits.shape[1]), -1, dtype=torch.int32, device=bits.device)
            self.bits[:rows] = bits
        if self._graphs is None or self.runner.looked_into:
            return function(rows, cut=cut)
        if (key := (rows, cut, ahead, bits is not None)) not in self._graphs:
            self._graphs[key] = self._record(function, rows, cut=cut)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _record(
        self, function: Callable[..., Written], rows: int, *, cut: bool
    ) -> tuple[torch.cuda.CUDAGraph, Written]:
        kept = [each.clone() for each in (self.token, self.position, self.trail, self.known)]
        for _ in range(2):  # kernels are compiled, libraries begun; what it writes into the cache is written again
            function(rows, cut=cut)
            for target, value in zip((self.token, self.position, self.trail, self.known), kept, strict=True):
                target.copy_(value)
        return capture(partial(function, rows, cut=cut), self._pool)

    def _plan(self, rows: int, first_R: Tensor, each: int) -> Plan:
        """Return where `each` tokens of every row go; those before a text's beginning go where nobody reads."""
        device = first_R.device
        position = first_R[:, None] + torch.arange(each, device=device)
        real, size = position.clamp(min=0), self.runner.cache.size
        page = torch.where(position < 0, 0, self.table[:rows].gather(1, real // size)).flatten().long()
        begin = torch.arange(rows + 1, device=device, dtype=torch.int32) * each
        length = (first_R + each).clamp(min=1).int()
        where = Plan(page, (real % size).flatten(), real.flatten(), self.table[:rows], length, begin, each, each)
        if device.type == "cpu":
            where.counts, where.lengths, where.pages = [each] * rows, length.tolist(), self._pages[:rows]
        return where

    def _single(self, rows: int, *, cut: bool, limited: bool) -> Written:
        position = self.position[:rows]
        logits, hidden = self.runner.run(self.token[:rows], self._plan(rows, position, 1))
        bits = self.bits[:rows] if limited and self.bits is not None else None
        packed = self._sample(logits, self.choice.rows(slice(rows)), position + 1, cut=cut, bits_RW=bits)
        token = packed[0].long()
        self._remember(rows, position + 1, token[:, None])
        if self.window:
            self.trail[:rows] = torch.cat([self.trail[:rows, 1:], hidden[:, None].to(self.trail.dtype)], 1)
            self.known[:rows] = torch.cat([self.known[:rows, 1:], token[:, None]], 1)
        self.token[:rows] = token
        self.position[:rows] += self.active[:rows]
        return packed[..., None], logits, self._routes(rows)

    def _remember(self, rows: int, first_R: Tensor, tokens_Rk: Tensor) -> None:
        """Note tokens from a position on; of those that were refused the next step writes others over."""
        if most := self.history.shape[1]:
            place_Rk = first_R[:, None] + torch.arange(tokens_Rk.shape[1], device=first_R.device)
            self.history[:rows].scatter_(1, place_Rk.clamp(max=most - 1), tokens_Rk)

    def _routes(self, rows: int) -> Tensor | None:
        return None if self.runner.routes is None else self.runner.routes.unflatten(0, (rows, -1))

    def _round(self, rows: int, *, cut: bool) -> Written:
        choice, count, position = self.choice.rows(slice(rows)), self.drafts, self.position[:rows]
        drafts_Rk, drawn_from_RkV = self._proposed(rows, choice, position, cut=cut)
        read_Rk1 = torch.cat([self.token[:rows, None], drafts_Rk], 1)
        logits, hidden = self.runner.run(read_Rk1.flatten(), self._plan(rows, position, count + 1))
        routes = self._routes(rows)
        each = Choice(*(value.repeat_interleave(count + 1) for value in choice))
        model_Rk1V = distribution(logits, each, cut=cut).unflatten(0, (rows, -1))
        tokens_Rk1, logprobs_Rk1, accepted_R = self._judge(model_Rk1V, drawn_from_RkV, drafts_Rk, choice, position + 1)
        self._remember(rows, position + 1, tokens_Rk1)
        raw = raw_logprobs(logits, tokens_Rk1.flatten()).view(rows, -1)
        written = torch.arange(count + 1, device=raw.device)[None] <= accepted_R[:, None]
        if self.window:
            follow = accepted_R[:, None] + 1 + torch.arange(self.window, device=raw.device)
            trail = torch.cat([self.trail[:rows], hidden.unflatten(0, (rows, -1)).to(self.trail.dtype)], 1)
            known = torch.cat([self.known[:rows], tokens_Rk1], 1)
            self.trail[:rows] = trail.gather(1, follow[..., None].expand(-1, -1, trail.shape[2]))
            self.known[:rows] = known.gather(1, follow)
        self.token[:rows] = tokens_Rk1.gather(1, accepted_R[:, None])[:, 0]
        self.position[:rows] += (accepted_R + 1) * self.active[:rows]
        token = torch.where(written, tokens_Rk1, -1)
        return torch.stack([token.double(), logprobs_Rk1.double(), raw.double()]), logits, routes

    def _proposed(self, rows: int, choice: Choice, position: Tensor, *, cut: bool) -> tuple[Tensor, Tensor]:
        """Return k drafts for each row and what they were drawn from: looked up where that is asked for and they are found."""
        if not self.history.shape[1]:
            return self._draft(rows, choice, position, cut=cut)
        seen_Rk, seen_R = lookup(self.history[:rows], position, self.drafts)
        certain_RkV = certain(seen_Rk, self.runner.vocabulary)
        if not self.window:
            return seen_Rk, certain_RkV  # what is no repetition is a guess like any other
        drafts_Rk, heads_RkV = self._draft(rows, choice, position, cut=cut)
        chosen_Rk = torch.where(seen_R[:, None], seen_Rk, drafts_Rk)
        return chosen_Rk, torch.where(seen_R[:, None, None], certain_RkV, heads_RkV)

    def _draft(self, rows: int, choice: Choice, position: Tensor, *, cut: bool) -> tuple[Tensor, Tensor]:
        """Return k drafts for each row and what they were drawn from, as logits."""
        where = self._plan(rows, position - self.window, self.window)
        hidden = self.trail[:rows].flatten(0, 1)
        tokens = self.known[:rows]
        drawn_from = []
        for depth in range(self.drafts):
            hidden = self.runner.draft(depth, hidden, tokens[:, depth : depth + self.window].flatten(), where)
            last = hidden.unflatten(0, (rows, -1))[:, -1]
            token, scaled = self._draw(self.runner.head(last), choice, position + 1 + depth, cut=cut)
            drawn_from.append(scaled)
            tokens = torch.cat([tokens, token[:, None]], 1)
        return tokens[:, self.window :], torch.stack(drawn_from, 1)


def _drawn(logits_RV: Tensor, choice: Choice, position: Tensor, *, cut: bool) -> tuple[Tensor, Tensor]:
    """Return a draft, and what it was drawn from."""
    scaled_RV = distribution(logits_RV, choice, cut=cut)
    return draft(scaled_RV, choice, position), scaled_RV


class Prefill:
    """Passes over prompts on one device."""

    def __init__(self, runner: Runner, chunk: int, rows: int, pages: int, *, graphs: bool) -> None:
        self.runner, self.chunk = runner, max(chunk, LEAST)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor | None]]] | None = None
        if graphs and runner.lean:
            self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()
            depths = 1 + (runner.heads.depth if runner.heads else 0)
            self._tokens = torch.zeros(depths, self.chunk, dtype=torch.int64, device=runner.device)
            self._table = torch.zeros(rows, pages, dtype=torch.int32, device=runner.device)
            self._length = torch.zeros(rows, dtype=torch.int32, device=runner.device)
            self._begin = torch.zeros(rows + 1, dtype=torch.int32, device=runner.device)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(
        self, tokens: Sequence[Sequence[int]], places: Places, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits of the wanted tokens, and hidden states and experts of all, which the next pass may overwrite.

        `tokens`: those to read, then for each head those that follow them.
        """
        if self._graphs is None or self.runner.looked_into:
            return self._without_graph(tokens, places, wanted)
        count = len(tokens[0])
        size = bucket(max(count, LEAST), self.chunk)
        self._lay_out(tokens, places, size)
        if size not in self._graphs:
            for _ in range(2):  # kernels are compiled, libraries begun; what it writes into the cache is written again
                self._pass(size)
            self._graphs[size] = capture(partial(self._pass, size), self._pool)
        graph, (hidden, routes) = self._graphs[size]
        graph.replay()
        chosen = None if routes is None else routes[:count]
        return self.runner.head(hidden[self.runner.send(wanted)]), hidden[:count], chosen

    def _without_graph(
        self, tokens: Sequence[Sequence[int]], places: Places, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        runner = self.runner
        where = plan(places, runner.cache.size, runner.device)
        logits, hidden = runner.run(runner.send(tokens[0]), where, runner.send(wanted))
        drafted, routes = hidden, runner.routes
        for depth, following in enumerate(tokens[1:]):
            drafted = runner.draft(depth, drafted, runner.send(following), where)
        return logits, hidden, routes

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

    def _pass(self, size: int) -> tuple[Tensor, Tensor | None]:
        runner, most = self.runner, min(size, len(self._length))
        table, length, begin = self._table[:most], self._length[:most], self._begin[: most + 1]
        located = locate(table, length, begin, size, runner.cache.size)
        where = Plan(*located, table, length, begin, 0, size)
        hidden = drafted = runner.hidden(self._tokens[0, :size], where)
        routes = runner.routes
        for depth, following in enumerate(self._tokens[1:, :size]):
            drafted = runner.draft(depth, drafted, following, where)
        return hidden, routes


def capture(function: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record a CUDA graph of a function that has run before; return what it will write to each time it is replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        return graph, function()


def bucket(rows: int, most: int) -> int:
    """Return the size of batch to run for so many rows: a power of two, or half as much again, so that there are few graphs."""
    power = 1 << (rows - 1).bit_length()
    return min(most, power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power)
