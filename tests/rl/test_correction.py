"""Correction against plain loops, at every level and in every mode."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.algorithm import factors, outside, ratios
from etude.rl.settings import CorrectionSettings

tokens = st.tuples(st.floats(-3, 3, width=32), st.booleans(), st.booleans())  # change, learnt, begins a branch


def by_hand(found: list[tuple[float, bool, int]], level: str) -> list[float]:
    made = []
    for change, learnt, branch in found:
        inside = [other for other, counts, where in found if where == branch and counts]
        whole = {"token": change if learnt else 0.0, "sequence": sum(inside),
                 "geometric": sum(inside) / len(inside) if inside else 0.0}  # fmt: skip
        made.append(math.exp(whole[level]))
    return made


@pytest.mark.parametrize("mode", ["mask", "truncate", "off"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(st.lists(tokens, min_size=1, max_size=12))
def test_it_is_what_plain_loops_say(level: str, mode: str, found: list[tuple[float, bool, bool]]) -> None:
    branch = (torch.tensor([begins for *_, begins in found]).cumsum(0)).tolist()
    branch = [each - branch[0] for each in branch]
    changes, learnt = torch.tensor([each[0] for each in found]), torch.tensor([each[1] for each in found])
    settings = CorrectionSettings.model_validate({"level": level, "mode": mode, "low": 0.5, "high": 2.0})
    got = ratios(changes, learnt, torch.tensor(branch), level)
    wanted = by_hand([(change, counts, where) for (change, counts, _), where in zip(found, branch, strict=True)], level)
    assert got.tolist() == pytest.approx(wanted, rel=1e-4)
    for ratio, factor, beyond in zip(
        got.tolist(), factors(got, settings).tolist(), outside(got, settings).tolist(), strict=True
    ):
        expected = {"mask": ratio if 0.5 <= ratio <= 2 else 0.0, "truncate": min(ratio, 2.0), "off": 1.0}[mode]
        assert factor == pytest.approx(expected)
        assert beyond == {"mask": not 0.5 <= ratio <= 2, "truncate": ratio > 2, "off": False}[mode]


def test_a_product_too_large_to_be_a_number_is_no_trouble() -> None:
    changes, learnt, branch = (
        torch.full((200,), 3.0),
        torch.ones(200, dtype=torch.bool),
        torch.zeros(200, dtype=torch.long),
    )
    ratio = ratios(changes, learnt, branch, "sequence")
    assert ratio.isinf().all()
    assert factors(ratio, CorrectionSettings(level="sequence", mode="mask")).eq(0).all()
    assert factors(ratio, CorrectionSettings(level="sequence", mode="truncate", high=8.0)).eq(8).all()
