"""Demonstrations of the small codebase, made for real; and the pure parts of how they are written."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etude.agent.calls import Call
from etude.agent.formats import choose_format
from etude.agent.search import Searcher
from etude.agent.toolbox import replace
from etude.agent.tools import BASH_ONLY, ToolSettings
from etude.agent.trace import Trace, read_traces
from etude.data.chat import ChatTemplate
from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.models.bases import resolve
from etude.models.load import load_tokeniser
from etude.progress import Reporter
from etude.run.stages.sft import SftSettings, _packed
from etude.tasks.demos import (
    Demonstrator,
    DemoSettings,
    Script,
    in_terminal,
    jobs,
    licences_of,
    make,
    read_samples,
    refuse_benchmarks,
    tokeniser_digest,
    wrong_versions,
)
from etude.tasks.manifest import TaskSet, write_set
from etude.tasks.prompts import Change, changes
from etude.tasks.task import StoredStyle, Task
from tests.tasks import small

LINES = st.lists(st.sampled_from(["a\n", "b\n", "    a\n", "\n", "def f(): pass\n", "x = 1"]), max_size=8).map("".join)
PROMPTS: dict[StoredStyle, str] = {"terse": "fix total", "premise": "since the change to name, sums are wrong", "full": "calc.total([1, 2]) gives 2\nWhere: calc/__init__.py",
           "trace": "test_calc.py:10: in test_total\nassert 2 == 3\n\nfix"}  # fmt: skip


@given(before=LINES.filter(str.strip), after=LINES)
@example(before="a\n\na\n\na\n", after="a\na\n")  # overlaps itself once its last line end is left out
def test_changes_lead_from_one_text_to_the_other(before: str, after: str) -> None:
    text = before
    for change in changes("notes.txt", before, after):
        assert change.old is not None
        assert change.new is not None
        text, _ = replace(
            text, change.old, change.new, "notes.txt"
        )  # the tool itself: raises where `old` is not there once
    assert text == after


def test_a_change_is_named_after_what_it_brings() -> None:
    found = changes(
        "a.py",
        "def a():\n    return 1\n\n\ndef c():\n    return 1\n",
        "def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\ndef c():\n    return 1\n",
    )
    assert [change.name for change in found] == ["b"]
    assert Change("a.py", "a", "    x = 1\n    return x", "    x = 1\n    return -x").line == {
        "was": "return x",
        "now": "return -x",
    }


def test_wrong_versions_change_the_same_line_otherwise() -> None:
    found = wrong_versions(small.task().candidate.edits[0])
    assert found == [small.SOLVED.replace("result += value", "result -= value")]


@pytest.fixture(scope="module")
def tokeniser() -> Any:
    return load_tokeniser(resolve("sprout").folder)


@pytest.fixture(scope="module")
def demonstrator(tmp_path_factory: pytest.TempPathFactory, tokeniser: Any) -> Demonstrator:
    calc = small.codebase(tmp_path_factory.mktemp("calc"))
    good = dataclasses.replace(small.task(), prompts=PROMPTS)
    never = dataclasses.replace(
        good,
        id="calc-never",
        fail_to_pass=(*small.FAILING, "test_calc.py::test_skipped"),
        prompts={"terse": "fix total"},
    )
    tasks = TaskSet("calc", "0", (good, never), {"calc==1": calc})
    return Demonstrator(tasks, choose_format(tokeniser), tokeniser_digest(tokeniser), Searcher(), seed=1)


def made(demonstrator: Demonstrator, folder: Path) -> tuple[dict[str, Any], list[Trace]]:
    with MetricsLog(folder / "log.jsonl") as log:
        wanted = jobs(demonstrator.tasks.tasks, DemoSettings(tasks="", each=4))
        row = small.run(make(demonstrator, folder, log, Reporter(quiet=True), wanted))
    return row, read_traces(folder / "traces.jsonl")[0]


def sampled(traces: list[Trace]) -> list[list[int]]:
    return [[token for node in trace.nodes if node.sampled for token in node.tokens] for trace in traces]


def test_demonstrations_are_kept_if_they_pass_and_are_learnt_token_for_token(
    demonstrator: Demonstrator, tokeniser: Any, tmp_path: Path
) -> None:
    row, traces = made(demonstrator, tmp_path / "one")
    assert (row["wanted"], row["kept"], sorted(row["styles"])) == (5, 4, sorted(PROMPTS))
    assert [reason.partition(":")[0] for reason in row["left out"]] == ["scored fail"]
    for trace in traces:
        assert "+        result += value" in trace.diff
        assert "test_mean" not in "".join(node.text for node in trace.nodes if node.sampled)  # it is hidden
        answers = "".join(answer["text"] for node in trace.nodes for answer in node.details.get("answers", ()))
        counted = re.findall(r"(\d+) passed", trace.nodes[-1].details["said"])
        assert counted
        assert f"{counted[0]} passed" in answers
        assert "exit code 0" in answers
    learnt = [
        encoded.tokens[encoded.learnt].tolist()
        for _, encoded in read_samples(tmp_path / "one" / "traces.jsonl", tokeniser)
    ]
    assert learnt == sampled(traces)
    settings = SftSettings(traces=[str(tmp_path / "one" / "traces.jsonl")], length=8192, heldout=0.0)
    chats, _ = _packed(settings, ChatTemplate(tokeniser, "base"), 8192, seed=0)
    rows = chats.splits["train"]["chat"]
    batch = chats.read([rows[row] for row in range(len(rows))])
    assert batch.learnt is not None
    assert int(batch.learnt.sum()) == sum(map(len, sampled(traces)))

    before = (tmp_path / "one" / "log.jsonl").read_bytes()
    assert made(demonstrator, tmp_path / "one")[0] == row  # nothing is made again
    assert (tmp_path / "one" / "log.jsonl").read_bytes() == before
    assert sampled(made(demonstrator, tmp_path / "two")[1]) == sampled(traces)  # nor otherwise

    with pytest.raises(UserError, match="another set, model, seed or tools"):
        made(dataclasses.replace(demonstrator, seed=2), tmp_path / "one")
    tokeniser.chat_template += " "
    with pytest.raises(UserError, match="another tokeniser or template"):
        read_samples(tmp_path / "one" / "traces.jsonl", tokeniser)


def test_with_bash_alone_all_is_said_in_commands(demonstrator: Demonstrator, tmp_path: Path) -> None:
    alone = dataclasses.replace(demonstrator, tools=ToolSettings(tools=BASH_ONLY))
    row, traces = made(alone, tmp_path)
    assert row["kept"] == 4
    assert licences_of(tmp_path / "traces.jsonl").keys() == {"MIT"}
    for trace in traces:
        assert trace.made_by["tools"] == ["bash"]
        assert {answer["name"] for node in trace.nodes for answer in node.details.get("answers", ())} == {"bash"}
        assert "+        result += value" in trace.diff
    with pytest.raises(UserError, match="another set, model, seed or tools"):
        made(demonstrator, tmp_path)


def in_bash(folder: Path, name: str, **given: object) -> str:
    command = str(in_terminal(Call(name, given)).arguments["command"])
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True).stdout


@settings(max_examples=10, deadline=None)  # a Python starts for every command
@given(st.text("ab'\"\\\n{}%é$`", min_size=9, max_size=60), st.text("xy'\"\\\n{}%é$`", max_size=60))
def test_files_are_written_and_edited_by_commands(old: str, new: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "it's.py")
        in_bash(path.parent, "write", path=path.name, content=f"1{old}2")
        assert path.read_text() == f"1{old}2"
        in_bash(path.parent, "edit", path=path.name, old=old, new=new)
        assert path.read_text() == f"1{new}2"


@pytest.mark.parametrize("path", ["a b.py", "it's.py"])
def test_files_are_read_and_searched_by_commands(tmp_path: Path, path: str) -> None:
    (tmp_path / path).write_text("one\ntwo\nthree\n")
    assert in_bash(tmp_path, "read", path=path, start=2, end=3) == "two\nthree\n"
    assert in_bash(tmp_path, "grep", pattern="t(w|x)o", glob="*.py").endswith(":2:two\n")
    assert in_bash(tmp_path, "grep", pattern=r"\bone\b", path=path).endswith("1:one\n")


@pytest.mark.parametrize("turn", ["slip", "wrong"])
def test_wrong_turns_are_seen_to_be_wrong_and_mended(demonstrator: Demonstrator, turn: str) -> None:
    task: Task = demonstrator.tasks.tasks[0]
    drawn = next(
        each
        for n in range(100)
        if (each := dataclasses.replace(demonstrator, seed=n)).script(task, "terse", "x", 0).wrong_turn == turn
    )
    assert drawn.script(task, "terse", "x", 1).wrong_turn == "none"
    trace = small.run(drawn.demonstrate(task, "terse", "x", 0))
    answers = [answer for node in trace.nodes for answer in node.details.get("answers", ())]
    edits = [place for place, answer in enumerate(answers) if answer["name"] == "edit"]
    assert len(edits) == 2
    assert [answers[place]["failed"] for place in edits] == [turn == "slip", False]
    tests = [answer["details"]["rc"] for answer in answers[edits[0] : edits[1]] if answer["name"] == "shell"]
    assert tests == ([1] if turn == "wrong" else [])


def test_two_parts_can_be_found_one_after_the_other() -> None:
    edit = dataclasses.replace(small.task().candidate.edits[0], broken=small.BROKEN.replace('"calc"', '"cal"'))
    task = dataclasses.replace(small.task(), candidate=dataclasses.replace(small.task().candidate, edits=(edit,)))
    import random

    turns = {
        Script(task, "fix", ("test_calc.py::test_total",), ("test_calc.py",), (), random.Random(n)).wrong_turn
        for n in range(50)
    }
    assert turns == {"none", "slip", "wrong", "partial"}
    assert Script(task, "fix", (), ("test_calc.py",), (), random.Random(0)).wrong_turn in {
        "none",
        "slip",
    }  # nothing would show it


def test_benchmarks_are_refused(tmp_path: Path) -> None:
    for split in ("train", "bench"):
        write_set(tmp_path / f"{split}.jsonl", {"name": split, "split": split}, [{"codebase": "calc==1"}], [])
    with pytest.raises(UserError, match="is a benchmark"):
        refuse_benchmarks(tmp_path / "bench.jsonl")
    (tmp_path / "other.toml").write_bytes(b"\xff\xfe\x00")  # no recipe of ours
    (tmp_path / "folder.toml").mkdir()
    refuse_benchmarks(tmp_path / "train.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"empty\.jsonl is no manifest of tasks: it is empty"):
        refuse_benchmarks(tmp_path / "empty.jsonl")
    (tmp_path / "bench.toml").write_text(
        'name = "bench"\nsplit = "bench"\n[[package]]\npypi = "Calc==2"\n', encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"shares calc with the benchmark bench\.toml"):
        refuse_benchmarks(tmp_path / "train.jsonl")
