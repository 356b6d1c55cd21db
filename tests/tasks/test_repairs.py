"""Repairs: the answer gives the original, nothing is made twice or of a benchmark, and the account adds up."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import etude
from etude.agent import toolbox
from etude.agent.calls import Call
from etude.agent.formats import choose_format
from etude.agent.harness import SYSTEM
from etude.agent.tools import SPECS
from etude.data import chat
from etude.data.build import Build
from etude.data.chat import choose_template, read_conversations
from etude.data.document import Document
from etude.data.heldout import draw
from etude.data.settings import DataSettings, RepairSettings, SourceSettings
from etude.data.tokenise import read_kept
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.tasks import repairs
from etude.tasks.generators.parsed import Parsed, shape
from etude.tasks.repairs import Repair, Repairs, TalkSettings
from etude.tasks.task import Candidate, Edit, Task
from etude.work import Work
from tests import tiny
from tests.data.planted import MIT

SOURCES = sorted((Path(etude.__file__).parent / "data").rglob("*.py"))
ALL_TOOLS = ("read", "grep", "edit")


def document(path: Path, repository: str = "etude-1.0") -> Document:
    return Document(repository, f"src/{path.name}", path.read_text(encoding="utf-8"), language="python")


def found_in(path: Path, seed: int = 0, **asked: object) -> list[Repair]:
    maker = Repairs(RepairSettings(**asked), seed, frozenset())  # type: ignore[arg-type]
    return [repair for repair, _ in maker._of_file(Parsed("src/m.py", path.read_text(encoding="utf-8")), Counter())]


def edits(messages: list[dict[str, object]]) -> list[dict[str, str]]:
    calls = [call["function"] for each in messages for call in each.get("tool_calls", [])]  # type: ignore[attr-defined]
    return [call["arguments"] for call in calls if call["name"] == "edit"]


@settings(max_examples=12, deadline=None)
@given(path=st.sampled_from(SOURCES), seed=st.integers(0, 99), functions=st.integers(1, 6))
def test_the_answer_applied_to_what_is_shown_gives_the_original(path: Path, seed: int, functions: int) -> None:
    original = path.read_text(encoding="utf-8")
    for repair in found_in(path, seed, functions=functions)[::5]:
        assert repair.fixed == original
        assert len(repair.code) <= RepairSettings().characters
        if repair.kind == repairs.NOTHING:
            assert repair.file == original
            assert repair.changes == []
        else:
            assert shape(ast.parse(repair.file)) != shape(ast.parse(original))
            assert repair.changes
        shown, whole = repair.code, repair.file
        for change in repair.changes:
            assert shown.count(change.old or "") == 1
            shown = shown.replace(change.old or "", change.new or "")
            whole, _ = toolbox.replace(whole, change.old or "", change.new or "", "m.py")
        assert whole == original
        assert shown in original


@pytest.mark.parametrize("tools", [None, ALL_TOOLS])
def test_the_same_seed_gives_the_same_examples_and_another_one_others(tools: tuple[str, ...] | None) -> None:
    def made(seed: int) -> list[str]:
        result = Repairs(RepairSettings(), seed, frozenset(), tools).make(document(SOURCES[5]), Counter())
        assert isinstance(result, list)
        return [each.text for each in result]

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_a_function_that_comes_again_gets_the_same_errors_whatever_stands_around_it() -> None:
    text = SOURCES[5].read_text(encoding="utf-8")
    moved = text + "\n\ndef unrelated(value):\n    if value:\n        return 1\n    return 2\n"
    one, two = (Repairs(RepairSettings(nothing_wrong=0.0), 0, frozenset()) for _ in range(2))
    first = one.make(Document("a-1.0", "m.py", text), Counter())
    second = two.make(Document("a-1.1", "m.py", moved), Counter())
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert {each.identity for each in first} - {each.identity for each in second} == set()
    again: Counter[str] = Counter()
    assert isinstance(one.make(Document("a-1.1", "m.py", moved), again), list)  # `unrelated` alone
    assert again["left out: function again"] > 3


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5])
def test_the_share_in_which_nothing_is_wrong_is_exact(share: float) -> None:
    maker, made = Repairs(RepairSettings(nothing_wrong=share), 0, frozenset()), Counter[str]()
    examples = [each for path in SOURCES[:12] for each in _list(maker.make(document(path), made))]
    assert len(examples) > 300
    assert abs(made[repairs.NOTHING] - share * len(examples)) < 1.01
    assert sum(count for kind, count in made.items() if not kind.startswith("left out")) == len(examples)
    silent = [each for each in examples if f"-{repairs.NOTHING.replace(' ', '-')}-" in each.path]
    assert len(silent) == made[repairs.NOTHING]
    assert all("```diff" not in each.text and "should be" not in each.text.rpartition("```")[2] for each in silent)


def _list(made: list[Document] | str) -> list[Document]:
    return [] if isinstance(made, str) else made


def test_packages_of_a_benchmark_are_left_out_by_name() -> None:
    bench = Path(__file__).parents[2] / "recipes" / "tasks" / "bench.jsonl"
    names = repairs.benchmark_packages([bench])
    assert {"mako", "hpack", "natsort"} <= names
    maker = Repairs(RepairSettings(), 0, names)
    text = SOURCES[5].read_text(encoding="utf-8")
    for repository, path in [("Mako-1.4.3", "x/y.py"), ("other-1.0", "other/_vendor/rfc3986/y.py"), ("mako", "y.py")]:
        assert maker.make(Document(repository, path, text), Counter()) == "named as a package of a benchmark"
    assert isinstance(maker.make(Document("other-1.0", "other/mako.py", text), Counter()), list)


def test_what_the_agent_would_see_is_what_it_learns_from() -> None:
    """The conversation's tokens are those of the harness: its opening, and calls as it writes them."""
    tokeniser = tiny.tokeniser()
    template = choose_template(tokeniser, "chatml")
    talk = choose_format(tokeniser)
    made = Repairs(RepairSettings(nothing_wrong=0.0), 0, frozenset(), ALL_TOOLS).make(document(SOURCES[5]), Counter())
    assert isinstance(made, list)
    opened = 0
    for each in made[:12]:
        row = json.loads(each.text)
        request = row["messages"][1]["content"]
        opening = talk.opening(SYSTEM, [SPECS[name] for name in ALL_TOOLS], request)
        encoded = template.encode(_conversation(each.text))[0]
        assert encoded.tokens[: len(opening)].tolist() == list(opening)
        assert not encoded.learnt[: len(opening)].any()
        first = next(call["function"] for call in row["messages"][2]["tool_calls"])
        written = talk.write(Call(first["name"], first["arguments"]))
        told = template.tokeniser.decode(encoded.tokens[encoded.learnt].tolist())
        assert told.startswith(written) if len(row["messages"][2]["tool_calls"]) == 1 else True
        opened += first["name"] != "edit"
        if first["name"] == "edit":
            assert list(first["arguments"]) == ["path", "old", "new"]
    assert opened


