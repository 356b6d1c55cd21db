"""The experts of a few tokens on a GPU, in Triton: every expert's weights are read once, and only those of experts that were chosen.

Ours because a decoding step has a handful of tokens an expert. A grouped product pads each to a tile of 64 or 128, and reading the
weights is all the work there is: here a program takes some columns of one expert, and some of the tokens that chose it. Experts that
many tokens chose have several programs for the same columns, beside each other, so that the weights come from the cache but once.
Which tokens those are is counted on the device, so a CUDA graph can repeat it, and nothing is sorted. For more tokens than `FEW`
(lean.py) grouped products are better. Profiled on an H200 (lab notes): where experts are chosen evenly, both kernels read at the speed
of memory; one program for all tokens of an expert was what took longer when they were not.

Shapes: N tokens, K experts a token, S = N · K pairs of both, E experts, D width of the model, F width of an expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.activations import SiLUActivation

LEAST, MOST = 16, 64  # tokens at a time; the fewest a matrix unit takes
SIDE_BY_SIDE = 4  # programs for the same columns of an expert, at most: each that finds no tokens takes time as well


@triton.jit
def _count(chosen_S, pairs_EN, count_E, pairs, tokens, BLOCK: tl.constexpr):
    # List the pairs of one expert, in order. A token chooses an expert once at most, so N places are enough.
    expert = tl.program_id(0)
    taken = 0
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(chosen_S + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs_EN + expert * tokens + taken + tl.cumsum(own, 0) - 1, at, mask=own > 0)
        taken += tl.sum(own, 0)
    tl.store(count_E + expert, taken)


@triton.jit
def _gate_up(  # noqa: PLR0913, PLR0917
    x, weight, bias, pairs_EN, count_E, out, tokens, expert_row, column_row, input_row, alpha, limit,
    TOP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    # Gate and up of column n of an expert are columns n and F + n of its matrix, or 2 n and 2 n + 1. These are read as they lie and
    # told apart afterwards: every second number alone would be read one by one.
    n, expert = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    count = tl.load(count_E + expert)
    both_n = tl.program_id(1) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
    matrix = weight + expert.to(tl.int64) * expert_row
    before = tl.program_id(0) * ROWS
    for start in range(0, count - before, BESIDE * ROWS):
        row = before + start + tl.arange(0, ROWS)
        pair = tl.load(pairs_EN + expert * tokens + row, mask=row < count, other=0)
        gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        both = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
        for inner in range(0, D, INNER):
            d = inner + tl.arange(0, INNER)
            given = tl.load(
                x + (pair // TOP)[:, None] * D + d[None], mask=(row < count)[:, None] & (d < D)[None], other=0.0
            )
            rows = matrix + d[:, None] * input_row
            if INTERLEAVED:
                real = (d < D)[:, None] & (both_n < 2 * F)[None]
                own = tl.load(rows + both_n[None] * column_row, mask=real, other=0.0)
                both = tl.dot(given, own, both, input_precision="ieee")
            else:
                at, real = rows + n[None] * column_row, (d < D)[:, None] & (n < F)[None]
                gate = tl.dot(given, tl.load(at, mask=real, other=0.0), gate, input_precision="ieee")
                up = tl.dot(given, tl.load(at + F * column_row, mask=real, other=0.0), up, input_precision="ieee")
        if INTERLEAVED:
            gate, up = tl.split(tl.reshape(both, [ROWS, COLUMNS, 2]))
        if BIAS:
            first = bias + expert * 2 * F + (2 * n if INTERLEAVED else n)
            gate += tl.load(first, mask=n < F, other=0.0).to(tl.float32)[None]
            up += tl.load(first + (1 if INTERLEAVED else F), mask=n < F, other=0.0).to(tl.float32)[None]
        if CLAMPED:  # GPT-OSS's
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            gate = gate * tl.sigmoid(gate * alpha)
        else:
            gate = gate * tl.sigmoid(gate)
        to = out + pair[:, None] * F + n[None]
        tl.store(to, (gate * up).to(out.dtype.element_ty), mask=(row < count)[:, None] & (n < F)[None])


@triton.jit
def _down(  # noqa: PLR0913, PLR0917
    hidden, weight, bias, share_S, pairs_EN, count_E, out, tokens, expert_row, column_row, input_row,
    D: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    n, expert = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    count = tl.load(count_E + expert)
    columns = weight + expert.to(tl.int64) * expert_row + n[None] * column_row
    before = tl.program_id(0) * ROWS
    for start in range(0, count - before, BESIDE * ROWS):
        row = before + start + tl.arange(0, ROWS)
        pair = tl.load(pairs_EN + expert * tokens + row, mask=row < count, other=0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for inner in range(0, F, INNER):
            f = inner + tl.arange(0, INNER)
            given = tl.load(
                hidden + pair[:, None] * F + f[None], mask=(row < count)[:, None] & (f < F)[None], other=0.0
            )
            own = tl.load(columns + f[:, None] * input_row, mask=(f < F)[:, None] & (n < D)[None], other=0.0)
            total = tl.dot(given, own, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + expert * D + n, mask=n < D, other=0.0).to(tl.float32)[None]
        total *= tl.load(share_S + pair, mask=row < count, other=0.0).to(tl.float32)[:, None]
        to = out + pair[:, None] * D + n[None]
        tl.store(to, total.to(out.dtype.element_ty), mask=(row < count)[:, None] & (n < D)[None])


def known(experts: Any) -> bool:
    """Return whether these experts are of a kind that the kernels compute."""
    gate = getattr(type(experts), "_apply_gate", None)
    plain = getattr(gate, "__name__", "") == "_default_apply_gate" and isinstance(experts.act_fn, SiLUActivation)
    clamped = hasattr(experts, "alpha") and hasattr(experts, "limit") and not experts.is_concatenated
    return (plain or clamped) and not getattr(
        experts, "has_post_expert_norm", False
    )  # transformers 5.17 has no such flag


def few_tokens(x_ND: Tensor, chosen_NK: Tensor, share_NK: Tensor, experts: Any) -> Tensor:
    """Return what the chosen experts make of each token, added up by its shares."""
    biases = [experts.gate_up_proj_bias, experts.down_proj_bias] if experts.has_bias else []
    clamp = [float(experts.alpha), float(experts.limit)] if hasattr(experts, "limit") else []
    return _opaque(
        x_ND, chosen_NK, share_NK, experts.gate_up_proj, experts.down_proj, biases, clamp,
        experts.is_transposed, experts.is_concatenated,
    )  # fmt: skip


@torch.library.custom_op("etude::few_tokens", mutates_args=())
def _opaque(  # noqa: PLR0913, PLR0917
    x_ND: Tensor, chosen_NK: Tensor, share_NK: Tensor, gate_up: Tensor, down: Tensor, biases: list[Tensor],
    clamp: list[float], transposed: bool, concatenated: bool,  # noqa: FBT001
) -> Tensor:  # fmt: skip
    """Launch the kernels; to a compiler, one operation. `clamp`: GPT-OSS's two numbers."""
    (tokens, width), top, count = x_ND.shape, chosen_NK.shape[1], len(gate_up)
    x, share, chosen = x_ND.contiguous(), share_NK.contiguous(), chosen_NK.contiguous()
    inner = down.shape[1] if transposed else down.shape[2]
    pairs = torch.empty(count, tokens, dtype=torch.int32, device=x.device)
    counts = torch.empty(count, dtype=torch.int32, device=x.device)
    hidden, out = x.new_empty(tokens * top, inner), x.new_empty(tokens, top, width)
    _count[(count,)](chosen, pairs, counts, tokens * top, tokens, triton.next_power_of_2(min(tokens * top, 1024)))
    wide = 32 if tokens <= 64 else 64
    # Twice the tokens that an expert has on average: most then take one go, and few places are empty.
    rows = min(MOST, max(LEAST, triton.next_power_of_2(triton.cdiv(2 * tokens * top, count))))
    beside = min(SIDE_BY_SIDE, triton.cdiv(tokens, rows))
    up_rows, down_rows = (
        (each.stride(0), *(each.stride()[:0:-1] if transposed else each.stride()[1:])) for each in (gate_up, down)
    )
    bias_up, bias_down = biases or (x, x)
    how = {
        "ROWS": rows,
        "BESIDE": beside,
        "COLUMNS": wide,
        "INNER": 32 if x.element_size() == 4 else 64 if transposed else 128,
        "num_warps": 4,
        "num_stages": 4,
    }
    _gate_up[(beside, triton.cdiv(inner, wide), count)](
        x, gate_up, bias_up, pairs, counts, hidden, tokens, *up_rows, *(clamp or (0.0, 0.0)), top, width, inner,
        not concatenated, bool(biases), bool(clamp), **how,
    )  # fmt: skip
    wide = 64 if transposed else wide  # columns then lie beside each other: so many are read in one go
    _down[(beside, triton.cdiv(width, wide), count)](
        hidden, down, bias_down, share, pairs, counts, out, tokens, *down_rows, width, inner, bool(biases), **how | {"COLUMNS": wide}
    )  # fmt: skip
    return out.sum(1)


@_opaque.register_fake
def _(  # noqa: PLR0913, PLR0917
    x_ND: Tensor, chosen_NK: Tensor, share_NK: Tensor, gate_up: Tensor, down: Tensor, biases: list[Tensor],
    clamp: list[float], transposed: bool, concatenated: bool,  # noqa: FBT001
) -> Tensor:  # fmt: skip
    del chosen_NK, share_NK, gate_up, down, biases, clamp, transposed, concatenated
    return torch.empty_like(x_ND)
