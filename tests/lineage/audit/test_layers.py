from __future__ import annotations

import itertools

import numpy as np
import pytest

from etude.lineage.audit.descent_tests import (
    align_dimensions,
    layer_similarity,
    match_rows,
    neuron_test,
    pair_layers,
    unbiased_cka,
)
from tests.lineage.audit.made import gaussian


def test_dimensions_of_a_narrower_copy_are_found_with_their_signs() -> None:
    chance = np.random.default_rng(0)
    embedding, up = gaussian(chance, 400, 50) + 3, gaussian(chance, 80, 50)
    kept, signs = chance.permutation(50)[:30], chance.choice([-1, 1], 30).astype(np.float32)
    aligned = align_dimensions(embedding, embedding[:, kept] * signs + gaussian(chance, 400, 30))
    assert (kept[aligned.b] == aligned.a).all()
    assert (signs[aligned.b] == aligned.sign).all()
    up_a, up_b = up[:, aligned.a], (up[:, kept] * signs)[:, aligned.b] * aligned.sign
    assert np.allclose(up_a, up_b)
    assert (neuron_test([(0, match_rows(up_a, up_b))]).log10_p or 0) < -100


def test_dimensions_without_content_are_not_paired_by_their_place() -> None:
    flat = np.ones((10, 40), np.float32)
    aligned = align_dimensions(flat, flat)
    assert abs(np.corrcoef(aligned.a, aligned.b)[0, 1]) < 0.5


def test_similarity_of_layers_is_that_of_each_pair() -> None:
    chance = np.random.default_rng(1)
    a, b = ([gaussian(chance, 8, 20) for _ in range(count)] for count in (3, 2))
    for i, j in itertools.product(range(3), range(2)):
        assert layer_similarity(a, b)[i, j] == pytest.approx(unbiased_cka(a[i], b[j]), rel=1e-5)


@pytest.mark.parametrize("kept", [[0, 1, 4, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7], [6, 2, 0]])
def test_layers_that_were_kept_are_found(kept: list[int]) -> None:
    chance = np.random.default_rng(2)
    keys = [gaussian(chance, 8, 100) for _ in range(8)]
    pruned = [keys[layer] + 0.7 * gaussian(chance, 8, 100) for layer in kept]
    assert sorted(pair_layers(layer_similarity(keys, pruned))) == sorted((layer, i) for i, layer in enumerate(kept))
    assert sorted(pair_layers(layer_similarity(pruned, keys))) == sorted((i, layer) for i, layer in enumerate(kept))


def test_the_most_similar_pair_comes_first() -> None:
    similarity = np.array([[0.1, 0.9, 0.0], [0.3, 0.2, 0.1]])
    assert pair_layers(similarity) == [(0, 1), (1, 0)]


def test_a_layer_without_weights_is_like_no_other() -> None:
    empty, full = np.zeros((4, 10), np.float32), gaussian(np.random.default_rng(3), 4, 10)
    assert layer_similarity([empty, full], [full]).round(5).tolist() == [[0], [1]]
