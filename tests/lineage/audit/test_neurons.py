from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from etude.lineage.audit.descent_tests import (
    ASSIGNED_ROWS,
    ROUTER,
    SAMPLED_ROWS,
    RowMatch,
    fisher,
    match_rows,
    neuron_test,
    unit_rows,
)
from tests.lineage.audit.made import gaussian, look_uniform


@pytest.mark.parametrize(("rows_a", "rows_b"), [(6, 6), (4, 6), (6, 4)])
def test_no_pairing_of_all_has_a_larger_sum(rows_a: int, rows_b: int) -> None:
    chance = np.random.default_rng(0)
    a, b = gaussian(chance, rows_a, 5), gaussian(chance, rows_b, 5)
    cosines = unit_rows(a) @ unit_rows(b).T
    small, wide = (cosines, rows_b) if rows_a <= rows_b else (cosines.T, rows_a)
    best = max(small[np.arange(len(small)), order].mean() for order in itertools.permutations(range(wide), len(small)))
    assert match_rows(a, b).cosine == pytest.approx(best, abs=1e-6)
    small = np.abs(small)
    best = max(small[np.arange(len(small)), order].mean() for order in itertools.permutations(range(wide), len(small)))
    assert match_rows(a, b, signed=False).cosine == pytest.approx(best, abs=1e-6)


def test_length_of_rows_does_not_count() -> None:
    chance = np.random.default_rng(1)
    a = gaussian(chance, 50, 20)
    match = match_rows(a, a * chance.uniform(0.01, 100, (50, 1)).astype(np.float32))
    assert (match.rows == match.partners).all()
    assert match.cosine == pytest.approx(1)


def test_a_noisy_copy_is_recognised_to_the_last_permutation() -> None:
    chance = np.random.default_rng(2)
    a = gaussian(chance, 192, 64)
    test = neuron_test([(layer, match_rows(a, a + gaussian(chance, 192, 64))) for layer in (0, 3)])
    assert test.layers == (0, 3)
    assert test.effect == pytest.approx(1)
    assert test.log10_p == pytest.approx(fisher([-math.lgamma(193) / math.log(10)] * 2))
    assert "0.7" in test.note


def test_a_pruned_copy_keeps_its_order_in_either_direction() -> None:
    chance = np.random.default_rng(3)
    a = gaussian(chance, 200, 64)
    kept = np.sort(chance.choice(200, 120, replace=False))
    b = a[kept] + 0.5 * gaussian(chance, 120, 64)
    forth, back = match_rows(a, b), match_rows(b, a)
    assert (forth.rows == kept).all()
    assert (back.partners == kept).all()
    for match in (forth, back):
        assert (neuron_test([(0, match)]).log10_p or 0) < -100


def test_strangers_get_uniform_p_values() -> None:
    chance = np.random.default_rng(4)
    assert look_uniform([stranger_p(chance, 60, 60) for _ in range(200)])
    assert look_uniform([stranger_p(chance, 60, 40) for _ in range(200)])


def stranger_p(chance: np.random.Generator, rows_a: int, rows_b: int) -> float:
    match = match_rows(gaussian(chance, rows_a, 16), gaussian(chance, rows_b, 16))
    return neuron_test([(0, match)]).log10_p or 0.0


def test_padding_of_both_is_no_kinship() -> None:
    chance = np.random.default_rng(5)
    found = []
    for _ in range(100):
        a, b = gaussian(chance, 64, 8), gaussian(chance, 64, 8)
        a[32:], b[32:] = 0, 0
        match = match_rows(a, b)
        assert match.rows.max() < 32
        found.append(neuron_test([(0, match)]).log10_p or 0.0)
    assert look_uniform(found)


def test_rows_that_cannot_be_told_apart_are_not_paired_by_their_place() -> None:
    equal = np.ones((40, 2), np.float32)
    assert look_uniform([neuron_test([(0, match_rows(equal, equal, seed=seed))]).log10_p or 0.0 for seed in range(40)])


def test_rows_that_all_choose_the_same_partner_say_nothing() -> None:
    equal = np.ones((ASSIGNED_ROWS + 1, 2), np.float32)
    assert neuron_test([(0, match_rows(equal, equal))]).log10_p == 0


def test_nothing_but_padding_says_nothing() -> None:
    empty = np.zeros((8, 4), np.float32)
    assert neuron_test([(0, match_rows(empty, empty))]).log10_p == 0
    assert neuron_test([]).log10_p == 0


def test_wide_layers_are_sampled_and_it_is_said() -> None:
    chance = np.random.default_rng(6)
    a = gaussian(chance, ASSIGNED_ROWS + 100, 24)
    copy = match_rows(a, a + 0.1 * gaussian(chance, *a.shape))
    assert copy.sampled
    assert (copy.rows == copy.partners).all()
    assert len(copy.rows) == SAMPLED_ROWS
    assert "2,048 sampled rows" in neuron_test([(0, copy)]).note
    again = match_rows(a, a)
    assert (again.rows == copy.rows).all()
    assert again.cosine == pytest.approx(1)


def test_strangers_stay_strangers_when_sampled() -> None:
    chance = np.random.default_rng(7)
    assert look_uniform([stranger_p(chance, ASSIGNED_ROWS + 1, ASSIGNED_ROWS + 1) for _ in range(15)])


def test_copies_of_one_expert_are_one_witness() -> None:
    """Upcycled experts share their order, so that Fisher over them would count one accident eight times."""
    chance = np.random.default_rng(8)
    order = np.argsort(np.arange(40) + 15 * chance.standard_normal(40))
    expert = RowMatch(np.arange(40), order, 0.5)
    one = neuron_test([(0, expert)])
    eight = neuron_test([(0, expert)] * 8)
    assert one.log10_p is not None
    assert -12 < one.log10_p < -2
    assert eight.log10_p == pytest.approx(one.log10_p + math.log10(8))
    assert eight.effect == one.effect
    assert neuron_test([(0, expert), (1, expert)]).log10_p == pytest.approx(fisher([one.log10_p] * 2))


def test_the_surest_expert_speaks_for_its_layer() -> None:
    copy, stranger = RowMatch(np.arange(30), np.arange(30), 0.9), RowMatch(np.arange(30), np.arange(30)[::-1], 0.1)
    test = neuron_test([(2, stranger), (2, copy)], name=ROUTER)
    assert (test.name, test.layers) == (ROUTER, (2,))
    assert test.effect == pytest.approx(1)
