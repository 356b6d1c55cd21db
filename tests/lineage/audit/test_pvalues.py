from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import combine_pvalues, norm, rankdata, t

from etude.lineage.audit.descent_tests import LN10, fisher, log10_normal_tail, log10_t_tail, spearman, thin_tail


@pytest.mark.parametrize("values", [range(6), range(8), (0, 0, 1, 2, 3, 3, 3, 4)])
def test_spearman_is_that_of_all_orders_counted(values: tuple[int, ...]) -> None:
    still, orders = np.arange(len(values)), np.array(list(itertools.permutations(values)))
    scores = rankdata(orders, axis=1) @ still
    for score in np.unique(scores):
        exact = math.log10((scores >= score).mean())
        _, log10_p = spearman(still, orders[np.argmax(scores == score)])
        assert log10_p == pytest.approx(exact, abs=0.2)


@pytest.mark.parametrize("count", [3, 8, 100, 1536])
def test_the_best_order_is_as_likely_as_one_of_all(count: int) -> None:
    rho, log10_p = spearman(np.arange(count), np.arange(count))
    assert rho == pytest.approx(1)
    assert log10_p == pytest.approx(-math.lgamma(count + 1) / LN10, abs=0.2)


def test_equal_values_make_the_best_order_likelier() -> None:
    pairs = np.arange(100) // 2
    _, log10_p = spearman(np.arange(100), pairs)
    assert log10_p >= (50 * math.log(2) - math.lgamma(101)) / LN10


@pytest.mark.parametrize("values", [[], [1], [1, 2], [3, 3, 3, 3]])
def test_what_has_no_order_says_nothing(values: list[int]) -> None:
    assert spearman(np.arange(len(values)), np.array(values, int)) == (0.0, 0.0)


@given(st.permutations(range(30)))
def test_spearman_is_symmetric_and_a_probability(order: list[int]) -> None:
    forth, back = spearman(np.arange(30), np.array(order)), spearman(np.array(order), np.arange(30))
    assert forth == pytest.approx(back)
    assert forth[1] <= 0


def rate_by_scaling(pull: float, points: int = 200) -> tuple[float, float]:
    """Return ρ and the information of the most even pairing e^{f(x)+g(y)+pull·xy} of uniform ranks (Sinkhorn)."""
    x = ((np.arange(points) + 0.5) / points - 0.5) * math.sqrt(12)
    kernel = np.exp(pull * (np.outer(x, x) - 3))
    left = np.ones(points)
    for _ in range(2000):
        right = points / (kernel.T @ left)
        left = points / (kernel @ right)
    density = left[:, None] * kernel * right
    return float((density * np.outer(x, x)).mean() / (x * x).mean()), float((density * np.log(density)).mean())


@pytest.mark.parametrize("pull", [0.2, 0.5, 1, 2, 4, 8, 20])
def test_the_tail_of_spearman_falls_as_fast_as_pairings_carry_information(pull: float) -> None:
    rho, information = rate_by_scaling(pull)
    assert -0.5 * math.log(1 - rho * rho) - information == pytest.approx(thin_tail(rho), abs=0.001)


def test_the_correction_ends_where_the_pairing_is_sharp() -> None:
    assert thin_tail(1.0) == pytest.approx(0.5 * math.log(math.pi * math.e / 6), abs=0.004)
    assert thin_tail(-0.9) == 0


@pytest.mark.parametrize(("rho", "count"), [(0.3, 20), (-0.5, 50), (0.2, 1000), (0.9, 100)])
def test_moderate_t_tails_are_scipys(rho: float, count: int) -> None:
    statistic = rho * math.sqrt((count - 2) / (1 - rho * rho))
    assert log10_t_tail(rho, count) == pytest.approx(math.log10(t.sf(statistic, count - 2)), rel=1e-9)


@pytest.mark.parametrize(("rho", "count"), [(0.9, 1000), (0.5, 4000), (0.999, 300), (0.3, 20_000)])
def test_far_t_tails_are_the_integral_of_the_density(rho: float, count: int) -> None:
    power = (count - 4) / 2
    # Scaled by the density at rho, the integrand starts at 1 and dies within about 1/(power·rho).
    end = min(1.0, rho + 60 / (power * rho))
    area, _ = quad(lambda r: math.exp(power * (math.log1p(-r * r) - math.log1p(-rho * rho))), rho, end, limit=500)
    whole = math.lgamma(0.5) + math.lgamma(power + 1) - math.lgamma(power + 1.5)
    exact = (power * math.log1p(-rho * rho) + math.log(area) - whole) / LN10
    assert exact < -200
    assert exact <= log10_t_tail(rho, count) + 1e-6
    assert log10_t_tail(rho, count) == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("z", [-3.0, 0.0, 1.0, 6.0])
def test_moderate_normal_tails_are_scipys(z: float) -> None:
    assert log10_normal_tail(z) == pytest.approx(math.log10(norm.sf(z)))


@pytest.mark.parametrize("z", [10.0, 100.0, 5000.0])
def test_far_normal_tails_lie_between_the_bounds_of_mills(z: float) -> None:
    upper = -z * z / 2 - math.log(z * math.sqrt(2 * math.pi))
    assert upper + math.log1p(-1 / z**2) - 1e-6 <= log10_normal_tail(z) * LN10 <= upper + 1e-6


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_fisher_is_scipys_where_that_does_not_underflow(ps: list[float]) -> None:
    exact = math.log10(combine_pvalues(ps, "fisher").pvalue)
    assert fisher([math.log10(p) for p in ps]) == pytest.approx(exact, abs=1e-6)


def test_fisher_far_out() -> None:
    assert fisher([-4238.0]) == pytest.approx(-4238)
    # e^−s (1 + s) of two
    assert fisher([-3000.0, -2000.0]) == pytest.approx(-5000 + math.log10(1 + 5000 * LN10))
    assert fisher([]) == 0
