"""The tests of the audit: each takes matrices or matched rows of two models A and B and gives a `Test`.

Aligned neurons, φ_U (Zhu, Ahmed, Kuditipudi, Liang: Independence tests, 2025): do the neurons of two models stand in the same order?
A feed-forward layer computes the same whatever the order of its units, and so does every step of its training; its units
start out exchangeable. If two models were initialised independently, the pairing π of their most similar units is therefore
uniform over all permutations, *whatever* data they saw, and Spearman's correlation of π with the identity has an exact
p-value. A model trained on from another keeps the order. Permuting the units on purpose blinds the test.

Gate/up matching finds a copy whose units were shuffled. Unit i of a gated feed-forward layer owns row i of the gate and row i of the
up-projection. Pair the gate rows of two models, and the up rows apart from them: of unrelated models the two pairings have nothing to
do with each other; of a copy they agree, in whatever order its units stand. The null is not exact, since features both models learnt
could tie the pairings together: it is calibrated by measurement (benchmarks/audit.py). Given this test's result φ_U is still uniform
under its own null (shuffling the units changes the one and not the other), which is what makes the two independent witnesses.

Embedding basis: do the residual dimensions of two models mean the same? With Q = UVᵀ of the singular value decomposition of E_AᵀE_B
over shared tokens, E_A·Q comes nearest to E_B (MDIR, 2025). Training is equivariant to permuting the residual dimensions (AdamW and
Muon, RMSNorm and LayerNorm; not with sinusoidal positions added to the words), so of independently initialised models Q with its
columns permuted is as likely as Q: Σ Q[i, π(i)] has a known mean and variance over π and a normal limit (Hoeffding), and the trace is
its value for the identity. A descendant's trace is near the number of dimensions. A deliberately rotated copy has a trace near 0, but
Q undoes the rotation, and the other tests then find it.

Query/key similarity: unbiased linear CKA of query and key weights, a size, never a proof. The residual dimensions are the samples
(columns of the weights), what a dimension does to the heads is its description, and the similarity of two such descriptions does not
change when the rows are rotated. The unbiased estimator (Song et al. 2012) is about 0 for unrelated matrices of any shape, where the
plain one grows with the number of rows (AWM, 2025).

Pruned or grown models: which layer, and which residual dimension, of B goes with which of A is chosen by what the neuron tests do not
look at, dimensions by the embedding, layers by the attention. The choice then says nothing about the order of the feed-forward units,
and the p-values of those tests stay exact.

P-values never underflow: every one is a base-10 logarithm, and none is smaller than its test can give. A test over permutations of n
things cannot be surer than 1/n!, however well they agree; an approximation that goes below says something about itself. And two tests
that both "underflow" cannot be compared, so nothing here does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Pairing = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.floating]]

LN10 = math.log(10)


@dataclass(frozen=True)
class Test:
    """One line of an audit: how surely two models share an initialisation by one measure, and how much they share."""

    __test__ = False  # pytest would take the name for a test class

    name: str
    log10_p: float | None  # None: an effect size, which proves nothing
    effect: float  # 1: nothing has changed; about 0: unrelated
    layers: tuple[int, ...] = ()
    note: str = ""
    rotated: bool = False  # measured after the second model was rotated back by its embedding


def log10_normal_tail(z: float) -> float:
    """Return log₁₀ P(Z > z) of a standard normal Z."""
    from scipy.special import log_ndtr

    return float(log_ndtr(-z)) / LN10


def log10_t_tail(rho: float, count: int) -> float:
    """Return log₁₀ P(R > rho) where R√((n−2)/(1−R²)) is Student's t with n−2 degrees of freedom."""
    from scipy.special import betaln, stdtr

    half, left = (count - 2) / 2, max(1 - rho * rho, 1e-300)
    plain = float(stdtr(count - 2, -rho * math.sqrt((count - 2) / left)))
    if plain > 1e-200:
        return math.log10(plain)
    # ½I_x(a,½) = ½ x^a √(1−x) / (a B(a,½)) · ₂F₁(a+½, 1; a+1; x), and ₂F₁ ≤ 1/(1−x): tight this far out, never too small.
    return (half * math.log(left) - math.log(2 * half * rho) - float(betaln(half, 0.5))) / LN10


def thin_tail(rho: float) -> float:
    """Return by how much, for each thing ranked, the tail of Student's t falls faster than that of Spearman's ρ.

    P(ρ > r) falls as e^(−n·I(r)), where I(r) is the information in the most even pairing of uniform ranks that has this ρ;
    t's tail falls as e^(n·½ln(1−r²)). This is −½ln(1−r²) − I(r), a polynomial fitted to within 0.0006.
    """
    bend = 1 - math.sqrt(1 - rho * rho) if rho > 0 else 0.0
    return bend * bend * (0.273 - 0.1 * bend)


