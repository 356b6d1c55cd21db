"""Prompts sound like people, say what was seen and never how to mend it."""

from __future__ import annotations

import random
import string
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tasks import prompts
from etude.tasks.generators.parsed import solution_spans
from etude.tasks.prompts import Failure, phrases
from etude.tasks.task import Candidate, Edit, Split, StoredStyle

FIXED = '''\
def other(a):
    return a


def clamp(value, low, high):
    """Keep a value between bounds."""
    if value < low or _outside(value, high):
        return low
    return min(value, high)


class Range:
    def inside(self, x):
        return x
'''
BROKEN = FIXED.replace("value < low or _outside(value, high)", "value <= low")
ABOUT = {
    "name": "clamp",
    "path": "pkg/a.py",
    "signature": "def clamp(value, low, high)",
    "docstring": "Keep a value between bounds.",
}
SHORT = """\
tests/test_a.py:15: in test_clamp
    assert clamp(1, 1, 2) == 1
E   assert 3 == 1
E    +  where 3 = clamp(1, 1, 2)
"""


def candidate(generator: str = "mutation", **about: object) -> Candidate:
    edits = (Edit("pkg/a.py", BROKEN, FIXED),)
    return Candidate(generator, ("compare",), edits, solution_spans(edits), {**ABOUT, **about})  # type: ignore[arg-type]


def test_there_are_25_templates_a_style_and_none_in_both_splits() -> None:
    train, bench = (phrases("prompts.toml")[split] for split in get_args(Split))
    for kinds in (train, bench):
        for styles in (("wrong", "missing", "change"), ("trace",), ("premise",)):
            assert sum(len(kinds[kind]) for kind in styles) >= 25
        assert len(kinds["full_open"]) * len(kinds["full_close"]) >= 25
    texts = [[text for kind in kinds.values() for text in kind] for kinds in (train, bench)]
    assert len({*texts[0], *texts[1]}) == len(texts[0]) + len(texts[1])
    fields = {field for text in texts[0] + texts[1] for _, field, _, _ in string.Formatter().parse(text) if field}
    assert fields == {
        "name",
        "fence",
        "seen",
        "trace",
        "other",
        "doc",
        "entry",
        "package",
        "path",
        "code",
        "old",
        "new",
        "module",
    }


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (SHORT, Failure("t", "AssertionError", "", "clamp(1, 1, 2)", "3", "1")),
        ("E   assert 1 == 3\nE    +  where 3 = clamp(1)", Failure("t", "AssertionError", "", "clamp(1)", "3", "1")),
        (
            "a.py:3: in f\n    x[1]\nE   IndexError: list index out of range",
            Failure("t", "IndexError", "list index out of range"),
        ),
        (
            "E   AssertionError: 'a' != 'b'\nE   - a\nE   + b",
            Failure("t", "AssertionError", "'a' != 'b'", "", "'a'", "'b'"),
        ),
        ("E   pkg.errors.OwnError: bad\n", Failure("t", "OwnError", "bad")),
        ("    assert f() == expected\nE   assert False", Failure("t")),
        ("", Failure("t")),
    ],
)
def test_what_was_seen_is_read_from_the_output(output: str, expected: Failure) -> None:
    read = prompts.failure_of("t", output)
    assert Failure(**{**read.__dict__, "trace": ""}) == expected
    assert len(read.trace) <= prompts.MOST_TRACE


def test_clauses_say_what_a_person_would() -> None:
    assert prompts.failure_of("t", SHORT).seen == "clamp(1, 1, 2) gives 3, should be 1"
    assert Failure("t", got="3", expected="1").seen == "I get 3, should be 1"
    assert Failure("t", "KeyError", "'a'").seen == "I get KeyError: 'a'"
    assert Failure("t").seen == ""


@given(st.integers(), st.sampled_from(get_args(Split)), st.sampled_from(["mutation", "deletion", "version", "history"]))
def test_prompts_are_short_tell_facts_and_blame_somebody_who_exists(seed: int, split: Split, generator: str) -> None:
    made = prompts.prompts(
        candidate(generator, subject="Handle equal bounds"),
        "pkg",
        [prompts.failure_of("t::a", SHORT)],
        random.Random(seed),
        split,
    )
    assert made == prompts.prompts(
        candidate(generator, subject="Handle equal bounds"),
        "pkg",
        [prompts.failure_of("t::a", SHORT)],
        random.Random(seed),
        split,
    )
    assert set(made) == {*get_args(StoredStyle)}
    for style, text in made.items():
        assert len(text) <= prompts.MOST or style == "full"
        assert "{" not in text
        assert not prompts.leaks(text, candidate(generator))
    assert any(name in made["premise"] for name in ("other", "Range", "inside"))
    assert "where 3 = clamp(1, 1, 2)" in made["trace"]
    assert all(fact in made["full"] for fact in ("pkg/a.py", ABOUT["signature"], ABOUT["docstring"], "t::a", "gives 3"))
    if generator == "history":
        assert "Handle equal bounds" in made["terse"]


def test_splits_differ_and_styles_without_facts_are_left_out() -> None:
    seen = {split: {prompts.prompts(candidate(), "p", [prompts.failure_of("t", SHORT)], random.Random(i), split)["trace"] for i in range(200)}
            for split in get_args(Split)}  # fmt: skip
    assert not seen["train"] & seen["bench"]
    assert min(map(len, seen.values())) == 25
    assert set(prompts.prompts(candidate(), "p", [], random.Random(0), "train")) == {"terse", "full", "vague"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("use value < low or so", ["value < low or"]),
        ("call _outside there", ["_outside"]),
        ("see abc1234 for more", ["the commit"]),
        ("clamp is wrong for value <= low", []),
        ("def clamp(value, low, high) is wrong", []),
        ("Keep a value between bounds.", []),
    ],
)
def test_leaks_are_found(text: str, found: list[str]) -> None:
    assert prompts.leaks(text, candidate(commit="abc1234def")) == found


def test_a_leaking_trace_is_never_drawn() -> None:
    output = SHORT + "E   hint: value < low or _outside\n"
    made = prompts.prompts(candidate(), "p", [prompts.failure_of("t", output)], random.Random(0), "bench")
    assert "trace" not in made
    assert "terse" in made


def test_what_is_seen_of_a_trace_of_nodes_is_the_users_code() -> None:
    inside = "Test.run (node:internal/test_runner/test:835:12)\nnew Promise (<anonymous>)\nasync Suite.run (node:internal/x:1:2)\n"
    trace = f"Expected values to be strictly equal:\nbytes.parse (/workspace/index.js:12:3)\n{inside}Array.map (<anonymous>)\n"
    assert (
        prompts.failure_of("a", trace).trace
        == "Expected values to be strictly equal:\nbytes.parse (/workspace/index.js:12:3)"
    )
