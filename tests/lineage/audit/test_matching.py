from __future__ import annotations

import numpy as np
import pytest

from etude.lineage.audit.descent_tests import ASSIGNED_ROWS, RowMatch, match_rows, matching_test, neuron_test
from tests.lineage.audit.made import gaussian, look_uniform


def shuffled_copy(chance: np.random.Generator, rows: int, kept: int) -> tuple[RowMatch, RowMatch]:
    up, gate = gaussian(chance, rows, 24), gaussian(chance, rows, 24)
    order = chance.permutation(rows)[:kept]
    noise = 0.3
    return (
        match_rows(up, up[order] + noise * gaussian(chance, kept, 24)),
        match_rows(gate, gate[order] + noise * gaussian(chance, kept, 24)),
    )


@pytest.mark.parametrize(("rows", "kept"), [(150, 150), (150, 90), (ASSIGNED_ROWS + 1, ASSIGNED_ROWS + 1)])
def test_a_shuffled_copy_is_found_where_the_order_of_neurons_is_blind(rows: int, kept: int) -> None:
    up, gate = shuffled_copy(np.random.default_rng(0), rows, kept)
    assert (neuron_test([(0, up)]).log10_p or 0) > -3
    test = matching_test([(0, up, gate)])
    assert test.log10_p is not None
    assert test.log10_p < -50
    assert test.effect > 0.9
    assert test.note.startswith(("100.0%", "99."))


def test_unrelated_gates_and_ups_get_uniform_p_values() -> None:
    chance = np.random.default_rng(1)
    found = []
    for rows_b in [60, 40] * 100:
        up = match_rows(gaussian(chance, 60, 16), gaussian(chance, rows_b, 16))
        gate = match_rows(gaussian(chance, 60, 16), gaussian(chance, rows_b, 16))
        found.append(matching_test([(0, up, gate)]).log10_p or 0.0)
    assert look_uniform(found)


def test_only_units_matched_by_both_are_compared() -> None:
    up = RowMatch(np.array([0, 1, 3, 4]), np.array([10, 11, 13, 14]), 1.0)
    gate = RowMatch(np.array([1, 2, 3, 4]), np.array([11, 12, 13, 15]), 1.0)
    test = matching_test([(0, up, gate)])
    assert test.note.startswith("66.7%")
    assert test.effect == pytest.approx(1)


def test_nothing_gated_says_nothing() -> None:
    assert matching_test([]).log10_p == 0


def test_given_the_matching_the_order_of_neurons_is_still_free() -> None:
    """The two are independent witnesses: shuffling the units of a copy leaves one as it is and makes the other uniform."""
    chance = np.random.default_rng(2)
    found, matched = [], set()
    up, gate = gaussian(chance, 40, 16), gaussian(chance, 40, 16)
    for _ in range(150):
        order = chance.permutation(40)
        matches = match_rows(up, up[order]), match_rows(gate, gate[order])
        found.append(neuron_test([(0, matches[0])]).log10_p or 0.0)
        matched.add(matching_test([(0, *matches)]).log10_p)
    assert len(matched) == 1
    assert look_uniform(found)