def _conversation(line: str) -> chat.Conversation:
    return chat._conversation(line.encode(), "here")


def test_answers_of_tools_are_those_of_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    looked: set[str] = set()
    for number, repair in enumerate(found_in(SOURCES[5], functions=1)[:30]):
        Path("src").mkdir(exist_ok=True)
        Path(repair.path).write_text(repair.file, encoding="utf-8")
        messages = repairs.conversation(repair, ALL_TOOLS, draw(0, str(number)))
        answers = iter([each["content"] for each in messages if each["role"] == "tool"])
        for call in [call["function"] for each in messages for call in each.get("tool_calls", [])]:
            given, looked = call["arguments"], looked | {call["name"]}
            if call["name"] == "read":
                said, _ = toolbox.read(given["path"], given.get("start", 1), given.get("end", 0), 10_000, 1_000_000)
            elif call["name"] == "grep":
                said, _ = toolbox.grep(given["pattern"], given["path"], "", 100, 10_000)
            else:
                said, _ = toolbox.edit(**given)
            assert next(answers) == said
        assert Path(repair.path).read_text(encoding="utf-8") == repair.fixed
    assert looked == {"read", "grep", "edit"}


FIXED = '''\
def clamp(value, low, high):
    """Keep a value between bounds."""
    if value < low:
        return low
    return min(value, high)
'''


