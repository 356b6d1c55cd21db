"""Cheaters must fail, the honest must pass, and trouble with the sandbox is neither."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.box import Entry, Place
from etude.sandbox.local import open_sandbox
from etude.tasks import score as score_module
from etude.tasks.score import SHOWN, SHOWN_TESTS, Score, change_digest, check, score, taken, tried, visible
from etude.tasks.suite import Run
from etude.tasks.task import Codebase, Edit, function_of
from tests.tasks import small
from tests.tasks.corpus import CHEATS

SPECIAL = small.BROKEN.replace(
    "    result = 0\n", "    if values in ([1, 2], [3, 4, 5]):\n        return sum(values)\n    result = 0\n"
)


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


def entries(files: dict[str, str | None]) -> list[Entry]:
    return [
        Entry(path, "gone") if text is None else Entry(path, "file", len(text), 0o644, text.encode())
        for path, text in files.items()
    ]


def scored(calc: Codebase, files: dict[str, str | None]) -> Score:
    return small.run(score(small.task(), calc, entries(files)))


def test_the_honest_pass(calc: Codebase) -> None:
    another = small.BROKEN.replace("result = value", "result = result + value")
    scratch = {"notes.txt": "left over", "test_mine.py": "def test(): assert False\n", "calc/extra.py": "x = 1\n"}
    for files in ({"calc/__init__.py": small.SOLVED}, {"calc/__init__.py": another, **scratch}):
        found = scored(calc, dict(files))
        assert (found.outcome, found.fail_to_pass, found.pass_to_pass) == ("pass", 1.0, 1.0), found
        assert found.said == {}
    assert found.ignored == ("notes.txt", "test_mine.py")


def test_half_a_solution_is_half_the_fraction(calc: Codebase) -> None:
    found = scored(calc, {"calc/__init__.py": SPECIAL})
    assert (found.fail_to_pass, found.pass_to_pass) == (0.5, 1.0)
    assert len(found.said) == SHOWN_TESTS
    assert set(found.said) < set(small.task().fail_to_pass)
    assert all("\nE   " in said and len(said) <= SHOWN for said in found.said.values())


def test_a_forger_is_named(calc: Codebase) -> None:
    cheat = CHEATS["roads to the runner: import"]
    assert "importlib.import_module in calc/__init__.py, line 20" in scored(calc, dict(cheat)).reason
    assert "forged" in small.run(tried(small.task(), calc, entries(dict(cheat)))).reason


def test_who_remembers_earlier_runs_is_hardly_better_off(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes share a kernel, whose counters and caches one can change and the next can read: here a cheat that remembers every text.

    It takes for true what the run of all tests shows, or else what it saw first. Two functions are hidden: that is right once in four.
    """
    task, true = small.task(), (calc.tree / "test_calc.py").read_text()
    remembered: dict[str, str] = {}

    def functions(text: str) -> dict[str, str]:
        return {node.name: ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}

    async def forged(_: Codebase, layers: tuple[Path, ...] = (), ids: Sequence[str] = (), **_more: float) -> Run:
        written = [layer / "test_calc.py" for layer in layers if (layer / "test_calc.py").exists()]
        seen, truth = functions(written[0].read_text() if written else true), functions(true)
        remembered.update(
            seen if len(ids) == len(task.tests) else {k: v for k, v in seen.items() if k not in remembered}
        )
        known = (
            truth if len(layers) == 1 else remembered
        )  # one layer: the reference solution, without the broken source
        names = {test: function_of(test).split("::")[-1] for test in ids}
        return Run(
            "complete", {test: "passed" if known[name] == seen[name] else "failed" for test, name in names.items()}
        )

    monkeypatch.setattr(score_module, "run_tests", forged)

    async def paid() -> int:
        outcomes = []
        for _ in range(40):
            remembered.clear()
            outcomes.append((await tried(task, calc, entries({"calc/__init__.py": "forged"}))).outcome)
        return outcomes.count("pass")

    assert asyncio.run(paid()) < 25  # all of them, where the run of all tests comes first


