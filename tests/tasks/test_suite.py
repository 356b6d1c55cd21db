from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.sandbox.box import Entry
from etude.tasks import report_plugin, suite
from etude.tasks.suite import _judged, _messages, entries_of, layers_of, run_tests
from etude.tasks.task import Codebase, Edit
from tests.tasks import small


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


async def outcomes(calc: Codebase, source: str, ids: tuple[str, ...] | None, *, cold: bool = False) -> dict[str, str]:
    async with layers_of(calc.tree, entries_of([Edit("calc/__init__.py", source, None)], "broken")) as layers:
        return dict((await run_tests(calc, layers, ids, cold=cold)).outcomes)


def test_each_test_is_reported_as_it_ended(calc: Codebase) -> None:
    everything = dict.fromkeys(small.FAILING, "failed") | dict.fromkeys(small.PASSING, "passed")
    everything["test_calc.py::test_skipped"] = "skipped"
    assert small.run(outcomes(calc, small.BROKEN, None)) == everything
    assert small.run(outcomes(calc, small.BROKEN, small.PASSING, cold=True)) == dict.fromkeys(small.PASSING, "passed")


def test_a_test_that_computes_for_ever_fails_alone(calc: Codebase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of computing are counted, so that a busy machine changes nothing."""
    order = suite.order_of
    monkeypatch.setattr(
        suite, "order_of", lambda *given, **more: {**order(*given, **more), "limit": 500, "effort": 0.5}
    )
    seen = small.run(outcomes(calc, small.SOLVED.replace('return "calc"', "while True: pass"), calc.ids))
    assert seen == dict.fromkeys(calc.ids, "passed") | {"test_calc.py::test_name": "failed"}


def test_once_a_test_has_computed_for_too_long_others_may_compute_less(monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[float] = []
    kinds = {signal.ITIMER_PROF: granted}
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds, *_: kinds.get(which, []).append(seconds))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    reporter = report_plugin.Reporter({"nonce": "n", "limit": 5.0, "effort": 2.0, "traces": False, "ids": None})
    monkeypatch.setattr(reporter, "say", lambda *_: None)
    for name, ends in {"a": "passed", "b": "late", "c": "passed", "d": "late", "e": "passed"}.items():
        item: Any = SimpleNamespace(nodeid=name)
        protocol = reporter.pytest_runtest_protocol(item)
        next(protocol)
        if ends == "late":
            with pytest.raises(pytest.fail.Exception, match="too long"):
                reporter.too_long()
            reporter.outcomes[name] = "failed"
        with pytest.raises(StopIteration):
            next(protocol)
    assert [seconds for seconds in granted if seconds] == [2.0, 2.0, 0.5, 0.5, 0.5]


def test_tests_and_their_data_cannot_be_changed_while_they_run(tmp_path: Path) -> None:
    """Files may come, also beside them; those that are there stay as they are, whatever is tried."""
    calc = small.codebase(tmp_path, small.TESTS)
    tries = """
import os, shutil
def tried(what, *given):
    try:
        what(*given)
    except OSError as error:
        return
    raise RuntimeError(f"{what} {given}")
tried(open, "test_calc.py", "a")
tried(os.unlink, "test_calc.py")
tried(os.rename, "test_calc.py", "other.py")
tried(os.chmod, "test_calc.py", 0o777)
tried(os.utime, "test_calc.py")
tried(os.link, "test_calc.py", "other.py")
open("other.py", "w").close()
tried(os.rename, "other.py", "test_calc.py")
"""
    assert small.run(outcomes(calc, small.SOLVED + tries, calc.ids)) == dict.fromkeys(calc.ids, "passed")


@pytest.mark.parametrize(("last", "code", "state"), [
    (("end", 0, 1), 0, "complete"), (("end", 0, 1), 1, "tampered"), (("end", 0, 2), 0, "tampered"),
    (("end", 1, 1), 1, "tampered"), (("test", "b", "passed", 0.0, ""), 0, "crash"),
])  # fmt: skip
def test_the_end_must_fit_what_came_before(last: Any, code: int, state: str) -> None:
    assert _judged([("start", "3", "9"), ("test", "a", "passed", 0.0, ""), last], code) == state


def test_only_numbered_lines_with_the_nonce_count() -> None:
    start, end = '["start", "3", "9"]', '["end", 0, 0]'
    out = f"n0 0 {start}\nPASSED\nother 1 {end}\nn0 2 {start}\nn0 1 {end}\nn0 1 {start}\n".encode()
    assert _messages(out, "n0") == [("start", "3", "9"), ("end", 0, 0)]


@pytest.mark.parametrize("said", ["7", "{}", "[]", "x", "9" * 5000, "[" * 100_000, '["end", 0]', '["end", 0, {}]', '["test", "a", [], 0, ""]',
                                  '["test", "a", "passed", "soon", ""]', '["stop"]', '["end", 1e400, 2]', '"\\ud800"', "\0"])  # fmt: skip
def test_what_the_runner_never_says_ends_the_report(said: str) -> None:
    lines = f'n0 0 ["start", "3", "9"]\nn0 1 {said}\nn0 1 ["end", 0, 0]\n'
    assert _messages(lines.encode(), "n0") == [("start", "3", "9")]


def test_files_that_go_and_come(tmp_path: Path) -> None:
    edits = [Edit("a.py", None, "x"), Edit("b.py", "y", None)]
    assert entries_of(edits, "broken") == [Entry("a.py", "gone"), Entry("b.py", "file", 1, 0o644, b"y")]
    assert entries_of(edits, "fixed") == [Entry("a.py", "file", 1, 0o644, b"x"), Entry("b.py", "gone")]


def test_nothing_of_the_product_needs_pytest_itself() -> None:
    code = "import sys; sys.modules['pytest'] = None; import etude.bench.agents, etude.tasks.make, etude.tasks.demos"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert suite.COVERAGE == report_plugin.COVERAGE
