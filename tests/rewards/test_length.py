from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.rewards.reward import EFFORT, LengthSettings, cost, effort, length, penalty
from tests.rewards.episodes import TALK, call, played

X, K, Q = st.floats(0, 1e6), st.floats(1e-3, 1e3), st.floats(0, 4)


@pytest.mark.parametrize(("x", "published"), [(10, 6.9), (100, 24), (1000, 46)])
def test_it_gives_the_numbers_known_of_the_logarithm(x: float, published: float) -> None:
    assert cost(x, k=0.1, q=1) == pytest.approx(published, rel=0.01)


@given(st.floats(0.01, 1e3), st.floats(0.01, 10), Q)
def test_the_slope_by_finite_differences_is_what_the_formula_says(x: float, k: float, q: float) -> None:
    step = 1e-4 * (x + 1 / k)
    slope = (cost(x + step, k, q) - cost(x - step, k, q)) / (2 * step)
    assert slope == pytest.approx((1 + k * x) ** -q, rel=1e-4, abs=1e-9)


@given(st.floats(0, 1e4), st.floats(0.01, 10), st.floats(0, 4).filter(lambda q: abs(q - 1) > 1e-2))
def test_it_is_the_formula_as_it_is_printed(x: float, k: float, q: float) -> None:
    assert cost(x, k, q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-9, abs=1e-9)


@given(X, K, st.sampled_from([0.0, 1e-6, -1e-6, 1e-12, -1e-12, 2**-52]))
def test_near_one_it_is_the_logarithm(x: float, k: float, off: float) -> None:
    limit = math.log1p(k * x) / k
    assert cost(x, k, 1 + off) == pytest.approx(limit, rel=1e-4)
    if off == 0 or abs(off) <= 1e-12:
        assert cost(x, k, 1 + off) == pytest.approx(limit, rel=1e-9)


@given(X, X, K, Q, st.floats(0, 1))
def test_it_never_falls_and_is_concave(x: float, y: float, k: float, q: float, share: float) -> None:
    low, high = sorted((x, y))
    assert 0 <= cost(low, k, q) <= cost(high, k, q) * (1 + 1e-12)
    chord = share * cost(x, k, q) + (1 - share) * cost(y, k, q)
    assert cost(share * x + (1 - share) * y, k, q) >= chord * (1 - 1e-9) - 1e-12


@given(X, K, st.floats(1.01, 4))
def test_above_one_it_is_bounded(x: float, k: float, q: float) -> None:
    assert cost(x, k, q) <= 1 / (k * (q - 1)) * (1 + 1e-12)


def test_no_effort_costs_nothing_and_without_a_bend_it_is_effort_itself() -> None:
    assert cost(0.0, 0.3, 1.7) == 0
    assert cost(123.0, 0.3, 0.0) == pytest.approx(123.0)


def test_effort_is_what_the_harness_counts_each_kind_at_its_own_price() -> None:
    reading = call("read", path="a")
    trace = played(f"<think>hmm</think>\nI look.\n{reading}{call('read', path='b')}", "done")
    effort_of = {name: trace.counts.get(key, 0) for name, (key, _) in EFFORT.items()}
    answers = next(node for node in trace.nodes if node.kind == "answers")
    sampled = [node for node in trace.nodes if node.sampled]
    written = effort_of["thinking_tokens"] + effort_of["call_tokens"] + effort_of["said_tokens"]
    assert (effort_of["calls"], effort_of["turns"], effort_of["answer_tokens"]) == (2, 2, len(answers.tokens))
    assert written == sum(len(node.tokens) for node in sampled)
    assert effort_of["thinking_tokens"] >= len(TALK.encode("hmm"))
    assert effort_of["call_tokens"] >= len(TALK.encode(reading))
    assert effort_of["said_tokens"] >= len(TALK.encode("I look.")) + len(TALK.encode("done"))
    for name, amount in effort_of.items():
        prices = dict.fromkeys(effort_of, 0.0) | {name: 3.0}
        per = 1000 if name.endswith("tokens") else 1
        assert effort(trace.counts, LengthSettings.model_validate(prices)) == pytest.approx(3.0 * amount / per)


def test_an_ordinary_repair_is_an_effort_of_about_one() -> None:
    counts = {
        "turns": 15,
        "calls": 20,
        "tokens_thinking": 3000,
        "tokens_calls": 1800,
        "tokens_said": 200,
        "tokens_answers": 10_000,
    }
    assert effort(counts, LengthSettings()) == pytest.approx(1.1)
    assert length(counts, LengthSettings(), solved=True) == pytest.approx(-1.1 / 2.1)
    assert length(counts, LengthSettings(failed=0.5), solved=False) == pytest.approx(-0.55 / 2.1)


def test_calls_made_together_cost_less_than_one_by_one() -> None:
    one = call("read", path="a")
    together, apart = played(one + one, "done"), played(one, one, "done")
    assert together.counts["calls"] == apart.counts["calls"] == 2
    assert length(together.counts, LengthSettings(), solved=True) > length(apart.counts, LengthSettings(), solved=True)


@given(st.floats(0, 1e6))
def test_faults_are_never_worth_a_whole_part(faults: float) -> None:
    assert -1 < penalty(faults) <= 0
    assert penalty(faults) == pytest.approx(-faults / (1 + faults), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"k": 0.0}, "greater than 0"), ({"q": -1.0}, "greater than or equal to 0"), ({"failed": 1.5}, "less than or equal to 1"),
        ({"turns": float("nan")}, "finite"), ({"tokens": 1.0}, "Extra inputs"),
        (dict.fromkeys(EFFORT, 0.0), "all prices of effort are 0"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        LengthSettings.model_validate(wrong)
