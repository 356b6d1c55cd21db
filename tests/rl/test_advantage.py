"""Advantages against a group worked by hand, and what must hold of any group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.algorithm import advantages

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_a_group_by_hand() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.6]) == pytest.approx([0.6, -0.4, -0.4, 0.2])


@given(rewards, st.floats(-5, 5), st.floats(0.1, 10))
def test_only_differences_count_and_they_count_as_they_are(found: list[float], shift: float, scale: float) -> None:
    plain = advantages(found)
    assert sum(plain) == pytest.approx(0, abs=1e-9)
    # Divided by the standard deviation, it would not grow with the rewards.
    changed = advantages([reward * scale + shift for reward in found])
    assert changed == pytest.approx([each * scale for each in plain], abs=1e-9)
