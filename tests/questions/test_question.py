"""Sets of questions: what is read, and what is refused in one line with its file and number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.questions.question import SYSTEM, read_set, refuse_benchmark

HEADER = {"set": "small", "split": "bench", "licence": "CC0-1.0"}
CITY = {"id": "a", "question": "Capital of France?", "kind": "exact", "answer": "Paris"}
WHICH = {
    "id": "b",
    "question": "Which?",
    "kind": "choice",
    "choices": ["iron", "zinc"],
    "answer": "B",
    "topic": "metals",
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_set_with_and_without_its_line(tmp_path: Path) -> None:
    whole, plain = write(tmp_path / "x.jsonl", HEADER, CITY, "", WHICH), write(tmp_path / "y.jsonl", CITY)
    found = read_set(whole)
    assert (found.about.set, found.about.split, found.about.system) == ("small", "bench", SYSTEM)
    assert found.questions[1].prompt == "Which?\nA. iron\nB. zinc"
    assert found.statistics["share of the commonest answer"] == 0.5
    assert (read_set(plain).about.set, read_set(plain).about.split) == ("y", "train")
    assert [question.id for question in read_set(whole, "b").questions] == ["b"]
    assert read_set(whole, "b").digest != found.digest


BAD = [
    ("{", "no JSON"), ("[1]", "a question is a JSON object"), ({"id": "a"}, "question: Field required"),
    ({**CITY, "kind": "essay"}, "kind: Input should be"), ({**CITY, "anwser": "x"}, "unknown key 'anwser'"),
    ({**CITY, "answer": ""}, "it has no `answer`"), ({**CITY, "unit": "mg"}, "`unit` has no effect on a question of the kind 'exact'"),
    ({**CITY, "kind": "number"}, "the answer of a number is a JSON number"), ({**CITY, "kind": "number", "answer": True}, "answer: Input should be"),
    ({**CITY, "kind": "number", "answer": 1, "unit": "3 2"}, "the unit '3 2' cannot be read"), ({**WHICH, "answer": "C"}, "none of the choices"),
    ({**WHICH, "choices": ["iron", "Iron "]}, "2 to 26 different texts"), ({**WHICH, "choices": ["iron"]}, "2 to 26 different texts"),
    ({**CITY, "kind": "program"}, "it has no `program`"), ({**CITY, "kind": "rubric"}, "it has no `rubric`"),
    ({**CITY, "answer": ["Paris", ""]}, "it has no `answer`"),
    ({**CITY, "kind": "number", "answer": 1, "tolerance": -1}, "tolerance: Input should be greater"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "fault"), BAD)
def test_a_malformed_line_is_named(tmp_path: Path, row: Any, fault: str) -> None:
    path = write(tmp_path / "x.jsonl", HEADER, {**CITY, "id": "first"}, row)
    with pytest.raises(UserError) as said:
        read_set(path)
    assert str(said.value).startswith(f"{path}:3: ")
    assert fault in str(said.value)
    assert "\n" not in str(said.value)


def test_sets_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.jsonl has no question; docs/arenas\.md"):
        read_set(write(tmp_path / "x.jsonl"))
    with pytest.raises(UserError, match="no question whose id begins with 'zz'"):
        read_set(write(tmp_path / "x.jsonl", CITY), "zz")
    with pytest.raises(UserError, match=r"x\.jsonl:3: the id 'a' is also that of line 1"):
        read_set(write(tmp_path / "x.jsonl", CITY, WHICH, CITY))
    with pytest.raises(UserError, match=r"x\.jsonl:1: licence 'free' is no SPDX expression"):
        read_set(write(tmp_path / "x.jsonl", {**HEADER, "licence": "free"}, CITY))
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="no JSON lines of questions"):
        read_set(tmp_path / "x.jsonl")


def test_a_benchmark_is_not_trained_on_nor_what_it_shares(tmp_path: Path) -> None:
    bench = write(tmp_path / "bench.jsonl", HEADER, WHICH)
    with pytest.raises(UserError, match="is a benchmark, whose questions must not be trained on"):
        refuse_benchmark(bench, read_set(bench))
    write(tmp_path / "notes.jsonl", "no question at all")
    train = write(tmp_path / "train.jsonl", CITY)
    refuse_benchmark(train, read_set(train))
    write(train, CITY, {**WHICH, "id": "same", "question": "WHICH? "})
    with pytest.raises(UserError, match=r"same is b of the benchmark bench\.jsonl"):
        refuse_benchmark(train, read_set(train))
