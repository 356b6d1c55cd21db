"""Runs chosen tests with pytest and says how each ended. Installed into the Python of a codebase; imports nothing of Etude.

The order comes on standard input, one JSON line, before any code under test is imported. Reports go to what was standard output,
under another number and each with the order's nonce; what tests print goes to standard error. Code under test shares this
interpreter, so this alone stops accidents and plain forgeries; what stops the rest is on the host (`spoil.py`).
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "/workspace"
COVERAGE = ".etude-coverage.json"
LONGEST_TRACE = 6000
MOST_TRACES = (
    4 << 20
)  # characters of all of them: what a run may print is bounded, and what is beyond would cost it its reports
# Of the seconds a test may compute, once a test has failed for that: who breaks a loop breaks many tests.
LESS_EFFORT = 0.25
FIXED = ("-c", "/dev/null", "--rootdir", ROOT, "--confcutdir", ROOT, "-p", "no:cacheprovider", "--continue-on-collection-errors",
         "-q", "--no-header", "--no-summary", "--tb=short", "--color=no")  # fmt: skip


class Reporter:
    """The plug-in: chooses the tests, bounds the time of each, reports."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.nonce, self.limit, self.traces = order["nonce"], order["limit"], order["traces"]
        self.wanted = set(order["ids"]) if order["ids"] is not None else None
        self.channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100)
        self.count = 0
        self.outcomes: dict[str, str] = {}
        self.effort = self.most_effort = order["effort"]
        self.ran_out = False
        self.trace, self.room = "", MOST_TRACES
        self.cover: Any = None

    def say(self, *words: Any) -> None:
        """Send one line."""
        line = f"{self.nonce} {self.count} {json.dumps(words)}\n".encode()
        self.count += 1
        while line:
            line = line[os.write(self.channel, line) :]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that were asked for."""
        if self.wanted is not None:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say what could not be collected: it explains why tests are absent."""
        if report.failed:
            self.say("broken", report.nodeid, str(report.longrepr)[-LONGEST_TRACE:])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run one test in bounded time, and report it when all its phases are over."""
        began = time.perf_counter()
        self.outcomes.setdefault(item.nodeid, "passed")
        self.trace = ""
        if self.cover:
            self.cover.switch_context(item.nodeid)
        signal.signal(signal.SIGALRM, self.too_long)
        signal.signal(signal.SIGPROF, self.too_long)
        signal.setitimer(signal.ITIMER_REAL, self.limit, 1.0)
        signal.setitimer(signal.ITIMER_PROF, self.effort, 1.0)
        try:
            done = yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self.ran_out and self.outcomes[item.nodeid] == "failed":
            self.effort = LESS_EFFORT * self.most_effort  # the outcome of all is known; which others pass is worth less
        if self.cover:
            self.cover.switch_context("")
        self.say("test", item.nodeid, self.outcomes[item.nodeid], round(time.perf_counter() - began, 4), self.trace)
        return done

    def too_long(self, *_: object) -> None:
        """End the test that runs. Waiting it may take long, as the machine may be crowded; that does not count as computing."""
        self.ran_out = True
        pytest.fail("this test takes too long")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one phase of a test, or one part of it: the worst counts, and an expected failure is no pass."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            if self.traces and not self.trace and self.room > 0:
                self.trace = report.longreprtext[-LONGEST_TRACE:]
                self.room -= len(self.trace)
        elif (report.skipped or hasattr(report, "wasxfail")) and self.outcomes[report.nodeid] == "passed":
            self.outcomes[report.nodeid] = "skipped"


def _covered(cover: Any) -> dict[str, dict[str, list[int]]]:
    """Return the lines of each file that each test ran; those run on import are under no name."""
    cover.stop()
    data = cover.get_data()
    covered: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        tests = covered.setdefault(os.path.relpath(file, ROOT), {})
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                tests.setdefault(context, []).append(line)
    return covered


def main() -> None:
    """Take the order and carry it out."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("no order came on standard input")
    order = json.loads(line)
    reporter = Reporter(order)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    reporter.say("start", sys.version.split()[0], pytest.__version__)
    sys.path[:] = [*order["paths"], *(entry for entry in sys.path if entry not in {"", ROOT})]
    if order["cover"]:
        coverage: Any = importlib.import_module("coverage")  # in the codebase's environment, not in ours
        reporter.cover = coverage.Coverage(data_file=None, include=order["cover"], config_file=False, messages=False)
        reporter.cover.start()
    code = int(pytest.main([*FIXED, *order["options"], *order["files"]], plugins=[reporter]))
    if reporter.cover:
        Path(ROOT, COVERAGE).write_text(json.dumps(_covered(reporter.cover)), encoding="utf-8")
    reporter.say("end", code, len(reporter.outcomes))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
