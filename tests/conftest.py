"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import hypothesis
import pytest

from etude.cli.main import main
from etude.progress import Reporter
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes is the machine's affair: a slow disk must not fail a test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


TESTS = Path(__file__).parent
FOUNDATION = "foundation"  # tests of src/etude/*.py, of the layers and of the pages


def pytest_configure(config: pytest.Config) -> None:
    """Register one mark a layer, so that `pytest -m rl` runs the tests of one."""
    for layer in [FOUNDATION, *(folder.name for folder in TESTS.iterdir() if (folder / "__init__.py").exists())]:
        config.addinivalue_line("markers", f"{layer}: the tests in tests/{layer}/ (set from the folder)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the layer whose folder it is in."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(FOUNDATION if folder.endswith(".py") else folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Take two processes more than there are cores, four at most: half of the time a test waits for processes that it has started or killed."""
    return min(4, (os.cpu_count() or 1) + 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Give each process that shares the tests one core: threads of torch that wait for each other cost more than they bring."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say what failed also where pytest itself breaks down: it then leaves its summary out."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if (
        reporter
        and getattr(reporter, "_session", None)
        and reporter._session.exitstatus == pytest.ExitCode.INTERNAL_ERROR
    ):
        for report in [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]:
            reporter.write_line(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what a test recorded as its summary: the size of the package, wherever that test ran."""
    for report in [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]:
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights; read-only for tests."""
    return tiny.save_model(tmp_path_factory.mktemp("bases") / "tiny")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch: two that wait for each other cost more than they bring."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def code_tree(tmp_path: Path) -> Path:
    """A small source tree, a test's own."""
    return tiny.write_tree(tmp_path / "code")


@pytest.fixture
def quiet() -> Reporter:
    """A reporter that shows nothing."""
    return Reporter(quiet=True)


@dataclass(frozen=True)
class Said:
    """What a command did."""

    code: int
    out: str
    err: str


class Etude(Protocol):
    """Runs the command line in this process."""

    def __call__(self, *words: object) -> Said: ...


@pytest.fixture
def etude(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Etude:
    """Run `etude …` as the shell would, and return its exit code and what it printed."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # which it sets, for its workers; it is as before when the test is over

    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["etude", *map(str, words)])
        with pytest.raises(SystemExit) as leaving:
            main()
        captured = capsys.readouterr()
        return Said(int(leaving.value.code or 0), captured.out, captured.err)

    return call
