"""Context parallelism: several ranks share a row, each with a part of its positions, so that a longer row fits.

A row of T positions is cut into 2 · C chunks for C ranks; rank i has chunks i and 2C − 1 − i, so that all have the same part of the
causal triangle. Everything but attention is done position by position. Attention asks for the keys and values of the whole row: they
are gathered from the ranks, and in the backward pass their gradients are added up and scattered again (as for Llama 3, arXiv
2407.21783). These are a small part of a layer (grouped heads), and whatever attention does with them stays as it is: documents that a
cut goes through, windows, sinks. To the loop, ranks that share rows are ranks with other tokens.

Shapes: B rows, T positions of the whole row; K key/value heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from etude.errors import UserError
from etude.training.batch import Rows, Split

if TYPE_CHECKING:
    from etude.training.distributed import World

collectives = torch.ops._c10d_functional  # noqa: SLF001 - those that a compiler knows; their public names changed in torch 2.13


@dataclass(frozen=True)
class Context:
    """The ranks that share this rank's rows."""

    size: int = 1
    rank: int = 0  # among them
    group: str = ""  # by which torch knows them

    def chunks(self, length: int) -> tuple[slice, slice]:
        """Return which positions of a row of `length` this rank has."""
        if length % (2 * self.size):
            what = f"rows of {length} tokens cannot be shared by {self.size} ranks"
            raise UserError(f"{what}; their length must be a multiple of {2 * self.size}, or set context_ranks = 1")
        size = length // (2 * self.size)
        head, tail = self.rank * size, (2 * self.size - 1 - self.rank) * size
        return slice(head, head + size), slice(tail, tail + size)

    def part(self, rows: Rows) -> Rows:
        """Return this rank's positions of some rows that are in main memory."""
        if self.size == 1:
            return rows
        chunks = self.chunks(rows.tokens_BT.shape[1])
        sizes: list[tuple[list[int], list[int]]] = []  # of queries and of keys, piece by piece
        for positions in rows.positions_BT.numpy():
            starts = np.flatnonzero(positions == 0)
            for chunk in chunks:
                begins = np.append(starts[starts < chunk.stop], chunk.stop)
                sizes.append((np.diff(np.maximum(begins, chunk.start)).tolist(), np.diff(begins).tolist()))
        of_queries, of_keys = (
            torch.tensor([0, *(each for own in kind for each in own)]) for kind in zip(*sizes, strict=True)
        )
        own = (torch.cat([each[:, chunk] for chunk in chunks], 1) for each in (*rows.tensors()[:4], rows.live()))
        tokens, targets, weights, positions, live = own
        split = Split(self.group, self.size, (chunks[0].stop, chunks[1].stop), of_keys.cumsum(0).int(), live)
        return Rows(tokens, targets, weights, positions, of_queries.cumsum(0).int(), split=split)

    def whole(self, part_BT: Tensor) -> Tensor:
        """Return what all ranks have of some rows, [B, T]: every one of them must ask."""
        return part_BT if self.size == 1 else in_order(part_BT[:, None, :, None], self.size, self.group)[:, 0, :, 0]


def context_of(world: World, ranks: int, length: int) -> Context:
    """Return the ranks that share rows of `length` tokens with this one, `ranks` of them."""
    if ranks == 1:
        return Context()
    if world.size % ranks:
        what = f"context_ranks = {ranks} must divide the number of ranks, {world.size} here"
        raise UserError(f"{what}; start a multiple of it with torchrun")
    context = Context(ranks, world.rank % ranks)
    context.chunks(length)
    return replace(context, group=_group(ranks))


@cache
def _group(ranks: int) -> str:
    group, _ = dist.new_subgroups(group_size=ranks)
    return str(group.group_name)


class _Gather(torch.autograd.Function):
    """[…] of each rank → [ranks, …]; the gradients of all ranks are added up, in float32."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return collectives.wait_tensor(collectives.all_gather_into_tensor(part[None].contiguous(), ranks, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        full = gradient.float().contiguous()
        added = collectives.wait_tensor(collectives.reduce_scatter_tensor(full, "sum", ctx.ranks, ctx.group))
        return added[0].to(gradient.dtype), None, None


def in_order(part_BKTD: Tensor, ranks: int, group: str) -> Tensor:
    """Return what the ranks have of some rows, in the order of the positions."""
    heads, tails = _Gather.apply(part_BKTD, ranks, group).chunk(2, 3)
    return torch.cat([*heads.unbind(0), *tails.flip(0).unbind(0)], 2)


def seen_keys(
    key_BKTD: Tensor, value_BKTD: Tensor, ranks: int, group: str, ends: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the keys and values up to the end of each of this rank's two chunks, one after the other."""
    whole = in_order(torch.cat([key_BKTD, value_BKTD], -1), ranks, group)
    key, value = torch.cat([whole[:, :, :end] for end in ends], 2).split([key_BKTD.shape[-1], value_BKTD.shape[-1]], -1)
    return key, value


@torch.no_grad()  # type: ignore[untyped-decorator]
def try_out(context: Context, nats: Any, device: torch.device) -> None:
    """Refuse a model that computes something else of a row in parts than of the whole: one with a memory of its own, say."""
    length = 8 * context.size
    some = torch.arange(length)[None]
    bounds = torch.tensor([0, 3, length], dtype=torch.int32)  # a short piece, and one that every cut goes through
    positions = torch.where(some < 3, some, some - 3)
    rows = Rows(1 + some % 7, 1 + some.roll(-1, 1) % 7, torch.ones(1, length), positions, bounds)
    with torch.compiler.set_stance("force_eager"):
        apart, alone = context.whole(nats(context.part(rows).to(device))), nats(rows.to(device))
    if not torch.allclose(apart, alone, rtol=5e-2, atol=5e-2 * float(alone.abs().max())):
        what = "context_ranks: this model computes something else of a part of a row than of the whole"
        raise UserError(f"{what}; set context_ranks = 1")
