"""φ_U: do the neurons of two models stand in the same order? (Zhu, Ahmed, Kuditipudi, Liang: Independence tests, 2025.)

A feed-forward layer computes the same whatever the order of its units, and so does every step of its training; its units
start out exchangeable. If two models were initialised independently, the pairing π of their most similar units is therefore
uniform over all permutations, *whatever* data they saw, and Spearman's correlation of π with the identity has an exact
p-value. A model trained on from another keeps the order. Permuting the units on purpose blinds the test: see matching.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from etude.lineage.audit.pvalues import Test, fisher, spearman

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Pairing = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.floating]]

NEURONS = "aligned neurons"
ROUTER = "router experts"

ASSIGNED_ROWS = 4096  # an assignment of 4,096 unrelated rows takes 9 seconds; it grows with the third power
SAMPLED_ROWS = 2048
BLOCK = 256  # sampled rows compared at a time


@dataclass(frozen=True)
class RowMatch:
    """Which row of B each row of A resembles most: indices only, so that layers can be matched one after another."""

    rows: NDArray[np.intp]  # of A
    partners: NDArray[np.intp]  # of B
    cosine: float  # mean over the pairs
    sampled: bool = False  # too many rows to assign: some rows of A chose their best of all rows of B


def match_rows(a: NDArray[np.float32], b: NDArray[np.float32], *, seed: int = 0) -> RowMatch:
    """Pair rows of A [h, d] with rows of B [k, d] so that the summed cosine is largest; h and k may differ (pruned)."""
    chance = np.random.default_rng(seed)
    # Rows of zeros (padding) resemble nothing, and equal ones each other: in the order of their indices if not shuffled.
    rows_a, rows_b = np.flatnonzero(a.any(axis=1)), chance.permutation(np.flatnonzero(b.any(axis=1)))
    sampled = max(len(rows_a), len(rows_b)) > ASSIGNED_ROWS
    if sampled:
        rows_a = chance.choice(rows_a, min(SAMPLED_ROWS, len(rows_a)), replace=False)
    a, b = unit_rows(a[rows_a]), unit_rows(b[rows_b])
    chosen, partners, cosines = _best(a, b) if sampled else assign(a @ b.T)
    cosine = float(cosines.mean()) if len(cosines) else 0.0
    return RowMatch(rows_a[chosen], rows_b[partners], cosine, sampled)


def assign(similarity: NDArray[np.floating]) -> Pairing:
    """Return rows, columns and values of the one-to-one pairing with the largest sum."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(similarity, maximize=True)
    return rows, columns, similarity[rows, columns]


def _best(a: NDArray[np.float32], b: NDArray[np.float32]) -> Pairing:
    """Let every row choose for itself. Exchangeable rows choose exchangeable partners: the permutation null holds."""
    columns = np.concatenate([(a[start : start + BLOCK] @ b.T).argmax(axis=1) for start in range(0, len(a), BLOCK)])
    return np.arange(len(a)), columns, np.einsum("ij,ij->i", a, b[columns])


def unit_rows(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the matrix with rows of length 1; a row of zeros stays."""
    length = np.linalg.norm(matrix, axis=1, keepdims=True)
    return np.asarray(matrix / np.where(length > 0, length, 1), np.float32)


def neuron_test(matches: Sequence[tuple[int, RowMatch]], *, name: str = NEURONS) -> Test:
    """Test matched layers for the order of their units; a layer may come several times, once for each of its experts."""
    scored = [(layer, *spearman(match.rows, match.partners)) for layer, match in matches]
    cosine = math.fsum(match.cosine for _, match in matches) / max(1, len(matches))
    return combined(name, scored, f"mean cosine {cosine:.3f}", [match for _, match in matches])


def combined(name: str, scored: Iterable[tuple[int, float, float]], note: str, matches: Iterable[RowMatch]) -> Test:
    """Join (layer, ρ, log₁₀ p) to one test: layers are independent (Fisher), experts copied from one FFN are not (Bonferroni)."""
    by_layer: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for layer, rho, log10_p in scored:
        by_layer[layer].append((log10_p, rho))
    best = [(min(0.0, min(tried)[0] + math.log10(len(tried))), min(tried)[1]) for tried in by_layer.values()]
    effect = math.fsum(rho for _, rho in best) / max(1, len(best))
    sampled = max((len(match.rows) for match in matches if match.sampled), default=0)
    note += f"; best partners of {sampled:,} sampled rows a layer" if sampled else ""
    return Test(name, fisher([log10_p for log10_p, _ in best]), effect, tuple(sorted(by_layer)), note)
