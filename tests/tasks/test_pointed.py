"""Requests that point at the code: what they say is what the files hold, and following them to the letter solves the task."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.generators.parsed import solution_spans
from etude.tasks.prompts import MOST_SHOWN, asked, changes, pointed_request
from etude.tasks.task import Candidate, Edit, Task
from tests.tasks import small

FENCED = re.compile(r"```\n(.*?)\n```", re.DOTALL)


def task(*edits: Edit, **changed: object) -> Task:
    """Return a task with these edits; only what prompts are made of matters."""
    edits = edits or (Edit("calc/__init__.py", small.BROKEN, small.SOLVED),)
    candidate = Candidate("mutation", ("assign",), edits, solution_spans(edits))
    prompts = {"terse": "fix total", "full": "Where: calc\nObserved: I get 2.\nChange the source."}
    return replace(Task("calc-1", "calc", "1", candidate, prompts, (), (), (), "debugging"), **changed)  # type: ignore[arg-type]


def test_following_what_is_told_gives_the_solution() -> None:
    for split in ("train", "bench"):
        text = pointed_request(task(split=split), "told")
        assert text is not None
        old, new = FENCED.findall(text)
        assert small.BROKEN.count(old) == 1
        assert small.BROKEN.replace(old, new) == small.SOLVED
        assert "calc/__init__.py" in text


@given(st.lists(st.sampled_from(["a = 1", "b = 2", "c = 3", "    d", ""]), min_size=1, max_size=12),
       st.lists(st.sampled_from(["a = 1", "b = 2", "c = 3", "    d", ""]), min_size=1, max_size=12))  # fmt: skip
def test_what_is_told_in_several_pieces_solves_it_as_well(before: list[str], after: list[str]) -> None:
    broken, fixed = ("\n".join(lines) + "\n" for lines in (before, after))
    text = pointed_request(task(Edit("notes.txt", broken, fixed)), "told") if broken != fixed else None
    if text is None:
        return
    pieces = FENCED.findall(text)
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        assert len(re.findall(f"(?={re.escape(old)})", broken)) == 1
        broken = broken.replace(old, new)
    assert broken == fixed


def test_shown_is_the_broken_function_and_not_the_fix() -> None:
    text = pointed_request(task(), "shown")
    assert text is not None
    assert "result = value\n    return result" in text
    assert "result += value" not in text
    assert "def mean" not in text
    assert "I get 2." in text


def test_of_a_long_function_the_lines_around_the_change_are_shown() -> None:
    body = [f"    x{i} = {i}" for i in range(200)]
    fixed = "def f():\n" + "\n".join(body) + "\n"
    text = pointed_request(task(Edit("f.py", fixed.replace("x100 = 100", "x100 = 0"), fixed)), "shown")
    assert text is not None
    assert "x100 = 0\n" in text
    assert "x100 = 100" not in text
    assert len(text.splitlines()) < MOST_SHOWN + 8


def test_what_cannot_be_pointed_at_is_asked_tersely() -> None:
    edit = Edit("a.py", "a = 1\n", "a = 2\n")
    several = task(edit, replace(edit, path="b.py"))
    created = task(Edit("new.py", None, "a = 2\n"))
    long = task(Edit("a.py", "a = 1\n", "".join(f"b{i} = {i}\n" for i in range(400))))
    for each in (several, created, long):
        assert asked(each, "told") == ("terse", "fix total")
    assert asked(task(), "told")[0] == "told"
    assert asked(task(), "full")[0] == "full"


@given(st.lists(st.sampled_from("abc"), max_size=30), st.lists(st.sampled_from("abc"), max_size=30))
def test_replacements_lead_from_one_text_to_the_other(before: list[str], after: list[str]) -> None:
    text, goal = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    if not text.strip():
        return
    for change in changes("a.txt", text, goal):
        assert change.old
        assert len(re.findall(f"(?={re.escape(change.old)})", text)) == 1
        text = text.replace(change.old, change.new or "", 1)
    assert text == goal


def test_located_names_every_file_and_nothing_of_what_is_in_it() -> None:
    edit = Edit("a.py", "a = 1\n", "a = 2\n")
    for split in ("train", "bench"):
        text = pointed_request(task(edit, replace(edit, path="b.py"), split=split), "located")
        assert text is not None
        assert {"a.py", "b.py"} <= set(re.findall(r"\w+\.py", text))
        assert "I get 2." in text
        assert "a = " not in text
    many = task(*(replace(edit, path=f"{i}.py") for i in range(5)))
    assert asked(many, "located") == ("terse", "fix total")
