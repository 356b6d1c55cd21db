from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import ortho_group

from etude.lineage.audit.descent_tests import attention_effect, hsic, unbiased_cka
from tests.lineage.audit.made import gaussian


def hsic_by_its_definition(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Song et al. 2012, equation 5, with both Gram matrices written out."""
    gram_a, gram_b = (matrix.T.astype(np.float64) @ matrix for matrix in (a, b))
    np.fill_diagonal(gram_a, 0)
    np.fill_diagonal(gram_b, 0)
    count, ones = len(gram_a), np.ones(len(gram_a))
    middle = (ones @ gram_a @ ones) * (ones @ gram_b @ ones) / ((count - 1) * (count - 2))
    return float(np.trace(gram_a @ gram_b) + middle - 2 / (count - 2) * (ones @ gram_a @ gram_b @ ones))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9), st.integers(4, 12))
def test_no_gram_matrix_is_needed(seed: int, rows_a: int, rows_b: int, width: int) -> None:
    chance = np.random.default_rng(seed)
    a, b = gaussian(chance, rows_a, width) + 1, gaussian(chance, rows_b, width)
    assert hsic(a, b) == pytest.approx(hsic_by_its_definition(a, b), rel=1e-4, abs=1e-2)


def test_heads_may_be_rotated_but_dimensions_may_not() -> None:
    chance = np.random.default_rng(0)
    a = gaussian(chance, 16, 200)
    turned = ortho_group.rvs(16, random_state=1).astype(np.float32) @ a
    assert unbiased_cka(a, turned) == pytest.approx(1, abs=1e-4)
    assert abs(unbiased_cka(a, a[:, chance.permutation(200)])) < 0.1


def test_strangers_average_to_nothing_even_with_more_rows_than_columns() -> None:
    chance = np.random.default_rng(1)
    found = [unbiased_cka(gaussian(chance, 300, 40), gaussian(chance, 200, 40)) for _ in range(50)]
    assert abs(np.mean(found)) < 0.02


def test_drift_is_seen_as_drift() -> None:
    chance = np.random.default_rng(2)
    a, noise = gaussian(chance, 64, 128), gaussian(chance, 64, 128)
    falling = [unbiased_cka(a, a + amount * noise) for amount in (0, 0.3, 1, 3)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == pytest.approx(1, abs=1e-5)


def test_nothing_to_compare_is_no_similarity() -> None:
    assert unbiased_cka(np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)) == 0
    assert unbiased_cka(np.zeros((4, 8), np.float32), np.ones((4, 8), np.float32)) == 0


def test_it_is_an_effect_and_has_no_p_value() -> None:
    test = attention_effect([(3, 0.5), (1, 0.7), (3, 0.9)])
    assert (test.log10_p, test.layers) == (None, (1, 3))
    assert test.effect == pytest.approx(0.7)
    assert attention_effect([]).effect == 0
