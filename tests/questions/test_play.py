"""Attempts at questions with a scripted policy: search, programs, and demonstrations, token for token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from etude.agent.calls import Call
from etude.agent.endpoint import message_format
from etude.agent.trace import read_traces
from etude.errors import UserError
from etude.models.load import load_tokeniser
from etude.questions.demos import QuestionDemoSettings, demonstrate
from etude.questions.play import Library, SearchTools, accepted, faults
from etude.questions.question import Question
from etude.sandbox import probe
from tests.questions.test_question import CITY, WHICH, write

TALK = message_format()
CHECK = "import sys\nsys.exit(0 if sorted(sys.stdin.read().split()) == ['1', '2', '3'] else 1)\n"
SORTED = Question(id="s", question="Write 1 to 3 in any order.", kind="program", program=CHECK, answer="3 1 2")


@pytest.fixture
def sandboxed() -> None:
    if not asyncio.run(probe.try_namespaces()).works:
        pytest.skip("no user namespaces here")


@pytest.mark.usefixtures("sandboxed")
def test_a_program_decides_and_what_an_answer_does_to_it_is_no_pass() -> None:
    assert asyncio.run(accepted(CHECK, "2 3 1")) is True
    assert asyncio.run(accepted(CHECK, "import os; os._exit(0)")) is False
    assert asyncio.run(accepted("import sys\nint(sys.stdin.read())", "no number")) is False
    assert asyncio.run(accepted("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", "x")) is False


@pytest.mark.usefixtures("sandboxed")
def test_programs_are_tried_before_time_is_spent() -> None:
    lax = SORTED.model_copy(update={"id": "lax", "program": "pass"})
    wrong = SORTED.model_copy(update={"id": "wrong", "answer": "1 1"})
    assert asyncio.run(faults([SORTED], 2)) == []
    assert asyncio.run(faults([lax, wrong], 2)) == [
        "question lax: its program accepts an empty answer", "question wrong: its program refuses its own answer '1 1'"]  # fmt: skip


def corpus(folder: Path) -> Path:
    rows = [
        {"id": "france", "text": "Paris is the capital of France."},
        {"id": "peru", "text": "Lima is the capital of Peru."},
    ]
    return write(folder / "corpus.jsonl", *rows)


def test_search_finds_the_passage_and_refuses_what_is_no_query(tmp_path: Path) -> None:
    tools = SearchTools(Library(corpus(tmp_path), "rl.questions.corpus"), 1)
    calls = [
        Call("search", {"query": "capital of Peru"}),
        Call("search", {"q": "x"}),
        Call("shell", {"command": "ls"}),
        Call("search", {"query": 3}),
    ]
    found, *refused = asyncio.run(tools.run(calls))
    assert found.text == "[peru]\nLima is the capital of Peru."
    assert all(answer.failed for answer in refused)
    assert SearchTools(None, 1).specs == ()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Quito is in Ecuador.\n")
    assert Library(tmp_path / "texts", "x").search("Quito", 3)[0].path == "a.txt"


def test_a_corpus_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.questions\.corpus: .* is neither a file nor a folder"):
        Library(tmp_path / "nowhere", "rl.questions.corpus")
    with pytest.raises(UserError, match=r"corpus\.jsonl:1: no document"):
        Library(write(tmp_path / "corpus.jsonl", {"text": "x"}), "rl.questions.corpus")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no text to search in"):
        Library(tmp_path / "empty", "rl.questions.corpus")


def test_demonstrations_search_solve_and_mark(tiny_base: Path, tmp_path: Path) -> None:
    capital = {**CITY, "solution": "The passage says so.", "search": ["capital of France"], "source": "maps"}
    rubric = {"id": "r", "question": "Why?", "kind": "rubric", "rubric": "Any reason."}
    path = write(tmp_path / "train.jsonl", {"set": "small", "licence": "MIT"}, capital, WHICH, rubric)
    said: list[str] = []
    settings = QuestionDemoSettings(tasks=str(path), corpus=str(corpus(tmp_path)))
    demonstrate(settings, load_tokeniser(tiny_base), "digest", tmp_path / "out" / "t.jsonl", said.append)
    (one, two), torn = read_traces(tmp_path / "out" / "t.jsonl")
    assert torn == 0
    assert said == ["2 of 3 questions of small answered; left out: 1 no answer is known"]
    assert one.nodes[-1].details["said"] == "The passage says so.\nAnswer: Paris"
    assert "Paris is the capital" in one.nodes[2].text
    assert two.nodes[-1].details["said"] == "Answer: B"
    assert json.loads(json.dumps(one.made_by["demonstration"])) == {"task": "a", "package": "maps", "licence": "MIT"}
    with pytest.raises(UserError, match="is not a file"):
        QuestionDemoSettings(tasks="nowhere.jsonl").read()
