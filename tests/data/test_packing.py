from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.packing import Packed, pack

CAPACITIES = st.integers(1, 24)
LENGTHS = st.lists(st.integers(0, 60), max_size=60)
Piece = tuple[int, int, int]


def rows_of(packed: Packed) -> list[list[Piece]]:
    return [packed.row(index) for index in range(len(packed))]


def cut(lengths: list[int], capacity: int) -> list[Piece]:
    return [
        (document, start, min(capacity, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, capacity)
    ]


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[Piece]]:
    """Look at every row for every piece: the definition, word for word."""
    rows: list[list[Piece]] = []
    filled_at: list[int] = []
    for step, piece in enumerate(sorted(cut(lengths, capacity), key=lambda piece: -piece[2])):
        free = [capacity - sum(length for _, _, length in row) for row in rows]
        fitting = [(free[index], -filled_at[index], index) for index in range(len(rows)) if free[index] >= piece[2]]
        if not fitting:
            rows.append([])
            filled_at.append(0)
        index = min(fitting)[2] if fitting else len(rows) - 1
        rows[index].append(piece)
        filled_at[index] = step
    return rows


def first_fit(lengths: list[int], capacity: int) -> int:
    rows: list[int] = []
    for _, _, length in cut(lengths, capacity):
        index = next((index for index, used in enumerate(rows) if used + length <= capacity), len(rows))
        rows[index:] = [length] if index == len(rows) else [rows[index] + length, *rows[index + 1 :]]
    return len(rows)


@given(LENGTHS, CAPACITIES)
def test_it_is_best_fit_decreasing_to_the_row(lengths: list[int], capacity: int) -> None:
    assert rows_of(pack(lengths, capacity)) == best_fit_decreasing(lengths, capacity)


@given(LENGTHS, CAPACITIES)
def test_every_token_is_in_one_row_and_only_long_documents_are_cut(lengths: list[int], capacity: int) -> None:
    rows = rows_of(pack(lengths, capacity))
    tokens = sorted(
        (document, start + token) for row in rows for document, start, length in row for token in range(length)
    )
    assert tokens == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert all(0 < sum(length for _, _, length in row) <= capacity for row in rows)
    assert all(start % capacity == 0 for row in rows for _, start, _ in row)


@pytest.mark.parametrize("seed", range(8))
def test_fills_rows_no_worse_than_first_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(5, 1.2, 500)).astype(int).tolist()
    assert len(pack(lengths, 512)) < first_fit(lengths, 512)


def test_a_hand_worked_window() -> None:
    packed = pack(np.array([3, 25, 0, 6, 4, 1]), 10)
    assert rows_of(packed) == [[(1, 0, 10)], [(1, 10, 10)], [(3, 0, 6), (4, 0, 4)], [(1, 20, 5), (0, 0, 3), (5, 0, 1)]]


def test_nothing_packs_to_nothing() -> None:
    assert len(pack([], 8)) == len(pack([0, 0], 8)) == 0


@pytest.mark.parametrize("capacity", [2048, 32768])
def test_a_large_window_is_full(capacity: int) -> None:
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(6, 1.3, 100_000)).astype(int)
    packed = pack(lengths, capacity)
    assert packed.lengths.sum() == lengths.sum()
    assert lengths.sum() / (len(packed) * capacity) > 0.999
