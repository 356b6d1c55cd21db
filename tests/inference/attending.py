"""Attention worked out slowly, and cases to compare with: for the CPU's code, and for the kernels.

Run as a module it tries the kernels in Triton's interpreter, which needs no GPU, and prints how far off each case is. That needs a
process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

from etude.inference.kv_cache import Cache, LayerShape, Plan, locate, plan

Requests = list[tuple[list[int], int, int]]  # pages, first new position, new tokens


@dataclass(frozen=True)
class Case:
    """What a pass may look like."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    size: int
    requests: Requests
    window: int = 0
    latent: bool = False  # values are the beginning of keys

    @property
    def pages(self) -> int:
        return max(page for pages, _, _ in self.requests for page in pages) + 1

    @property
    def tokens(self) -> int:
        return sum(count for _, _, count in self.requests)


CASES = {
    "one token of each": Case(6, 2, 16, 16, 16, [([1, 2], 17, 1), ([3], 4, 1), ([5, 6, 7], 40, 1)]),
    "one token of each, all as far": Case(4, 4, 16, 16, 16, [([2, 9], 20, 1), ([3, 1], 20, 1)]),
    "a page each, in no order": Case(
        6, 2, 16, 16, 64, [([5], 17, 1), ([2], 40, 1), ([3], 9, 1), ([8], 3, 1), ([4], 60, 1)]
    ),
    "a page each, drafts, a window": Case(4, 2, 24, 16, 64, [([7], 30, 3), ([1], 5, 3), ([2], 50, 3)], window=9),
    "a first token": Case(3, 1, 16, 16, 16, [([4], 0, 1)]),
    "drafts of each": Case(6, 2, 16, 16, 16, [([1, 2], 14, 4), ([3], 4, 4), ([5, 6, 7], 40, 4)]),
    "a prompt from its beginning": Case(4, 2, 32, 32, 16, [([3, 1, 2], 0, 41)]),
    "prompts alike": Case(4, 2, 16, 16, 16, [([3, 1], 0, 17), ([2, 5], 0, 17)]),
    "prompts and their rests": Case(9, 3, 64, 64, 16, [([1, 2], 14, 10), ([3], 0, 4), ([5, 6, 7], 10, 37)]),
    "values narrower than keys": Case(4, 4, 24, 16, 16, [([1, 2], 14, 10), ([3], 0, 4), ([5, 6, 7], 10, 37)]),
    "values wider than keys": Case(2, 1, 16, 48, 16, [([1, 2], 14, 3), ([3], 0, 3)]),
    "a window": Case(4, 2, 24, 16, 16, [([1, 2], 14, 10), ([3], 0, 4), ([5, 6, 7], 10, 37)], window=7),
    "a window, one token of each": Case(4, 1, 24, 16, 16, [([1, 2], 20, 1), ([3], 0, 1), ([5, 6, 7], 40, 1)], window=7),
    "a window of one": Case(2, 2, 16, 16, 16, [([1, 2], 20, 1), ([3], 3, 1)], window=1),
    "a window wider than the text": Case(2, 1, 16, 16, 32, [([1, 2], 30, 5), ([3], 3, 5)], window=500),
    "a full page": Case(2, 1, 16, 16, 16, [([1, 2], 31, 1), ([3], 15, 1)]),
    "more heads than a block has rows": Case(32, 1, 16, 16, 16, [([1], 7, 2), ([2], 3, 1)]),
    "a longer prompt than a block": Case(8, 2, 16, 16, 64, [([4, 2, 3], 5, 150), ([1], 0, 30)]),
    "wide keys in two parts": Case(2, 1, 40, 16, 16, [([1, 2], 14, 10), ([3], 0, 4)]),
    "latent, one token of each": Case(40, 1, 48, 32, 16, [([1, 2], 20, 1), ([3], 3, 1)], latent=True),
    "latent, very many heads": Case(160, 1, 24, 16, 16, [([1, 2], 14, 3), ([3], 0, 5)], latent=True),
    "pages more than needed": Case(2, 1, 16, 16, 16, [([1, 2, 3, 4], 3, 2), ([5, 6, 7, 8], 20, 2)]),
}

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "turned": {"turn": True},
    "turned and padded": {"turn": True, "more": 5},
    "with sinks": {"sinks": True},
}


