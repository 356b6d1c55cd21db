from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.progress import Reporter
from etude.tasks.codebase import PackageSettings
from etude.tasks.generators.parsed import cut_text
from etude.tasks.manifest import (
    codebase_row,
    cuts,
    load_set,
    numbers,
    picked,
    ranges,
    read_rows,
    task_of,
    task_row,
    write_set,
)
from etude.tasks.task import Codebase, Edit
from tests.tasks import small


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_read_back(wanted: set[int]) -> None:
    assert numbers(ranges(wanted)) == sorted(wanted)


def test_ranges_are_short() -> None:
    assert ranges([7, 1, 2, 3, 9]) == "1-3,7,9"


@given(st.text("aé\n\r\f", max_size=30), st.text("aé\n\r\f", max_size=30))
def test_cuts_make_one_text_of_another(fixed: str, broken: str) -> None:
    assert cut_text(fixed, cuts(fixed, broken)) == broken


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


ROWS = [{"task": name} for name in ("six-mutation-1", "six-mutation-2", "yaml-deletion-1")]


@pytest.mark.parametrize(("only", "left"), [
    ("", ROWS),
    ("six", ROWS[:2]),
    ("yaml six-mutation-2", ROWS[1:]),
    ("\n  six-mutation-1\n  yaml\n", [ROWS[0], ROWS[2]]),
])  # fmt: skip
def test_tasks_are_picked_by_how_their_ids_begin(only: str, left: list[dict[str, str]]) -> None:
    assert picked("set", ROWS, only) == left


def test_a_word_that_finds_no_task_is_named() -> None:
    with pytest.raises(UserError, match="set has no task whose id begins with 'toolz'; make some"):
        picked("set", ROWS, "six toolz yaml")
    with pytest.raises(UserError, match="set has no task; make some"):
        picked("set", [], "")


def test_a_task_is_read_back_from_its_line(calc: Codebase) -> None:
    for edits in (
        small.task().candidate.edits,
        (Edit("calc/__init__.py", None, small.SOLVED), Edit("calc/old.py", "x = 1\n", None)),
    ):
        task = replace(small.task(), candidate=replace(small.task().candidate, edits=edits))
        row = json.loads(json.dumps(task_row(task, calc)))
        assert task_of(row, calc) == task
    assert len(json.dumps(task_row(small.task(), calc)["edits"])) < 100


def test_a_tree_that_is_not_what_it_was_is_refused(calc: Codebase) -> None:
    row = task_row(small.task(), calc)
    with pytest.raises(UserError, match="calc-1: its tree is not what it was"):
        task_of(row, replace(calc, digest="1" * 64))


def test_a_manifest_is_read_back(calc: Codebase, tmp_path: Path) -> None:
    codebase = codebase_row(replace(calc, installed=("pytest==1",)), PackageSettings(folder="x"))
    write_set(tmp_path / "set.jsonl", {"name": "set"}, [codebase], [task_row(small.task(), calc)])
    header, codebases, tasks = read_rows(tmp_path / "set.jsonl")
    assert (header["name"], codebases[0]["installed"], tasks[0]["task"]) == ("set", ["pytest==1"], "calc-1")
    names = [name.removeprefix("test_calc.py::") for name in calc.ids]
    assert codebases[0]["tests"] == {"test_calc.py": names}


@pytest.mark.parametrize("text", ["", "not json\n", '{"format": 99, "name": "a"}\n', '{"format": 1}\n', "[1]\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl"):
        read_rows(tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", ["codebase", "task"])
def test_a_line_that_lacks_something_is_one_clear_line(calc: Codebase, tmp_path: Path, kind: str) -> None:
    rows = {"codebase": codebase_row(calc, PackageSettings(folder="x")), "task": task_row(small.task(), calc)}
    del rows[kind]["seconds"]
    write_set(tmp_path / "set.jsonl", {"name": "calc"}, [rows["codebase"]], [rows["task"]])
    with pytest.raises(UserError, match=f"{kind} .* has no 'seconds'"):
        load_set(tmp_path / "set.jsonl", tmp_path / "cache", Reporter(quiet=True))


def test_tests_that_codebases_share_are_written_once(tmp_path: Path) -> None:
    tests = [
        {"a.py": ["x", "y"], "b.py": ["z"]},
        {"a.py": ["x", "y"], "b.py": ["z", "w"]},
        {"a.py": ["x", "y"], "b.py": ["z", "w"]},
    ]
    rows = [{"codebase": f"p=={number}", "tests": each} for number, each in enumerate(tests)]
    write_set(tmp_path / "set.jsonl", {"name": "set"}, rows, [])
    written = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert written[0]["format"] == 2
    assert [row["tests"] for row in written[1:]] == [
        tests[0],
        {"a.py": "p==0", "b.py": ["z", "w"]},
        {"a.py": "p==0", "b.py": "p==1"},
    ]
    header, read, _ = read_rows(tmp_path / "set.jsonl")
    assert read == rows
    write_set(tmp_path / "again.jsonl", header, read, [])
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "set.jsonl").read_bytes()
    write_set(tmp_path / "one.jsonl", header, read[:1], [])
    assert read_rows(tmp_path / "one.jsonl")[0]["format"] == 1
    lines = (tmp_path / "set.jsonl").read_text().splitlines()
    (tmp_path / "cut.jsonl").write_text("\n".join([lines[0], *lines[2:]]))
    with pytest.raises(UserError, match=r"p==1 has no tests of a\.py"):
        read_rows(tmp_path / "cut.jsonl")