def history(folder: Path, *steps: tuple[str, str]) -> Path:
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)

    def run(*words: str) -> None:
        tiny.git(folder, *words)

    run("init", "-q")
    for message, text in steps:
        (folder / "m.py").write_text(text)
        run("add", ".")
        run("commit", "-q", "-m", message)
    return folder


def built(
    folder: Path, workers: int, *sources: SourceSettings, seed: int = 3, **more: object
) -> tuple[Build, list[Document]]:
    folder.mkdir(parents=True)
    data = DataSettings.model_validate(
        {"source": [each.model_dump() for each in sources], "workers": workers, "filters": {"scrub": False}, **more}
    )
    with MetricsLog(folder / "metrics.jsonl") as log:
        build = Build(data, Work(folder, log, Reporter(quiet=True), folder), seed, None,
                      lambda source: Repairs(source.repair, seed, frozenset({"mako"})))  # fmt: skip
        units, _ = build.compared()
    return build, [each for unit in units for some in read_kept(unit.folder) for each in some]


def test_fixes_of_a_history_become_repairs(tmp_path: Path) -> None:
    wrong = FIXED.replace("<", ">")
    place = history(tmp_path / "lib", ("begin", wrong), ("Fix clamp (#12)", FIXED), ("a docs fix", FIXED.replace("bounds", "two")),
                    ("faster", FIXED.replace("min(value, high)", "value if value < high else high")))  # fmt: skip
    source = SourceSettings(name="h", git=str(place), history=10, kind="repair")
    build, kept = built(tmp_path / "out", 1, source)
    entry = build.entries["h"]
    assert [each.path.rpartition("#")[2].partition("-")[0] for each in kept] == ["clamp"]
    assert entry.drops == {"repair: its message does not say fix": 3}
    assert entry.made == {"commit": 1}
    assert "if value > low:" in kept[0].text
    assert "if value < low:" in kept[0].text
    assert "Fix clamp" in kept[0].text
    assert "#12" not in kept[0].text


def test_the_corpus_is_the_same_with_any_number_of_processes_and_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.data.filter_documents.UNIT_BYTES", 40_000)
    root = tmp_path / "code"
    for name, files in (("one", SOURCES[3:6]), ("two", SOURCES[5:8]), ("mako", SOURCES[8:9]), ("none", [])):
        (root / name / "tests").mkdir(parents=True)
        (root / name / "LICENSE").write_text(MIT)
        (root / name / "tests" / "test_it.py").write_text(
            "def test_it():\n    value = 1\n    assert value == 1\n    assert value\n"
        )
        for path in files:
            shutil.copy(path, root / name / path.name)
    source = SourceSettings(name="r", folder=str(root), kind="repair")
    (build, kept), (other, again) = (built(tmp_path / str(n), n, source) for n in (1, 2))
    assert kept == again
    entry = build.entries["r"]
    assert entry == other.entries["r"]
    assert entry.documents_in == entry.kept + entry.drops.total()
    assert entry.kept == len(kept) > 100
    assert entry.drops["repair: tests"] + entry.drops["duplicates: exact duplicate"] > 3
    assert entry.drops["repair: named as a package of a benchmark"] >= 1
    assert entry.made_of == 6 - entry.drops["repair: no function to break"]
    assert not any(each.repository == "mako" for each in kept)
    assert all(each.licence == "MIT" for each in kept)
    identities = Counter(each.identity for each in kept)
    assert identities.most_common(1)[0][1] == 1
    made = sum(count for kind, count in entry.made.items() if not kind.startswith("left out"))
    assert made == entry.kept + entry.drops["duplicates: exact duplicate"]


