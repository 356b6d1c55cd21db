from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from etude.lineage.compute import Attention, ComputeShape, attended_keys, forward_flops, training_flops
from etude.models.shape import shape_of
from tests import tiny

POSITIONS = st.integers(0, 80)
WINDOWS = st.none() | st.integers(1, 100)
TOKENS = 24
COUNTED_FAMILIES = tiny.FAMILIES


def pairs(start: int, length: int, window: int | None) -> int:
    """Count the (query, key) pairs one by one."""
    return sum(
        1
        for query in range(start, start + length)
        for key in range(query + 1)
        if window is None or query - key < window
    )


@settings(deadline=None)
@given(POSITIONS, POSITIONS, WINDOWS)
@example(5, 0, None)
@example(5, 3, 5)  # the window is full at the first position
@example(4, 3, 5)  # … and at the second
@example(0, 8, 8)
@example(9, 1, 1)
def test_attended_keys_are_the_pairs_of_the_mask(start: int, length: int, window: int | None) -> None:
    assert attended_keys(start, length, window) == pairs(start, length, window)


@settings(deadline=None)
@given(POSITIONS, POSITIONS, POSITIONS, WINDOWS)
def test_a_sequence_costs_the_same_in_one_piece_or_two(start: int, first: int, second: int, window: int | None) -> None:
    shape = ComputeShape(1000, (Attention(4, 8, 6), Attention(4, 8, 6, window)))
    whole = forward_flops(shape, first + second, start)
    assert whole == forward_flops(shape, first, start) + forward_flops(shape, second, start + first)


def test_forward_flops_of_a_shape_worked_out_by_hand() -> None:
    # 2 · 100 · 3 for the weights; keys 1 + 2 + 3 = 6 without a window, 1 + 2 + 2 = 5 with one of 2
    shape = ComputeShape(100, (Attention(heads=2, qk_dim=5, v_dim=3), Attention(heads=2, qk_dim=5, v_dim=3, window=2)))
    assert forward_flops(shape, 3) == 600 + 2 * 2 * 8 * 6 + 2 * 2 * 8 * 5
    assert training_flops(shape, 3) == 3 * forward_flops(shape, 3)


@pytest.fixture(scope="module", params=COUNTED_FAMILIES)
def counted(request: pytest.FixtureRequest) -> tuple[Any, ComputeShape, int, int]:
    """A model, its compute shape, and what torch counts for a forward pass and for a forward with a backward pass.

    Attention and experts run in their plain implementations: the counter does not see into fused kernels.
    """
    torch.manual_seed(0)
    config = tiny.config_of(request.param)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(1, tiny.VOCABULARY, (1, TOKENS))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens, use_cache=False)
    with FlopCounterMode(display=False) as both:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    with FlopCounterMode(display=False) as angles:  # transformers 5.17 multiplies positions and frequencies as matrices
        model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS)[None])
    rotary = angles.get_total_flops()
    return model, shape_of(config).compute, forward.get_total_flops() - rotary, both.get_total_flops() - rotary


def test_forward_flops_are_what_torch_counts(counted: tuple[Any, ComputeShape, int, int]) -> None:
    """Exactly, after corrections that are counts as well.

    torch counts matrix products only, so not the 2 operations a token that we count for every weight of a norm (the
    only vectors among these models' parameters). And plain attention computes all T · T pairs, the masked ones too,
    where we count the T (T + 1) / 2 of the model.
    """
    model, shape, forward, _ = counted
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    dense = sum(2 * layer.heads * (layer.qk_dim + layer.v_dim) * TOKENS * TOKENS for layer in shape.attention)
    causal = sum(2 * layer.heads * (layer.qk_dim + layer.v_dim) * pairs(0, TOKENS, None) for layer in shape.attention)
    assert len(shape.attention) == 2
    assert forward == forward_flops(shape, TOKENS) - 2 * norms * TOKENS - causal + dense


def test_training_is_three_times_forward_as_torch_counts_it(counted: tuple[Any, ComputeShape, int, int]) -> None:
    _, shape, forward, both = counted
    assert both == 3 * forward
    assert training_flops(shape, TOKENS) == 3 * forward_flops(shape, TOKENS)