def filled(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Cache, Plan, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a cache full of numbers, also where nobody should look, a plan, queries, keys and values."""
    torch.manual_seed(0)
    shape = LayerShape(case.kv_heads, case.key_width, case.value_width, latent=case.latent)
    cache = Cache([shape, shape], case.pages, case.size, device, dtype)
    for each in (*cache.keys, *cache.values):
        each.copy_(torch.randn(each.shape) * 3)
    widths = (case.heads, case.key_width), (case.kv_heads, case.key_width), (case.kv_heads, case.value_width)
    new = [torch.randn(case.tokens, heads, width).to(device, dtype).transpose(0, 1) for heads, width in widths]
    if case.latent:
        new[2] = new[1][..., : case.value_width]
    return cache, plan(case.requests, case.size, device), *new


def attended(
    case: Case, cache: Cache, layer: int, query: torch.Tensor, scaling: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the attention of every token to every position it may see, one token at a time, in float64: [N, H, E]."""
    shared = case.heads // case.kv_heads
    keys, values = (each[layer].double().repeat_interleave(shared, 1) for each in (cache.keys, cache.values))
    found = list[torch.Tensor]()
    for pages, first, count in case.requests:
        for position in range(first, first + count):
            seen = range(max(0, position - case.window + 1) if case.window else 0, position + 1)
            at = (
                torch.tensor([pages[each // case.size] for each in seen]),
                torch.tensor([each % case.size for each in seen]),
            )
            key, value = (each.transpose(1, 2)[at].transpose(0, 1) for each in (keys, values))  # [H, seen, D]
            scores = (key @ query[:, len(found)].double()[:, :, None])[..., 0] * scaling
            if sinks is not None:  # a position more, of nought
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
                value = torch.nn.functional.pad(value, (0, 0, 0, 1))
            found.append((scores.softmax(-1)[:, None] @ value)[:, 0])
    return torch.stack(found)


def turned(given: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return queries or keys turned by their positions."""
    one, other = given.float().chunk(2, -1)
    return (given.float() * cosine + torch.cat([-other, one], -1) * sine).to(given.dtype)


def padded(where: Plan, requests: int, tokens: int, size: int) -> Plan:
    """Return a plan with requests and tokens more, which are nobody's, as a graph of a fixed size has them."""
    pad = torch.nn.functional.pad
    begin = torch.cat([where.begin_G, where.begin_G[-1:].expand(requests)])
    table, length = pad(where.table_GP, (0, 1, 0, requests)), pad(where.length_G, (0, requests))
    located = locate(table, length, begin, len(where.page_N) + tokens, size)
    return Plan(*located, table, length, begin, 0, max(where.longest, 17))


def kernels_differ_by(
    case: Case, device: torch.device, dtype: torch.dtype, *, turn: bool = False, more: int = 0, sinks: bool = False
) -> float:
    """Return how far the kernels' result is from the slow one; what they write into the cache must be equal.

    `turn`: they turn queries and keys. `more`: tokens and requests that are nobody's.
    """
    from etude.inference.kernels import attend_pages, write_pages

    cache, where, query, key, value = filled(case, device, dtype)
    expected = [each.clone() for each in (*cache.keys, *cache.values)]
    weights = torch.randn(case.heads).to(device, dtype) * 2 if sinks else None
    angles = torch.randn(2, case.tokens, case.key_width).to(device, dtype)
    right_query, right_key = (turned(each, *angles) if turn else each for each in (query, key))
    expected[1][where.page_N, :, where.offset_N] = right_key.transpose(0, 1)
    value = right_key[..., : case.value_width] if case.latent else value
    expected[3][where.page_N, :, where.offset_N] = value.transpose(0, 1)
    if more:
        where = padded(where, more, more, case.size)
        query, key, value, angles = (
            torch.nn.functional.pad(each, (0, 0, 0, more)) for each in (query, key, value, angles)
        )
    write_pages(cache, 1, where, key, value, (angles[0], angles[1]) if turn else None)
    close = 0.05 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(expected, (*cache.keys, *cache.values), strict=True):
        torch.testing.assert_close(one[1:], other[1:], rtol=close * turn, atol=close * turn)  # page 0 is nobody's
    turning = (angles[0], angles[1]) if turn else None
    got = attend_pages(query, cache, 1, where, 0.3, case.window, turning, weights)
    assert got.dtype == dtype
    assert not got[case.tokens :].any()
    return float((got[: case.tokens].double() - attended(case, cache, 1, right_query, 0.3, weights)).abs().max())


def main() -> None:
    """Try all cases on the CPU."""
    torch.Tensor.pin_memory = lambda self: self  # there is no GPU to pin memory for
    cpu = torch.device("cpu")
    found = {
        f"{name}, {way}": kernels_differ_by(case, cpu, torch.float32, **given)
        for name, case in CASES.items()
        for way, given in WAYS.items()
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
