from __future__ import annotations

import numpy as np
import pytest

from etude.bench.statistics import ratio_interval


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        sizes = rng.uniform(50, 150, size=40)
        parts = sizes * rng.normal(1.0, 0.3, size=40)
        interval = ratio_interval(parts.tolist(), sizes.tolist(), seed=trial)
        assert interval is not None
        covered += interval[0] <= 1.0 <= interval[1]
    assert 0.88 <= covered / 200 <= 0.99


def test_equal_observations_have_no_spread() -> None:
    assert ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], seed=0) == pytest.approx((2.0, 2.0))


def test_one_observation_says_nothing_of_spread() -> None:
    assert ratio_interval([2.0], [1.0], seed=0) is None
