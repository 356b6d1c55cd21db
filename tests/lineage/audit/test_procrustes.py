from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm, ortho_group

from etude.lineage.audit.descent_tests import (
    TESTED_DIMENSIONS,
    align_dimensions,
    embedding_test,
    log10_trace_tail,
    match_rows,
    matching_test,
    neuron_test,
    order_test,
    rotate_back,
    rotation,
)
from tests.lineage.audit.made import gaussian, look_uniform


def test_the_trace_is_measured_against_all_permutations() -> None:
    turn = ortho_group.rvs(7, random_state=3)
    sums = np.array([turn[np.arange(7), order].sum() for order in itertools.permutations(range(7))])
    z = (np.trace(turn) - sums.mean()) / sums.std()
    assert log10_trace_tail(turn) == pytest.approx(math.log10(norm.sf(z)), abs=1e-9)
    assert 10 ** log10_trace_tail(turn) == pytest.approx((sums > np.trace(turn)).mean(), abs=0.05)


def test_no_surer_than_one_permutation_of_all() -> None:
    assert log10_trace_tail(np.eye(64)) == pytest.approx(-math.lgamma(65) / math.log(10))
    assert log10_trace_tail(np.zeros((4, 4))) == 0


def test_a_copy_keeps_its_basis_and_strangers_do_not() -> None:
    chance = np.random.default_rng(0)
    a = gaussian(chance, 400, 64)
    copy = embedding_test(a, a + gaussian(chance, 400, 64))
    assert copy.log10_p is not None
    assert copy.log10_p < -80
    assert 0.8 < copy.effect < 1
    assert copy.note == "400 shared tokens"
    assert embedding_test(a, a).effect == pytest.approx(1)


@pytest.mark.parametrize("tokens", [300, 20])
def test_strangers_get_uniform_p_values(tokens: int) -> None:
    """With fewer tokens than dimensions too, and with embeddings that have a common direction."""
    chance = np.random.default_rng(tokens)
    found = []
    for _ in range(150):
        a, b = (gaussian(chance, tokens, 48) + 2 * gaussian(chance, 1, 48) for _ in "ab")
        found.append(embedding_test(a, b).log10_p or 0.0)
    assert look_uniform(found)


def test_few_tokens_span_few_dimensions() -> None:
    chance = np.random.default_rng(1)
    a = gaussian(chance, 10, 48)
    turn = rotation(a, a)
    assert np.linalg.matrix_rank(turn) == 10
    assert embedding_test(a, a).effect == pytest.approx(1)


def test_tokens_nobody_trained_say_nothing() -> None:
    assert embedding_test(np.zeros((5, 8), np.float32), np.zeros((5, 8), np.float32)).log10_p == 0


def test_wide_models_are_sampled_and_it_is_said() -> None:
    chance = np.random.default_rng(2)
    a = gaussian(chance, 24, TESTED_DIMENSIONS + 50)
    test = embedding_test(a, a)
    assert test.effect == pytest.approx(1)
    assert "1,024 sampled dimensions" in test.note


def test_a_rotated_copy_is_blind_until_it_is_rotated_back() -> None:
    chance = np.random.default_rng(3)
    secret = ortho_group.rvs(32, random_state=4).astype(np.float32)
    embedding, up, gate = gaussian(chance, 300, 32), gaussian(chance, 90, 32), gaussian(chance, 90, 32)
    order = chance.permutation(90)
    turned = {"raw": (up @ secret, gate @ secret), "shuffled": ((up @ secret)[order], (gate @ secret)[order])}
    assert (embedding_test(embedding, embedding @ secret).log10_p or 0) > -3
    turn = rotation(embedding, embedding @ secret + 0.1 * gaussian(chance, 300, 32))
    assert np.abs(turn - secret).max() < 0.1
    for name, (up_b, gate_b) in turned.items():
        assert (neuron_test([(0, match_rows(up, up_b))]).log10_p or 0) > -3
        ups, gates = match_rows(up, rotate_back(up_b, turn)), match_rows(gate, rotate_back(gate_b, turn))
        assert (matching_test([(0, ups, gates)]).log10_p or 0) < -100
        assert ((neuron_test([(0, ups)]).log10_p or 0) < -100) == (name == "raw")


def test_a_stranger_rotated_back_is_still_a_stranger() -> None:
    chance = np.random.default_rng(5)
    found = []
    for _ in range(100):
        turn = rotation(gaussian(chance, 100, 16), gaussian(chance, 100, 16))
        match = match_rows(gaussian(chance, 50, 16), rotate_back(gaussian(chance, 50, 16), turn))
        found.append(neuron_test([(0, match)]).log10_p or 0.0)
    assert look_uniform(found)


def test_a_narrower_copy_keeps_the_order_of_its_dimensions() -> None:
    chance = np.random.default_rng(6)
    a = gaussian(chance, 500, 60)
    kept = np.sort(chance.choice(60, 40, replace=False))
    test = order_test(align_dimensions(a, a[:, kept] + 0.5 * gaussian(chance, 500, 40)))
    assert test.log10_p == pytest.approx(-math.lgamma(41) / math.log(10))
    assert test.effect == pytest.approx(1)
    strangers = [align_dimensions(gaussian(chance, 80, 40), gaussian(chance, 80, 30)) for _ in range(150)]
    assert look_uniform([order_test(aligned).log10_p or 0.0 for aligned in strangers])
