"""Do the residual dimensions of two models mean the same? The rotation that best maps one embedding to the other tells.

With Q = UVᵀ of the singular value decomposition of E_AᵀE_B over shared tokens, E_A·Q comes nearest to E_B (MDIR, 2025).
Training is equivariant to permuting the residual dimensions (AdamW and Muon, RMSNorm and LayerNorm; not with sinusoidal
positions added to the words), so of independently initialised models Q with its columns permuted is as likely as Q:
Σ Q[i, π(i)] has a known mean and variance over π and a normal limit (Hoeffding), and the trace is its value for the identity.
A descendant's trace is near the number of dimensions. A deliberately rotated copy has a trace near 0, but Q undoes the rotation,
and the other tests then find it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from etude.lineage.audit.pvalues import LN10, Test, log10_normal_tail, spearman

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from etude.lineage.audit.layers import Alignment

EMBEDDING = "embedding basis"

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