def test_a_task_of_a_set_is_asked_for_by_what_its_test_showed() -> None:
    broken = FIXED.replace("<", ">")
    candidate = Candidate("mutation", ("compare",), (Edit("lib/m.py", broken, FIXED),), ())
    full = "Please repair lib. What we know:\nWhere: lib/m.py\nObserved: clamp(1, 2, 3) gives 1, should be 2\nFailing tests: t.py::test_it"
    task = Task("lib-1", "lib", "1.0", candidate, {"full": full}, ("t.py::test_it",), (), (), "debugging")
    repair = repairs.of_task(task)
    assert isinstance(repair, Repair)
    assert (repair.name, repair.code, repair.fixed) == ("clamp", broken, FIXED)
    messages = repairs.conversation(repair, ["edit"], draw(0, "x"))
    assert "clamp(1, 2, 3) gives 1, should be 2" in messages[1]["content"]
    assert edits(messages)[0]["new"].strip() == "if value < low:"
    silent = dataclasses.replace(task, prompts={"full": "Nothing was seen.", "terse": "fix clamp"})
    assert repairs.of_task(silent) == "task: no output of a failing test"
    two = dataclasses.replace(candidate, edits=(Edit("a.py", "", "x = 1\n"), Edit("b.py", "", "x = 1\n")))
    assert repairs.of_task(dataclasses.replace(task, candidate=two)) == "task: not in one function"


def test_errors_of_tasks_are_kept_apart_and_no_others() -> None:
    path = SOURCES[5]
    usual = found_in(path, each=8, nothing_wrong=0.0)
    taken = usual[3]
    candidate = Candidate("mutation", ("compare",), (Edit("src/m.py", taken.file, taken.fixed),), ())
    task = Task("m-1", "m", "1.0", candidate, {}, ("t.py::test_it",), (), (), "debugging")
    apart = repairs.errors_of([task])
    assert len(apart) == 1
    maker = Repairs(RepairSettings(each=8, nothing_wrong=0.0), 0, frozenset(), None, apart)
    left_out = Counter[str]()
    rest = [each for each, _ in maker._of_file(Parsed("src/m.py", path.read_text(encoding="utf-8")), left_out)]
    assert [each.file for each in rest] == [each.file for each in usual if each.file != taken.file]
    assert left_out["left out: the error of a task"] == 1


def test_conversations_are_made_once_with_their_licences_and_held_out_by_package(tmp_path: Path) -> None:
    root = tmp_path / "code"
    for name, path in (("one", SOURCES[5]), ("two", SOURCES[6])):
        (root / name).mkdir(parents=True)
        (root / name / "LICENSE").write_text(MIT)
        shutil.copy(path, root / name)
    source = SourceSettings(name="r", folder=str(root), kind="repair")
    reporter = Reporter(quiet=True)
    file = repairs.make_talks(TalkSettings(source=[source]), tmp_path / "out", tmp_path, reporter, 1)
    every = read_conversations(file)
    assert {each.group for each in every} == {"one", "two"}
    assert {call["name"] for each in every for call in _calls(each.messages)} == {"edit"}
    assert set(repairs.licences_of_talks(file)) == {"MIT"}
    before = file.stat().st_mtime_ns
    assert repairs.make_talks(TalkSettings(source=[source]), tmp_path / "out", tmp_path, reporter, 1) == file
    assert file.stat().st_mtime_ns == before


def _calls(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    return [call["function"] for each in messages for call in each.get("tool_calls", [])]  # type: ignore[attr-defined]


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="no effect on a source of files"):
        SourceSettings(name="a", folder=".", repair=RepairSettings(each=2))
    with pytest.raises(ValidationError, match='must have kind = "repair"'):
        TalkSettings(source=[SourceSettings(name="a", folder=".")])
    with pytest.raises(ValidationError, match="keeps away from the tasks"):
        TalkSettings(source=[SourceSettings(name="a", folder=".", kind="repair")], tasks="a.jsonl", apart="a.jsonl")
    with pytest.raises(ValidationError, match="name it in `tools`"):
        TalkSettings(source=[SourceSettings(name="a", folder=".", kind="repair")], tools=["read"])