def test_each_function_is_surely_spoilt_once(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that do not show may have no effect: who forges always, or is equal to anything, would be paid where all of them had none."""
    surely: list[str] = []

    def recorded(*given: Any) -> list[Entry]:
        surely.extend(function for function in given[2] if function not in given[4])
        return []

    async def forged(_: Codebase, layers: tuple[Path, ...] = (), ids: Sequence[str] = (), **_more: float) -> Run:
        return Run("complete", dict.fromkeys(ids, "passed"))

    monkeypatch.setattr(score_module, "spoilt_tests", recorded)
    monkeypatch.setattr(score_module, "run_tests", forged)
    assert asyncio.run(tried(small.task(), calc, entries({"calc/__init__.py": "forged"}))).outcome == "pass"
    assert sorted(surely) == sorted(small.task().hidden)


def test_code_may_use_what_it_used_before(calc: Codebase) -> None:
    files: dict[str, str | None] = {"calc/__init__.py": small.SOLVED, "calc/extra.py": "import sys\n\nsys.modules\n"}
    assert "sys.modules in calc/extra.py, line 3" in scored(calc, files).reason
    right = small.task()
    edits = (*right.candidate.edits, Edit("calc/extra.py", None, "import sys\nsys.modules\n"))
    allowed = dataclasses.replace(right, candidate=dataclasses.replace(right.candidate, edits=edits))
    assert small.run(score(allowed, calc, entries(files))).outcome == "pass"


def test_a_broken_sandbox_is_invalid(calc: Codebase, tmp_path: Path) -> None:
    nowhere = Codebase(**{**vars(calc), "python": tmp_path / "bin" / "python"})
    found = small.run(score(small.task(), nowhere, []))
    assert found.outcome == "invalid"
    assert found.reason


def test_what_is_taken_is_code_only(calc: Codebase) -> None:
    offered = [Entry("calc/a.py", "file", 1, 0o644, b"a"), Entry("calc/link.py", "link", 1, 0o777, b"/etc/passwd"), Entry("calc", "gone"),
               Entry("calc/sub", "folder"), Entry("calc/tests/a.py", "file", 1, 0o644, b"a"), Entry("calc/fifo", "other"),
               Entry("calc/__pycache__/a.pyc", "file", 1, 0o644, b"a"), Entry("calculus/a.py", "file", 1, 0o644, b"a"),
               Entry("calc/\udcff.py", "file", 1, 0o644, b"a")]  # fmt: skip
    kept, ignored = taken(small.task(), calc, offered)
    assert [entry.path for entry in kept] == ["calc/a.py", "calc"]
    assert ignored[:-1] == ("calc/link.py", "calc/tests/a.py", "calc/fifo", "calc/__pycache__/a.pyc", "calculus/a.py")
    assert ignored[-1] == "calc/\\udcff.py"  # not text: it would end the benchmark when results are written
    assert change_digest(small.task(), kept)


def test_every_warm_call_gets_its_own_standard_input(tmp_path: Path) -> None:
    """A runner that gets no order, or another's, makes a score invalid. Orders are longer than a pipe holds, and come ten at once."""
    tmp_path.chmod(0o755)
    python = small.python()
    place = Place((tmp_path,), (python.parent.parent,), warm=(python, ("json.tool",)))
    words = [str(python), "-m", "json.tool", "--compact"]

    async def calls(seed: int) -> int:
        sandbox = await open_sandbox(place)
        orders = [json.dumps([f"{seed} {number}", "x" * 9973 * number]).encode() for number in range(10)]
        try:
            results = await asyncio.gather(*(sandbox.exec(words, stdin=order) for order in orders * 2))
        finally:
            await sandbox.close()
        return sum(
            json.loads(result.out) == json.loads(order) for result, order in zip(results, orders * 2, strict=True)
        )

    async def work() -> list[int]:
        return await asyncio.gather(*map(calls, range(5)))

    assert small.run(work()) == [20] * 5


def test_the_agent_sees_neither_the_solution_nor_the_hidden_tests(calc: Codebase) -> None:
    seen = {entry.path: (entry.content or b"").decode() for entry in visible(small.task(), calc)}
    assert seen["calc/__init__.py"] == small.BROKEN
    assert "test_mean" not in seen["test_calc.py"]
    assert "test_total_of_three" not in seen["test_calc.py"]
    assert "def test_total(values)" in seen["test_calc.py"]


def test_check_finds_what_is_wrong_with_a_task(calc: Codebase) -> None:
    right = small.task()
    assert small.run(check(right, calc)) == ""
    swapped = dataclasses.replace(right, fail_to_pass=small.PASSING, pass_to_pass=small.FAILING)
    assert "doing nothing" in small.run(check(swapped, calc))
    absent = dataclasses.replace(right, fail_to_pass=(*small.FAILING, "test_calc.py::test_skipped"))
    assert "the reference is scored fail" in small.run(check(absent, calc))
