"""Attention over a paged cache on a GPU, in Triton: one kernel for reading a prompt, for one new token, and for several drafted ones.

Ours because torch has none that reads pages, and transformers copies all keys and values of all requests together in every layer of
every step. A program handles some new tokens of one request for one key/value head, with all query heads that share it, and goes
through the pages of that request, a page at a time. Few requests with long texts would leave most of a GPU idle, so the pages of a
request may be split among several programs, whose results a second kernel joins.

A width that is no power of two is taken in two parts, the largest power of two in it and the rest: padding the 576 numbers of
DeepSeek's latent keys to 1,024 would fill a processor's memory. Where very many heads share keys, they are split among programs too.

Shapes: N tokens, H heads, K key/value heads, D width of keys, E width of values.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from etude.inference.kv_cache import Cache, Plan

    Turn = tuple[torch.Tensor, torch.Tensor] | None  # cosine and sine of each token's position, [N, D]

PROGRAMS = 1056  # enough to fill a large GPU several times
LOG2E = 1.4426950408889634


@triton.jit
def _turned(own, other, angle, cosine, sine, low, real):
    # `other`: the same of the other half of the head, which counts against the lower half.
    turned = own * tl.load(cosine + angle, mask=real, other=0.0).to(tl.float32)
    return turned + other * tl.where(low, -1.0, 1.0) * tl.load(sine + angle, mask=real, other=0.0)


@triton.jit
def _write(  # noqa: PLR0913, PLR0917
    key, value, keys, values, page_N, offset_N, cosine, sine, key_head, key_token, value_head, value_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROW_E: tl.constexpr, WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    place = (tl.load(page_N + token) * HEADS + head) * SIZE + tl.load(offset_N + token)
    d, e = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    at = key + head * key_head + token * key_token
    new_key = tl.load(at + d, mask=d < D)
    if TURN:  # rotary positions: here, and where a query is read, it costs no pass over them
        other = tl.load(at + (d + D // 2) % D, mask=d < D)
        new_key = _turned(new_key, other, token * D + d, cosine, sine, d < D // 2, d < D).to(keys.dtype.element_ty)
    new_value = tl.load(value + head * value_head + token * value_token + e, mask=e < E)
    tl.store(keys + place * D + d, new_key, mask=d < D)
    tl.store(values + place * ROW_E + e, new_value, mask=e < E)


@triton.jit
def _query(  # noqa: PLR0913, PLR0917
    query, at, d, real, angle, cosine, sine, D: tl.constexpr, TURN: tl.constexpr
):
    # Some columns of the queries of a block; `angle`: where the angles of its tokens begin.
    there_is = real[:, None] & (d < D)[None]
    q = tl.load(query + at[:, None] + d[None], mask=there_is, other=0.0)
    if TURN:
        other = tl.load(query + at[:, None] + ((d + D // 2) % D)[None], mask=there_is, other=0.0)
        q = _turned(q, other, angle[:, None] + d[None], cosine, sine, (d < D // 2)[None], there_is)
    return q


@triton.jit
def _attend(  # noqa: PLR0913, PLR0915, PLR0917
    query, keys, values, out, tops, sums, sinks, table, length_G, begin_G, block_request, block_first, cosine, sine,
    query_head, query_token, table_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROW_E: tl.constexpr, MAIN_D: tl.constexpr, REST_D: tl.constexpr, WIDE_E: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, PLAIN: tl.constexpr, TURN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PLAIN:  # one new token a request
        request, first = block, 0
    else:
        request, first = tl.load(block_request + block), tl.load(block_first + block)
    begin = tl.load(begin_G + request)
    new = tl.load(begin_G + request + 1) - begin
    length = tl.load(length_G + request)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    real = (token < new) & (row < (ROWS // GROUP) * GROUP)
    position = length - new + token
    own_head = head * GROUP + row % GROUP
    d, e, n = tl.arange(0, MAIN_D), tl.arange(0, WIDE_E), tl.arange(0, SIZE)
    at, angle = (begin + token) * query_token + own_head * query_head, (begin + token) * D
    q = _query(query, at, d, real, angle, cosine, sine, D, TURN).to(keys.dtype.element_ty)
    if REST_D > 0:
        r = MAIN_D + tl.arange(0, REST_D)
        q_rest = _query(query, at, r, real, angle, cosine, sine, D, TURN).to(keys.dtype.element_ty)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a position that one part has seen before all others: it has nothing to say
        sink = tl.load(sinks + own_head).to(tl.float32) * 1.4426950408889634
        top = tl.where(part == 0, sink, top)
        total = tl.where(part == 0, 1.0, total)
    attended = tl.zeros([ROWS, WIDE_E], tl.float32)
    last = tl.minimum(length, length - new + first + ROWS // GROUP)
    from_page = tl.maximum(0, length - new + first - WINDOW + 1) // SIZE if WINDOW > 0 else 0
    pages = (tl.cdiv(last, SIZE) - from_page) * (new > first).to(tl.int32)  # some blocks are there for nobody
    each = tl.cdiv(pages, PARTS)
    for index in range(from_page + part * each, from_page + tl.minimum(pages, (part + 1) * each)):
        page = tl.load(table + request * table_row + index).to(tl.int64)
        base = (page * (HEADS // SPLIT) + head // SPLIT) * SIZE
        there = index * SIZE + n
        filled = (there < length)[:, None]
        k = tl.load(keys + (base + n)[:, None] * D + d[None], mask=filled & (d < D)[None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST_D > 0:
            k_rest = tl.load(keys + (base + n)[:, None] * D + r[None], mask=filled & (r < D)[None], other=0.0)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores *= scale
        seen = (there[None] <= position[:, None]) & real[:, None]
        if WINDOW > 0:
            seen = seen & (there[None] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        shares = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        v = tl.load(values + (base + n)[:, None] * ROW_E + e[None], mask=filled & (e < E)[None], other=0.0)
        attended = attended * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(shares, 1)
        top = higher
    to = ((begin + token) * HEADS * GROUP + own_head) * PARTS + part
    if PARTS == 1:
        attended = attended / tl.where(total == 0, 1.0, total)[:, None]
    else:
        tl.store(tops + to, top, mask=real)
        tl.store(sums + to, total, mask=real)
    tl.store(out + to[:, None] * E + e[None], attended.to(out.dtype.element_ty), mask=real[:, None] & (e < E)[None])


@triton.jit
def _join(out, parts, tops, sums, E: tl.constexpr, WIDE_E: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    c, e = tl.arange(0, PARTS), tl.arange(0, WIDE_E)
    top = tl.load(tops + row * PARTS + c)
    highest = tl.max(top, 0)
    shares = tl.exp2(
        top - tl.where(highest == -float("inf"), 0.0, highest)
    )  # a token before its text's beginning sees nothing
    total = tl.sum(shares * tl.load(sums + row * PARTS + c), 0)
    total = tl.where(total == 0, 1.0, total)
    each = tl.load(parts + (row * PARTS + c)[:, None] * E + e[None], mask=(e < E)[None], other=0.0)
    attended = tl.sum(each * shares[:, None], 0) / total
    tl.store(out + row * E + e, attended.to(out.dtype.element_ty), mask=e < E)


def write_pages(
    cache: Cache, layer: int, plan: Plan, key_KND: torch.Tensor, value_KNE: torch.Tensor, turn: Turn = None
) -> None:
    """Put keys and values of a pass where they belong; `turn`: keys are turned by their positions first."""
    keys, values = cache.keys[layer], cache.values[layer]
    heads, tokens, width = key_KND.shape
    wide = value_KNE.shape[2]
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key_KND, value_KNE))
    _write[(tokens, heads)](
        key, value, keys, values, plan.page_N, plan.offset_N, *(turn or (key, key)), *key.stride()[:2], *value.stride()[:2],
        heads, cache.size, width, wide, values.stride(2), triton.next_power_of_2(width), triton.next_power_of_2(wide),
        turn is not None, num_warps=1,
    )  # fmt: skip


def attend_pages(
    query_HND: torch.Tensor, cache: Cache, layer: int, plan: Plan, scaling: float, window: int, turn: Turn = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of each token to what its request has in the cache: [N, H, E]; nought for tokens that are nobody's."""
    query = query_HND if query_HND.stride(2) == 1 else query_HND.contiguous()
    keys, values = cache.keys[layer], cache.values[layer]
    (heads, tokens, width), wide = query.shape, values.shape[3]
    main, wide_e = max(16, 1 << (width.bit_length() - 1)), max(16, triton.next_power_of_2(wide))
    rest = max(16, triton.next_power_of_2(width - main)) if width > main else 0
    most = max(16, min(64, 16384 // wide_e))  # rows of a block whose sums a processor can hold
    split = triton.cdiv(heads // keys.shape[1], most)
    while heads // keys.shape[1] % split:
        split += 1
    kv, group = keys.shape[1] * split, heads // keys.shape[1] // split
    rows = max(16, triton.next_power_of_2(min(plan.longest * group, most)))
    blocks = _blocks(plan, rows // group)
    parts = _parts(plan, len(blocks[0]) * kv)
    out = (query.new_empty if plan.each else query.new_zeros)(tokens, heads, wide)
    if parts == 1:
        attended, tops, sums = out, out, out
    else:
        attended = query.new_empty(tokens, heads, parts, wide, dtype=torch.float32)
        tops, sums = (query.new_empty(tokens, heads, parts, dtype=torch.float32) for _ in range(2))
    _attend[(len(blocks[0]), kv, parts)](
        query, keys, values, attended, tops, sums, query if sinks_H is None else sinks_H, plan.table_GP, plan.length_G,
        plan.begin_G, *blocks, *(turn or (query, query)), *query.stride()[:2], plan.table_GP.stride(0), scaling * LOG2E,
        kv, group, split, cache.size, width, wide, values.stride(2), main, rest, wide_e,
        rows, parts, window, plan.each == 1, turn is not None, sinks_H is not None,
        num_warps=4 if parts == 1 else 2, num_stages=2 if plan.each else 3,
    )  # fmt: skip
    if parts > 1:
        _join[(tokens * heads,)](out, attended, tops, sums, wide, wide_e, parts, num_warps=1)
    return out


def _blocks(plan: Plan, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return request and first token of each block of at most so many tokens of one request; made once a pass."""
    if tokens not in plan.blocks:
        plan.blocks[tokens] = _cut(plan, tokens)
    return plan.blocks[tokens]


def _cut(plan: Plan, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    device, requests = plan.length_G.device, len(plan.length_G)
    if plan.each:
        each = -(-plan.each // tokens)
        index = torch.arange(requests * each, device=device, dtype=torch.int32)
        return index // each, index % each * tokens
    # Worked out on the device, where a graph can repeat it: as many blocks as could be needed, the last of them for nobody.
    count_G = plan.begin_G[1:] - plan.begin_G[:-1]
    blocks_G = (count_G + tokens - 1) // tokens
    end_G = blocks_G.cumsum(0, dtype=torch.int32)
    index = torch.arange(-(-len(plan.position_N) // tokens) + requests, device=device, dtype=torch.int32)
    request = torch.searchsorted(end_G, index, right=True, out_int32=True).clamp(max=requests - 1)
    return request, (index - (end_G - blocks_G)[request]) * tokens


def _parts(plan: Plan, programs: int) -> int:
    """Return into how many parts to split the pages of a request: a power of two, fixed for a size of batch."""
    if plan.longest > 16:
        return 1
    return int(min(16, triton.next_power_of_2(max(1, PROGRAMS // programs))))
