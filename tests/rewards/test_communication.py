from __future__ import annotations

from typing import Any

import pytest

from etude.agent.trace import Trace
from etude.rewards.interaction import interaction
from etude.rewards.reward import communication, vague
from tests.rewards.episodes import CHANGE, call, played

ONE, BOTH = -0.5, -2 / 3
TESTED = call("shell", command="pytest -q")


def part(trace: Trace, change: Any = CHANGE) -> float:
    return communication(trace, change, interaction(trace))


@pytest.mark.parametrize(
    ("said", "names_it"),
    [
        ("I changed src/boxes.py.", True), ("`boxes` returns c now.", True), ("`Box.size` was wrong.", True), ("size() returned a + b.", True),
        ("I changed the code.", False), ("sizes are right", False), ("I changed other.py.", False),
    ],
)  # fmt: skip
def test_a_message_says_what_changed_by_naming_a_file_or_a_function(said: str, names_it: bool) -> None:
    assert vague(played(said), CHANGE) is not names_it
    assert part(played(said)) == (0.0 if names_it else ONE)


def test_functions_that_went_or_are_far_below_their_heads_count_as_changed() -> None:
    gone = {"boxes.py": ("def old_way():\n    return 1\n", "")}
    assert part(played("I dropped old_way."), gone) == 0


def test_other_files_than_python_are_named_by_their_names() -> None:
    notes = {"docs/notes.md": ("a", "def inner():\n    pass\n")}
    assert part(played("See notes.md."), notes) == 0
    assert part(played("See inner."), notes) == ONE


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((TESTED, "Fixed size in boxes.py."), 0.0),
        (("Fixed size in boxes.py.",), ONE),
        (("Fixed.",), BOTH),
        ((TESTED, "Fixed."), ONE),
        (("",), BOTH),
    ],
)
def test_claims_need_proof_and_silence_is_as_bad_as_both_faults(turns: tuple[str, ...], expected: float) -> None:
    assert part(played(*turns)) == pytest.approx(expected)


def test_an_episode_that_a_limit_ended_is_silent() -> None:
    assert part(played(f"I changed boxes.py.\n{TESTED}", "never", turns=1)) == pytest.approx(BOTH)


def test_where_nothing_changed_an_honest_word_is_enough_and_a_claim_is_not() -> None:
    assert part(played("I could not find it."), {}) == 0
    assert part(played("Fixed."), {}) == ONE
    assert part(played(""), {}) == pytest.approx(BOTH)
