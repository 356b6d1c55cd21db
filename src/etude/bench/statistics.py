"""How sure a mean is: a seeded bootstrap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES = 2000


def ratio_interval(parts: Sequence[float], wholes: Sequence[float], seed: int) -> tuple[float, float] | None:
    """Return the 95% bootstrap interval of sum(parts) / sum(wholes), drawing pairs; None for fewer than two pairs."""
    if len(parts) < 2:
        return None
    numerators, denominators = np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(parts), size=(RESAMPLES, len(parts)))
    ratios = numerators[draws].sum(axis=1) / denominators[draws].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
