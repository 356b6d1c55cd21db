"""Keys and values of all requests in pages, and where a forward pass reads and writes them.

Shapes: P pages, K key/value heads, S positions a page, D width of a head; N tokens of a pass, G requests in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a position, and how it attends."""

    heads: int
    key_width: int
    value_width: int
    scaling: float = 1.0  # of its scores
    window: int = 0  # positions it looks back; 0: all
    latent: bool = False  # its values are the beginning of its keys, kept once (DeepSeek's latent attention)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one position."""
        own = self.key_width + (0 if self.latent else self.value_width)
        return int(self.heads * own * dtype.itemsize)


class Cache:
    """The tensors, one for keys and one for values a layer: [P, K, S, D]. Page 0 is for what nobody reads."""

    def __init__(
        self, layers: Sequence[LayerShape], pages: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.size = size
        made = functools.partial(_zeros, device=device, dtype=dtype)
        self.keys = [made((pages + 1, each.heads, size, each.key_width)) for each in layers]
        self.values = [
            keys[..., : each.value_width] if each.latent else made((pages + 1, each.heads, size, each.value_width))
            for each, keys in zip(layers, self.keys, strict=True)
        ]

    def write(self, layer: int, plan: Plan, key_KND: Tensor, value_KND: Tensor) -> None:
        """Put keys and values of a pass where they belong."""
        for cache, new in ((self.keys[layer], key_KND), (self.values[layer], value_KND)):
            cache[plan.page_N, :, plan.offset_N] = new.transpose(0, 1).to(cache.dtype)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first positions of a page to another."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :count] = cache[source, :, :count]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros; on a CPU those of numpy, whose memory is taken as it is written: most of a cache never is."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(eq=False)
class Plan:
    """Where the tokens of a pass are: G requests, each with as many new tokens as the next or not, in order."""

    page_N: Tensor  # where each token's keys and values go
    offset_N: Tensor  # and where in that page
    position_N: Tensor
    table_GP: Tensor  # int32: pages of each request, 0 beyond its end
    length_G: Tensor  # int32: positions of each request, the new ones included
    begin_G: Tensor  # int32 [G + 1]: where its tokens begin among the N, and the end
    each: int  # new tokens a request, if all have as many; else 0
    longest: int  # the most new tokens a request has
    counts: list[int] = field(default_factory=list)  # on a CPU: new tokens of each request
    lengths: list[int] = field(default_factory=list)  # on a CPU: as length_G
    pages: list[list[int]] = field(default_factory=list)  # on a CPU: as table_GP
    blocks: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # on a GPU: how its kernel divides it


def locate(
    table_GP: Tensor, length_G: Tensor, begin_G: Tensor, tokens: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return page, offset and position of each token of a pass, worked out on the device; tokens that are nobody's go to page 0."""
    index = torch.arange(tokens, device=begin_G.device, dtype=torch.int32)
    owner = torch.searchsorted(begin_G[1:], index, right=True, out_int32=True).clamp(max=len(length_G) - 1)
    real = index < begin_G[-1]
    position = torch.where(real, index - begin_G[1:][owner] + length_G[owner], 0)
    page = torch.where(real, table_GP[owner, position // size], 0)
    return page.long(), (position % size).long(), position.long()


def plan(requests: Sequence[tuple[Sequence[int], int, int]], size: int, device: torch.device) -> Plan:
    """Return the plan of a pass over (pages, first new position, new tokens) of some requests."""
    counts = [count for _, _, count in requests]
    lengths = [first + count for _, first, count in requests]
    widest = max(len(pages) for pages, _, _ in requests)
    tables = [[*own, *([0] * (widest - len(own)))] for own, _, _ in requests]
    made = (tables, lengths, list(itertools.accumulate(counts, initial=0)))
    table, length, begin = (send(each, device, torch.int32) for each in made)
    located = locate(table, length, begin, sum(counts), size)
    each = counts[0] if len(set(counts)) == 1 else 0
    pages = [list(own) for own, _, _ in requests]
    return Plan(*located, table, length, begin, each, max(counts), counts, lengths, pages)


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return values as a tensor on the device, without waiting for it."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
