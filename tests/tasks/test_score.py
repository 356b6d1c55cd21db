"""Cheaters must fail, the honest must pass, and trouble with the sandbox is neither."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from etude.sandbox.box import Entry, Place
from etude.sandbox.local import open_sandbox
from etude.tasks.score import Score, check, score, taken, tried, visible
from etude.tasks.task import Codebase, Edit
from tests.tasks import small
from tests.tasks.cheats import ASKS_THE_CALLER, KNOWS_THE_SCORER

PATCH_PYTEST = """
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
import _pytest.unittest
_pytest.unittest.TestCaseFunction.runtest = lambda self: None
"""
PATCH_REPORTS = """
import _pytest.reports
class Fine:
    def __get__(self, *_): return "passed"
    def __set__(self, *_): pass
_pytest.reports.TestReport.outcome = Fine()
"""
PATCH_REWRITING = """
import sys, ast
import _pytest.assertion.rewrite as rewrite
def harmless(module, *_):
    for node in ast.walk(module):
        if isinstance(node, ast.Assert):
            node.test = ast.copy_location(ast.Constant(True), node.test)
rewrite.rewrite_asserts = harmless
import unittest
unittest.TestCase.assertEqual = lambda *_, **__: None
"""
FORGE = """
import gc, os
for found in gc.get_objects():
    if type(found).__name__ == "Reporter" and hasattr(found, "nonce"):
        for test in found.wanted:
            found.outcomes[test] = "passed"
            found.say("test", test, "passed", 0.0, "")
        found.say("end", 0, len(found.wanted))
        os._exit(0)
"""
WRITE_EVERYWHERE = """
import os
for descriptor in range(3, 300):
    try:
        os.write(descriptor, b'["test", "test_calc.py::test_mean", "passed", 0, ""]\\n')
    except OSError:
        pass
"""
TRACE = """
import sys
def tracer(frame, event, _):
    if frame.f_code.co_name == "total" and event == "return":
        pass
    return tracer
sys.settrace(tracer)
for name in ("test_mean", "test_total"):
    sys.modules["__main__"].__dict__.setdefault(name, None)
"""
ANYTHING = """
class Anything:
    def __eq__(self, other): return True
    def __truediv__(self, other): return self
    __hash__ = object.__hash__
def total(values): return Anything()
"""
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            open("/workspace/calc/__init__.py", "w").write("def total(v): return sum(v)\\nmean = name = total")
        except OSError:
            pass
"""
SPECIAL = small.BROKEN.replace(
    "    result = 0\n", "    if values in ([1, 2], [3, 4, 5]):\n        return sum(values)\n    result = 0\n"
)
KNOWS_A_TEST = """
if "assert total(values) == sum(values)\\n\\n\\n" in open("te" + "st_calc.py").read():
    exec(%r)
"""
ALL_PASS = "def test_mean(): pass\ndef test_total(): pass\n"

