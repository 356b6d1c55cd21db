from __future__ import annotations

from typing import Any

import pytest

from etude.agent.trace import Node, Trace
from etude.rewards.interaction import Interaction, Premise, interaction

EDIT = ("edit", {"path": "a.py", "old": "1", "new": "2"}, {"text": "done"})
REFUSED = ("edit", {"path": "a.py", "old": "1", "new": "2"}, {"text": "old is not in it", "failed": True})


def run(
    command: str, rc: int = 0, text: str = "3 passed", tool: str = "shell"
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return tool, {"command": command}, {"text": text, "details": {"rc": rc}}


def todo(left: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return "todo", {"items": "[ ] x"}, {"text": "", "details": {"open": left, "done": 1}}


TESTS = run("python -m pytest -q")


def trace(
    *steps: tuple[str, dict[str, Any], dict[str, Any]], said: str = "", stop: str = "finished", thinking: str = ""
) -> Trace:
    """A trace of one call a turn, then a last turn."""
    nodes = [Node(None, "opening", [1], "")]
    for name, arguments, answer in steps:
        calls = {
            "calls": [{"name": name, "arguments": arguments}],
            "said": "All tests pass.",
            "thinking": "",
            "malformed": [],
        }
        nodes.append(Node(len(nodes) - 1, "turn", [1], "", details=calls))
        answers = [{"name": name, "failed": False, "details": {}, **answer}]
        nodes.append(Node(len(nodes) - 1, "answers", [1], "", details={"answers": answers}))
    nodes.append(
        Node(
            len(nodes) - 1, "turn", [1], "", details={"calls": [], "said": said, "thinking": thinking, "malformed": []}
        )
    )
    return Trace("e", "t", nodes, stop=stop, counts={"malformed": 2})


@pytest.mark.parametrize(
    ("said", "claimed"),
    [
        ("All tests pass now.", True), ("I fixed the parser.", True), ("The bug is resolved and verified.", True), ("It works now.", True),
        ("The tests should pass now.", False), ("I could not run it. The tests do not pass.", False), ("I haven't verified it.", False),
        ("I changed `parse` in a.py.", False), ("Uses a fixed-size buffer.", False), ("", False),
        ("I did not run the linter. The tests pass.", True), ("If the tests pass, merge it.", False),
    ],
)  # fmt: skip
def test_a_claim_is_a_sentence_that_does_not_hedge(said: str, claimed: bool) -> None:
    found = interaction(trace(EDIT, said=said))
    assert (found.claimed, found.unverified, found.silent) == (claimed, claimed, not said)


@pytest.mark.parametrize(
    ("steps", "verified"),
    [
        ([EDIT, TESTS], True), ([TESTS, EDIT], False), ([EDIT, run("pytest", rc=1, text="1 failed")], False), ([EDIT, TESTS, EDIT], False),
        ([EDIT, run("pytest | tail -3", text="1 failed, 2 passed")], False), ([EDIT, run("pytest || true", text="2 errors in 1s")], False),
        ([EDIT, TESTS, REFUSED], True), ([EDIT, run("ls")], False), ([EDIT, TESTS, run("sed -i s/1/2/ a.py")], False),
        ([EDIT, TESTS, run("cat a.py")], True), ([EDIT, run("pytest > out.txt", text="no output")], True), ([TESTS], True), ([], False),
        ([EDIT, TESTS, run("echo 1 > a.py")], False), ([EDIT, run("make test", tool="bash")], True), ([EDIT, run("pytest", rc=5)], False),
    ],
)  # fmt: skip
def test_a_claim_is_verified_by_passing_tests_after_the_last_edit(steps: list[Any], verified: bool) -> None:
    assert interaction(trace(*steps, said="Fixed.")).unverified is not verified


def test_an_episode_that_a_limit_ended_has_no_final_message() -> None:
    found = interaction(trace(EDIT, said="All tests pass.", stop="turns"))
    assert found == Interaction(
        claimed=False,
        unverified=False,
        silent=True,
        open_todos=0,
        premise_noticed=None,
        malformed=2,
    )


def test_the_last_list_of_things_to_do_counts_and_calls_without_answers_do_not() -> None:
    assert interaction(trace(todo(3), todo(1))).open_todos == 1
    assert interaction(trace(todo(3), todo(0))).open_todos == 0
    cut = trace(todo(3), said="x")
    cut.nodes[1].details["calls"] *= 2
    assert interaction(cut).open_todos == 3


PREMISE = Premise(blamed=("src/lexer.py", "Lexer.next_token"), true=("src/parser.py", "Parser.expression"))


@pytest.mark.parametrize(
    ("said", "thinking", "noticed"),
    [
        ("The fault was in `Parser.expression`.", "", True),
        ("The lexer is fine; parser.py dropped the last operand.", "", True),
        ("I fixed next_token in lexer.py.", "", False),
        ("I fixed next_token in lexer.py.", "maybe parser.py?", False),
        ("Done.", "the bug is in expression(), not in the lexer", True),
        ("Done.", "", False),
        ("Expressions are parsed by parsers.", "", False),
    ],
)
def test_a_wrong_premise_is_noticed_by_naming_the_true_place(said: str, thinking: str, noticed: bool) -> None:
    assert interaction(trace(said=said, thinking=thinking), premise=PREMISE).premise_noticed is noticed


def test_a_file_that_is_both_blamed_and_true_tells_nothing() -> None:
    same = Premise(blamed=("a/core.py", "load"), true=("a/core.py", "dump"))
    assert interaction(trace(said="Changed core.py."), premise=same).premise_noticed is False
    assert interaction(trace(said="Changed dump in core.py."), premise=same).premise_noticed is True
