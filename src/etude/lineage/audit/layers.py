"""Which layer, and which residual dimension, of B goes with which of A when one model was pruned or grown.

Both are chosen by what the neuron tests do not look at: dimensions by the embedding, layers by the attention. The choice then
says nothing about the order of the feed-forward units, and the p-values of those tests stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from etude.lineage.audit.cka import hsic
from etude.lineage.audit.neurons import assign, unit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


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
