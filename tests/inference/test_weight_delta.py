"""Weights as bytes: equal bit for bit, small, and never taken for good when they are not."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.weight_sync import Broken, Weights, apply, copied, encode, sealed, unpack, untie

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.bfloat16,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).copy_(torch.tensor(list(data), dtype=torch.uint8))
    return tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def packed(weights: Weights, base: Weights | None = None) -> bytes:
    once, ties = untie(weights)
    entries, pieces = encode(once, (0, untie(base)[0]) if base is not None else None)
    about = {"version": 1, "base": None if base is None else 0, "step": 1, "ties": ties, "entries": entries}
    return b"".join(sealed(about, pieces))


def through(weights: Weights, base: Weights | None = None) -> tuple[dict[str, Any], Weights]:
    header, pieces = unpack(packed(weights, base))
    return header, apply(header, pieces, {name: copied(each) for name, each in (base or {}).items()})


def steps_apart(dtype: torch.dtype, numbers: int) -> tuple[Weights, Weights]:
    """Weights before and after a step like Adam's at a learning rate of 2e-6."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(numbers, generator=generator) * 0.04
    after = before - 2e-6 * torch.randn(numbers, generator=generator)
    return {"w": before.to(dtype)}, {"w": after.to(dtype)}


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 9), max_size=3).map(tuple), seed=st.integers(0, 9999),
    share=st.sampled_from([0.0, 0.03, 0.1, 0.5, 1.0]),
)  # fmt: skip
def test_any_change_of_any_type_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, share: float
) -> None:
    chance = random.Random(seed)
    size = math.prod(shape) * dtype.itemsize
    limit = 1 if dtype is torch.bool else 255
    old = bytes(chance.randint(0, limit) for _ in range(size))
    new = bytes(chance.randint(0, limit) if chance.random() < share else byte for byte in old)
    before, after = of_bytes(old, dtype, shape), of_bytes(new, dtype, shape)
    for base in (None, {"w": before}):
        _, found = through({"w": after}, base)
        assert (bytes_of(found["w"]), found["w"].dtype, found["w"].shape) == (new, dtype, torch.Size(shape))
    assert bytes_of(before) == old


@pytest.mark.parametrize(("changed", "how"), [(0, "same"), (1, "few"), (125, "few"), (126, "all"), (1000, "all")])
def test_places_are_named_when_few_changed(changed: int, how: str) -> None:
    before, after = torch.zeros(1000), torch.zeros(1000)
    after[1000 - changed :] = 1.5
    header, found = through({"w": after}, {"w": before})
    assert [entry["how"] for entry in header["entries"]] == [how]
    assert torch.equal(found["w"], after)


def test_differences_may_wrap_around() -> None:
    ends = torch.tensor([-(2**63), 2**63 - 1, 0, -1], dtype=torch.int64)
    for shift in range(4):
        _, found = through({"w": ends}, {"w": ends.roll(shift)})
        assert torch.equal(found["w"], ends)


def test_a_bf16_step_takes_little_more_than_the_information_in_it() -> None:
    before, after = steps_apart(torch.bfloat16, 1_000_000)
    share = (before["w"] != after["w"]).float().mean().item()
    bits = -share * math.log2(share) - (1 - share) * math.log2(1 - share) + share  # where, and up or down
    size = len(packed(after, before))
    assert 0.01 < share < 0.05
    assert 1 < size / (bits * 1_000_000 / 8) < 1.3
    assert size < 0.02 * len(packed(after))


def test_a_float32_step_takes_less_than_half() -> None:
    before, after = steps_apart(torch.float32, 1_000_000)
    assert len(packed(after, before)) < 0.45 * len(packed(after))


def test_what_is_tied_is_there_once_and_what_only_shares_memory_is_not_tied() -> None:
    shared = torch.randn(40, 40)
    weights = {"head": shared, "other": shared.T, "part": shared[:20], "embed": shared, "e1": torch.empty(0), "e2": torch.empty(0)}  # fmt: skip
    header, found = through(weights)
    assert header["ties"] == {"embed": "head"}
    del weights["embed"]
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in weights.items()
    }


def test_a_copy_lies_in_order_and_in_the_memory_it_is_given() -> None:
    crossed, over = torch.arange(12).view(3, 4).T, torch.zeros(4, 3, dtype=torch.int64)
    assert copied(crossed, over) is over
    assert copied(crossed).is_contiguous()
    assert copied(crossed).tolist() == over.tolist() == crossed.tolist()


BEFORE, AFTER = steps_apart(torch.bfloat16, 300)
GOOD = packed({**AFTER, "n": torch.ones(3)}, {**BEFORE, "n": torch.zeros(3)})


@given(place=st.integers(0, len(GOOD) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(place: int, flip: int) -> None:
    bad = bytearray(GOOD)
    bad[place] ^= flip
    with pytest.raises(Broken):
        unpack(bytes(bad))


@given(length=st.integers(0, len(GOOD) - 1))
def test_any_cut_is_found(length: int) -> None:
    with pytest.raises(Broken):
        unpack(GOOD[:length])


@pytest.mark.parametrize(
    "base",
    [
        {"w": BEFORE["w"].flip(0), "n": torch.zeros(3)}, {"w": BEFORE["w"], "n": torch.full((3,), 1e-30)}, {"n": torch.zeros(3)},
        {"w": BEFORE["w"].float(), "n": torch.zeros(3)}, {"w": BEFORE["w"].view(30, 10), "n": torch.zeros(3)},
    ],
)  # fmt: skip
def test_another_base_is_found(base: Weights) -> None:
    with pytest.raises(Broken):
        apply(*unpack(GOOD), {name: copied(each) for name, each in base.items()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_makes_the_same_bytes(dtype: torch.dtype) -> None:
    before, after = steps_apart(dtype, 100_000)
    there = [{"w": each["w"].cuda()} for each in (before, after)]
    assert packed(there[1], there[0]) == packed(after, before)
    assert packed(there[1]) == packed(after)
    assert np.array_equal(copied(there[0]["w"]).float().cpu(), before["w"].float())
