from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.errors import UserError
from etude.rewards.interaction import interaction
from etude.rewards.reward import (
    PARTS,
    LengthSettings,
    RewardSettings,
    behaviour,
    outcome,
    parts,
    reweighted,
    total,
    weights,
)
from tests.rewards.episodes import CHANGE, CLEAN, call, facts, played

DEFAULT = RewardSettings()
BROKEN = "@read\npath<<END\nnever closed"


def worth(**given: Any) -> float:
    return total(parts(facts(**given), DEFAULT), weights(DEFAULT))


def test_every_part_is_named_and_weighed_and_they_add_up() -> None:
    found = parts(facts(), DEFAULT)
    assert tuple(found) == PARTS == tuple(weights(DEFAULT))
    assert found["outcome"] == 1
    assert found["style"] == found["communication"] == found["conduct"] == 0
    assert -0.06 < found["length"] < 0
    own = {"outcome": 2.0, "length": 3.0, "style": 5.0, "communication": 7.0, "conduct": 11.0}
    assert total(dict.fromkeys(PARTS, -1.0), own) == -28
    assert total({"outcome": 1.0, "length": -0.5}, own) == 0.5


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"outcome": "fail", "fail_to_pass": 0.0}, "outcome"),
        ({"trace": played(*[call("read", path="a")] * 3, "I changed boxes.py.")}, "length"),
        ({"quality": replace(CLEAN, lint=3)}, "style"),
        ({"trace": played(call("read", path="a"), "I changed it all.")}, "communication"),
        ({"trace": played(BROKEN, "I changed boxes.py.")}, "conduct"),
    ],
)
def test_each_part_falls_by_what_it_is_for(given: dict[str, Any], part: str) -> None:
    good, bad = parts(facts(), DEFAULT), parts(facts(**given), DEFAULT)
    assert bad[part] < good[part]
    assert {name for name in PARTS if bad[name] != good[name]} <= {part, "length"}


QUALITY = st.builds(
    lambda lint, scratch, density: replace(CLEAN, lines=40, lint=lint, scratch_files=scratch, comment_density=density),
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 1),
)
COUNTS = st.fixed_dictionaries({
    name: st.integers(0, 10**7)
    for name in ("tokens_thinking", "tokens_calls", "tokens_answers", "tokens_said", "calls", "turns", "malformed", "failed_calls", "calls_shell")
})  # fmt: skip


@settings(deadline=None)
@given(COUNTS, QUALITY, st.sampled_from(["Fixed.", ""]), st.floats(0, 0.999))
def test_a_solved_task_is_worth_more_than_an_unsolved_one_whatever_the_manners(
    counts: dict[str, int], quality: Any, said: str, share: float
) -> None:
    trace = replace(played(said), counts=counts)
    rude = worth(trace=trace, quality=quality, interaction=interaction(trace))
    polite = worth(outcome="fail", fail_to_pass=share)
    assert rude > 0.7 > polite


def test_shares_of_tests_count_only_where_a_recipe_says_so_and_never_if_forged() -> None:
    assert outcome(1.0, 1.0, solved=True, partial=0.2) == 1
    assert outcome(0.5, 0.9, solved=False, partial=0.0) == 0
    assert outcome(0.5, 0.9, solved=False, partial=0.2) == pytest.approx(0.2 * 0.45)
    assert outcome(0.0, 1.0, solved=False, partial=0.2) == 0  # nothing done
    assert outcome(1.0, 1.0, solved=False, partial=0.2) == 0  # all pass, and yet it failed: forged
    shared = parts(facts(outcome="fail", fail_to_pass=0.5), RewardSettings(partial=0.5))
    assert shared["outcome"] == 0.25


def test_malformed_and_idle_episodes_are_scored_by_all_parts() -> None:
    broken = parts(facts(played(BROKEN, BROKEN, BROKEN), {}, outcome="fail", fail_to_pass=0.0), DEFAULT)
    assert broken["outcome"] == 0
    assert broken["length"] < 0
    assert (broken["style"], broken["communication"], broken["conduct"]) == pytest.approx((-0.5, -2 / 3, -0.75))
    honest = parts(facts(played("I could not do it."), {}, outcome="fail", fail_to_pass=0.0), DEFAULT)
    assert total(honest, weights(DEFAULT)) > total(broken, weights(DEFAULT))


def test_unsolved_episodes_pay_for_their_length_unless_a_recipe_says_otherwise() -> None:
    lost = facts(outcome="fail", fail_to_pass=0.0)
    assert parts(lost, DEFAULT)["length"] == parts(facts(), DEFAULT)["length"]
    assert parts(lost, RewardSettings(effort=LengthSettings(failed=0.0)))["length"] == 0


def test_behaviour_tells_what_was_done() -> None:
    turns = (
        f"<think>hm</think>\n{call('read', path='a')}{call('shell', command='ls')}",
        BROKEN,
        call("refuse_it"),
        call("todo", open="2"),
        "Fixed.",
    )
    found = behaviour(facts(played(*turns), quality=replace(CLEAN, lint=4, comment_density=0.25, lines=12)))
    assert found["thinking_tokens"] >= 2
    assert {name: found[name] for name in found if not name.endswith("_tokens")} == {
        "calls": 4, "turns": 5, "calls_per_turn": 0.8, "malformed": 1, "failed_calls": 1, "open_todos": 2, "unverified": 1, "silent": 0, "vague": 1,
        "final_chars": len("Fixed."), "summaries": 0, "shell_share": 0.25, "distinct_tools": 3, "files_changed": 1, "lines_changed": 12,
        "comment_density": 0.25, "lint": 4, "scratch_files": 0,
    }  # fmt: skip
    assert all(type(value) is float for value in found.values())
    json.dumps(found, allow_nan=False)


def test_what_has_no_meaning_is_left_out_instead_of_counted_as_none() -> None:
    idle = behaviour(facts(played("done"), {}))
    assert not {"comment_density", "lint", "scratch_files", "shell_share"} & idle.keys()
    assert idle["lines_changed"] == idle["files_changed"] == 0
    assert "calls_per_turn" not in behaviour(facts(replace(played("done"), counts={})))
    assert behaviour(facts(played("done"), CHANGE)).keys() >= {"comment_density", "lint"}


def test_weights_that_make_everything_zero_are_refused() -> None:
    with pytest.raises(ValidationError, match="all weights of the reward are 0"):
        RewardSettings.model_validate(dict.fromkeys(PARTS, 0.0))
    assert RewardSettings(outcome=0.0).length > 0


@pytest.mark.parametrize(
    ("wished", "told"),
    [
        ({"stlye": 1.0}, "did you mean 'style'"), ({"partial": 1.0}, "no part 'partial'"), ({"style": -1.0}, "greater than or equal to 0"),
        (dict.fromkeys(PARTS, 0.0), "all weights of the reward are 0"), ({"style": float("nan")}, "finite"),
    ],
)  # fmt: skip
def test_a_wish_that_cannot_be_is_told_in_one_line(wished: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        reweighted(weights(DEFAULT), wished)
    assert "\n" not in str(raised.value)


def test_a_wish_changes_what_it_names_and_nothing_else() -> None:
    now = weights(RewardSettings(length=0.3))
    assert reweighted(now, {"style": 0.5}) == now | {"style": 0.5}
