"""How much of the attention is left? Unbiased linear CKA of query and key weights: a size, never a proof.

The residual dimensions are the samples (columns of the weights), what a dimension does to the heads is its description, and
the similarity of two such descriptions does not change when the rows are rotated. The unbiased estimator (Song et al. 2012) is
about 0 for unrelated matrices of any shape, where the plain one grows with the number of rows. (AWM, 2025.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from etude.lineage.audit.pvalues import Test

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ATTENTION = "query/key similarity"


def unbiased_cka(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the similarity of A [p, d] and B [q, d], columns aligned; 0 where one of them has nothing to compare."""
    own = hsic(a, a) * hsic(b, b)
    return hsic(a, b) / math.sqrt(own) if own > 0 else 0.0


def hsic(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return d(d−3) times HSIC₁ of the Gram matrices K = AᵀA and L = BᵀB without their diagonals, neither ever formed."""
    count = a.shape[1]
    if count < 4:
        return 0.0
    inner = np.square(a @ b.T, dtype=np.float64).sum()
    (diagonal_a, sums_a), (diagonal_b, sums_b) = _gram(a), _gram(b)
    both = sums_a.sum() * sums_b.sum() / ((count - 1) * (count - 2))
    return float(inner - diagonal_a @ diagonal_b + both - 2 * (sums_a @ sums_b) / (count - 2))


def _gram(matrix: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the diagonal of MᵀM and the sums of its rows without it."""
    diagonal = np.square(matrix, dtype=np.float64).sum(axis=0)
    return diagonal, matrix.T @ matrix.sum(axis=1, dtype=np.float64) - diagonal


def attention_effect(similarities: Sequence[tuple[int, float]]) -> Test:
    """Join (layer, unbiased CKA of a query or key pair) to their mean."""
    effect = math.fsum(value for _, value in similarities) / max(1, len(similarities))
    return Test(ATTENTION, None, effect, tuple(sorted({layer for layer, _ in similarities})), "a size, not a proof")
