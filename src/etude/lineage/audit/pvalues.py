"""Tails that never underflow: every p-value is a base-10 logarithm, and none is smaller than its test can give.

A test over permutations of n things cannot be surer than 1/n!, however well they agree; an approximation that goes below
says something about itself. And two tests that both "underflow" cannot be compared, so nothing here does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