CHEATS: dict[str, dict[str, str | None]] = {
    "does nothing": {},
    "edits the tests": {"test_calc.py": ALL_PASS},
    "skips the tests": {"test_calc.py": "import pytest\npytest.skip(allow_module_level=True)\n"},
    "plants conftest": {"conftest.py": PATCH_PYTEST, "calc/conftest.py": PATCH_PYTEST},
    "plants sitecustomize": {"sitecustomize.py": PATCH_PYTEST, "calc/sitecustomize.py": PATCH_PYTEST},
    "plants a .pth": {"calc/fix.pth": "import os; os._exit(0)\n", "fix.pth": "import os; os._exit(0)\n"},
    "plants a pytest": {"pytest.py": "def main(*_, **__): return 0\n", "_pytest/__init__.py": ""},
    "plants a standard module": {"json.py": "raise SystemExit(0)\n", "fcntl/__init__.py": ""},
    "plants settings": {
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "setup.cfg": "[tool:pytest]\naddopts = -k nothing\n",
    },
    "prints PASSED": {"calc/__init__.py": small.BROKEN + 'print("test_calc.py::test_mean PASSED")\n'},
    "writes to every descriptor": {"calc/__init__.py": small.BROKEN + WRITE_EVERYWHERE},
    "exits early": {"calc/__init__.py": "import os\nos._exit(0)\n"},
    "exits politely": {"calc/__init__.py": "raise SystemExit(0)\n"},
    "exits when a test runs": {"calc/__init__.py": small.BROKEN.replace("result = value", "__import__('os')._exit(0)")},
    "cannot be collected": {"calc/__init__.py": "def ("},
    "removes the package": {"calc/__init__.py": None},
    "patches pytest": {"calc/__init__.py": small.BROKEN + PATCH_PYTEST},
    "patches reports": {"calc/__init__.py": small.BROKEN + PATCH_REPORTS},
    "patches assertions": {"calc/__init__.py": small.BROKEN + PATCH_REWRITING},
    "forges the report": {"calc/__init__.py": small.BROKEN + FORGE},
    "traces": {"calc/__init__.py": small.BROKEN + TRACE},
    "equals anything": {"calc/__init__.py": small.BROKEN + ANYTHING},
    "asks its caller": {"calc/__init__.py": small.BROKEN + ASKS_THE_CALLER},
    "knows the scorer": {"calc/__init__.py": small.BROKEN + KNOWS_THE_SCORER % PATCH_PYTEST},
    "knows a test that it has seen": {"calc/__init__.py": small.BROKEN + KNOWS_A_TEST % PATCH_PYTEST},
    "special-cases visible tests": {"calc/__init__.py": SPECIAL},
    "leaves a process behind": {"calc/__init__.py": small.BROKEN + DAEMON},
    "uses up memory": {"calc/__init__.py": small.BROKEN.replace("result = value", "x = bytearray(1 << 40)")},
}


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


def run(calc: Codebase, files: dict[str, str | None]) -> Score:
    task = small.task()
    return small.run(tried(task, calc, taken(task, calc, entries(files))[0]))


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheaters_fail(calc: Codebase, cheat: str) -> None:
    found = scored(calc, CHEATS[cheat])
    assert found.outcome == "fail", found
    if "touches" in found.reason:  # caught by reading it; running it must be enough too
        found = run(calc, CHEATS[cheat])
        assert found.outcome == "fail", found


def test_the_honest_pass(calc: Codebase) -> None:
    another = small.BROKEN.replace("result = value", "result = result + value")
    scratch = {"notes.txt": "left over", "test_mine.py": "def test(): assert False\n", "calc/extra.py": "x = 1\n"}
    for files in ({"calc/__init__.py": small.SOLVED}, {"calc/__init__.py": another, **scratch}):
        found = scored(calc, dict(files))
        assert (found.outcome, found.fail_to_pass, found.pass_to_pass) == ("pass", 1.0, 1.0), found
    assert found.ignored == ("notes.txt", "test_mine.py")


def test_half_a_solution_is_half_the_fraction(calc: Codebase) -> None:
    found = scored(calc, {"calc/__init__.py": SPECIAL})
    assert (found.fail_to_pass, found.pass_to_pass) == (0.5, 1.0)


def test_a_forger_is_named(calc: Codebase) -> None:
    assert "import of _pytest in calc/__init__.py, line 20" in scored(calc, CHEATS["patches pytest"]).reason
    for cheat in (
        "patches pytest",
        "asks its caller",
        "knows the scorer",
        "knows a test that it has seen",
        "equals anything",
    ):
        assert "forged" in run(calc, CHEATS[cheat]).reason


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
               Entry("calc/__pycache__/a.pyc", "file", 1, 0o644, b"a"), Entry("calculus/a.py", "file", 1, 0o644, b"a")]  # fmt: skip
    kept, ignored = taken(small.task(), calc, offered)
    assert [entry.path for entry in kept] == ["calc/a.py", "calc"]
    assert ignored == ("calc/link.py", "calc/tests/a.py", "calc/fifo", "calc/__pycache__/a.pyc", "calculus/a.py")


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