def spearman(x: NDArray[np.intp], y: NDArray[np.intp]) -> tuple[float, float]:
    """Return the rank correlation of two lists, and its one-sided log₁₀ p if every order of one is equally likely."""
    from scipy.stats import rankdata

    count = len(x)
    ranks_x, ranks_y = rankdata(x) - (count + 1) / 2, rankdata(y) - (count + 1) / 2
    spread = math.sqrt((ranks_x @ ranks_x) * (ranks_y @ ranks_y))
    if count < 3 or spread == 0:
        return 0.0, 0.0
    rho = min(1.0, max(-1.0, float(ranks_x @ ranks_y) / spread))
    met = max(-1.0, rho - 6 / (count**3 - count))  # "at least ρ" of a statistic that moves in steps: half a step less
    tail = log10_t_tail(met, count) + count * thin_tail(met) / LN10
    # The best order of all is one of n!; equal values can trade places, which makes it likelier.
    ties = (sum(math.lgamma(times + 1) for times in np.unique(values, return_counts=True)[1]) for values in (x, y))
    return rho, min(0.0, max(tail, (max(ties) - math.lgamma(count + 1)) / LN10))


def fisher(log10_ps: Sequence[float]) -> float:
    """Combine k independent p-values: P(χ²₂ₖ > 2s) = e^−s Σ_{i<k} sⁱ/i! with s = −Σ ln p, exact in logarithms."""
    from scipy.special import logsumexp

    total = -LN10 * math.fsum(log10_ps)
    if total <= 0:
        return 0.0
    terms = [i * math.log(total) - math.lgamma(i + 1) for i in range(len(log10_ps))]
    return min(0.0, (float(logsumexp(terms)) - total) / LN10)


NEURONS, ROUTER, MATCHING = "aligned neurons", "router experts", "gate/up matching"
EMBEDDING, ATTENTION = "embedding basis", "query/key similarity"
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


def match_rows(a: NDArray[np.float32], b: NDArray[np.float32], *, signed: bool = True, seed: int = 0) -> RowMatch:
    """Pair rows of A [h, d] with rows of B [k, d] so that the summed cosine is largest; h and k may differ (pruned).

    Not `signed`: so that the summed size of the cosines is. An up row and its column of down can both be negated, and the model
    computes the same. Twice the partners to choose from find less, so this is tried beside the signed pairing, not in its place.
    """
    size = np.asarray if signed else np.abs
    chance = np.random.default_rng(seed)
    # Rows of zeros (padding) resemble nothing, and equal ones each other: in the order of their indices if not shuffled.
    rows_a, rows_b = np.flatnonzero(a.any(axis=1)), chance.permutation(np.flatnonzero(b.any(axis=1)))
    sampled = max(len(rows_a), len(rows_b)) > ASSIGNED_ROWS
    if sampled:
        rows_a = chance.choice(rows_a, min(SAMPLED_ROWS, len(rows_a)), replace=False)
    a, b = unit_rows(a[rows_a]), unit_rows(b[rows_b])
    chosen, partners, cosines = _best(a, b, size) if sampled else assign(size(a @ b.T))
    cosine = float(cosines.mean()) if len(cosines) else 0.0
    return RowMatch(rows_a[chosen], rows_b[partners], cosine, sampled)


def assign(similarity: NDArray[np.floating]) -> Pairing:
    """Return rows, columns and values of the one-to-one pairing with the largest sum."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(similarity, maximize=True)
    return rows, columns, similarity[rows, columns]


def _best(a: NDArray[np.float32], b: NDArray[np.float32], size: Callable[[Any], Any]) -> Pairing:
    """Let every row choose for itself. Exchangeable rows choose exchangeable partners: the permutation null holds."""
    blocks = (size(a[start : start + BLOCK] @ b.T) for start in range(0, len(a), BLOCK))
    columns = np.concatenate([block.argmax(axis=1) for block in blocks])
    return np.arange(len(a)), columns, size(np.einsum("ij,ij->i", a, b[columns]))


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


def matching_test(matches: Sequence[tuple[int, RowMatch, RowMatch]]) -> Test:
    """Test (layer, match of the up rows, match of the gate rows), both matches made with the same seed."""
    scored, alike, units = [], 0, 0
    for layer, up, gate in matches:
        _, in_up, in_gate = np.intersect1d(up.rows, gate.rows, return_indices=True)  # a wider A leaves some rows alone
        by_up, by_gate = up.partners[in_up], gate.partners[in_gate]
        scored.append((layer, *spearman(by_up, by_gate)))
        alike, units = alike + int((by_up == by_gate).sum()), units + len(by_up)
    note = f"{alike / max(1, units):.1%} of units paired alike"
    return combined(MATCHING, scored, note, [up for _, up, _ in matches])


TESTED_DIMENSIONS = 1024  # decomposing 1,024 dimensions takes a second, 8,192 many minutes; p can still reach 1e-2639


def rotation(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return Q [d, e] for embeddings of the same tokens, A [n, d] and B [n, e]; Q has no full rank if n is too small."""
    from scipy.linalg import svd

    product = a.T.astype(np.float64) @ b.astype(np.float64)
    left, values, right = svd(product, full_matrices=False)
    # What no token spans the library would fill in, and not at random.
    known = values > values[0] * max(product.shape) * np.finfo(np.float64).eps
    return np.asarray(left[:, known] @ right[known])


