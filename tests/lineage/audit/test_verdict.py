from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from etude.lineage.audit.descent_tests import ATTENTION, EMBEDDING, MATCHING, NEURONS, ROUTER, Test
from etude.lineage.audit.examine import IDENTITY, Verdict, judge


@dataclass(frozen=True)
class Said:
    sentence: str


def verdict(*measured: tuple[str, float | None], compared: int = 1, **more: Any) -> Verdict:
    return judge([Test(name, log10_p, 0.9, **more) for name, log10_p in measured], None, None, compared)


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        ([(NEURONS, -9.1), (MATCHING, -6.1)], "derived"),
        ([(EMBEDDING, -9.1), (MATCHING, -6.1)], "derived"),
        ([(NEURONS, -6.1), (EMBEDDING, -9.1)], "derived"),
        ([(ROUTER, -9.1), (EMBEDDING, -6.1)], "derived"),
        ([(NEURONS, -8.9), (EMBEDDING, -8.9), (MATCHING, -8.9)], "none"),
        ([(NEURONS, -9.1), (MATCHING, -5.9), (EMBEDDING, -5.9)], "related"),
        ([(MATCHING, -9000.0), (NEURONS, -8.9)], "related"),
        ([(MATCHING, -9000.0)], "related"),
        ([(NEURONS, -0.3), (EMBEDDING, -1.0), (MATCHING, -2.5)], "none"),
        ([(ATTENTION, None)], "none"),
        ([(NEURONS, -9.1), (ATTENTION, None)], "related"),
        ([], "none"),
    ],
)
def test_the_rule(measured: list[tuple[str, float | None]], word: str) -> None:
    assert verdict(*measured).word == word


def test_the_rule_is_corrected_for_models_and_layers() -> None:
    measured = [(NEURONS, -11.0), (MATCHING, -8.0)]
    assert verdict(*measured, compared=10, layers=(0, 1, 2, 3, 4)).word == "derived"
    assert verdict(*measured, compared=100, layers=(0,)).word == "none"
    assert verdict(*measured, compared=10, layers=tuple(range(10))).word == "none"
    assert verdict(*measured, compared=10, layers=(0, 1)).log10_p == pytest.approx(-11 + 1.30103)
    assert verdict((NEURONS, -0.1), compared=1000).log10_p == 0


def test_one_test_before_and_after_rotating_back_is_one_witness() -> None:
    tests = [Test(NEURONS, -50.0, 1.0), Test(NEURONS, -60.0, 1.0, rotated=True)]
    assert judge(tests, None, None, 1).word == "related"


def test_a_disguise_is_named() -> None:
    raw = [Test(NEURONS, -0.3, 0.0), Test(EMBEDDING, -0.2, 0.0), Test(MATCHING, -0.1, 0.0)]
    turned = [Test(NEURONS, -300.0, 1.0, rotated=True), Test(MATCHING, -300.0, 1.0, rotated=True)]
    found = judge(raw + turned, None, None, 1)
    assert found.word == "derived"
    assert "undoing a rotation" in found.sentence
    assert any("rotated back" in reason for reason in found.reasons)
    shuffled_too = judge([*raw, turned[1]], None, None, 1)
    assert shuffled_too.word == "related"
    assert "undoing a rotation" in shuffled_too.sentence
    assert "rotation" not in verdict((NEURONS, -300.0), (MATCHING, -300.0)).sentence


def test_identical_weights_are_the_same_and_some_are_not() -> None:
    rest = [Test(NEURONS, -300.0, 1.0), Test(MATCHING, -300.0, 1.0)]
    assert judge([Test(IDENTITY, None, 1.0), *rest], None, None, 1).word == "same"
    assert judge([Test(IDENTITY, None, 0.9), *rest], None, None, 1).word == "derived"
    assert judge([Test(IDENTITY, None, 0.9)], None, None, 1).word == "none"
    assert judge([Test(ATTENTION, None, 1.0)], None, None, 1).word == "none"


def test_tokenisers_and_shapes_support_and_never_decide() -> None:
    tokens: Any = Said("the vocabularies are identical")
    shapes: Any = Said("the shapes are exactly the same")
    found = judge([Test(NEURONS, -1.0, 0.0)], tokens, shapes, 1)
    assert found.word == "none"
    assert found.reasons == ("the vocabularies are identical", "the shapes are exactly the same")


def test_the_words_claim_no_more_than_the_tests() -> None:
    nothing, derived = verdict((NEURONS, -0.5)), verdict((NEURONS, -300.0), (EMBEDDING, -300.0))
    assert nothing.sentence == "no evidence of shared initialisation"
    assert any("outputs" in limit for limit in nothing.limits)
    assert any("not a proof of independence" in limit for limit in nothing.limits)
    assert "or both from a common ancestor" in derived.sentence
    assert any("which of the two came first" in limit for limit in derived.limits)
    assert any("same random seed" in limit for limit in derived.limits)
    assert derived.reasons == ("aligned neurons: p < 1e-300", "embedding basis: p < 1e-300")
