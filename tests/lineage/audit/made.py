"""Matrices for the audit's tests, and the question whether p-values are what they say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kstest


def gaussian(chance: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return chance.standard_normal(shape).astype(np.float32)


def look_uniform(log10_ps: list[float]) -> bool:
    """Whether p-values could be draws from the unit interval; the seeds are fixed, so this never changes by chance."""
    return bool(kstest(10.0 ** np.array(log10_ps), "uniform").pvalue > 0.01)