def rotate_back(rows_b: NDArray[np.float32], turn: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return rows of B [n, e] in the residual basis of A [n, d]."""
    return np.asarray(rows_b @ turn.T.astype(np.float32))


def embedding_test(a: NDArray[np.float32], b: NDArray[np.float32], *, seed: int = 0) -> Test:
    """Test the embeddings of shared tokens, A [n, d] and B [n, d], for a common basis."""
    note, width = f"{len(a):,} shared tokens", a.shape[1]
    if width > TESTED_DIMENSIONS:
        chosen = np.random.default_rng(seed).choice(width, TESTED_DIMENSIONS, replace=False)
        a, b, note = a[:, chosen], b[:, chosen], f"{note}, {TESTED_DIMENSIONS:,} sampled dimensions"
    turn = rotation(a, b)
    rank = float((turn**2).sum())
    return Test(EMBEDDING, log10_trace_tail(turn), float(np.trace(turn)) / max(rank, 1.0), note=note)


def log10_trace_tail(turn: NDArray[np.float64]) -> float:
    """Return log₁₀ P(Σ Q[i, π(i)] > tr Q) over permutations π, by its normal limit, and not below 1/d!."""
    width = len(turn)
    centred = turn - turn.mean(axis=0) - turn.mean(axis=1, keepdims=True) + turn.mean()
    deviation = math.sqrt(float((centred**2).sum()) / max(1, width - 1))
    if deviation == 0:
        return 0.0
    return max(log10_normal_tail(float(np.trace(centred)) / deviation), -math.lgamma(width + 1) / LN10)


def order_test(aligned: Alignment) -> Test:
    """Test dimensions matched between models of different width: whoever prunes dimensions keeps the order of the rest."""
    rho, log10_p = spearman(aligned.a, aligned.b)
    return Test(EMBEDDING, log10_p, rho, note=f"order of {len(aligned.a):,} matched dimensions: the widths differ")


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


@dataclass(frozen=True)
class Alignment:
    """Matched residual dimensions: column a[i] of A goes with sign[i] times column b[i] of B."""

    a: NDArray[np.intp]
    b: NDArray[np.intp]
    sign: NDArray[np.float32]


def align_dimensions(a: NDArray[np.float32], b: NDArray[np.float32], *, seed: int = 0) -> Alignment:
    """Pair the columns of two embeddings of the same tokens, A [n, d] and B [n, e], by cosine (AWM's assignment)."""
    columns = np.random.default_rng(seed).permutation(b.shape[1])  # ties must not fall into the order of the indices
    cosines = unit_rows(a.T) @ unit_rows(b.T[columns]).T
    rows, chosen, _ = assign(np.abs(cosines))
    return Alignment(rows, columns[chosen], np.where(cosines[rows, chosen] < 0, -1, 1).astype(np.float32))


def layer_similarity(a: Sequence[NDArray[np.float32]], b: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the unbiased CKA of every layer of A with every layer of B, [len(a), len(b)], columns aligned.

    One matrix a layer (its keys, or some hundred rows of them) is enough to tell layers apart.
    """
    own_a, own_b = (np.sqrt([max(hsic(layer, layer), 1e-30) for layer in model]) for model in (a, b))
    cross = np.array([[hsic(one, other) for other in b] for one in a])
    return np.asarray(cross / own_a[:, None] / own_b)


def pair_layers(similarity: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the pairs (layer of A, layer of B) of the one-to-one choice with the largest sum, the most similar first."""
    rows, columns, values = assign(similarity)
    return [(int(rows[i]), int(columns[i])) for i in np.argsort(-values, kind="stable")]
