"""A small codebase with its tests and a Python to run them, without an index: packages are copied from the one that runs this."""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib.metadata
import os
import shutil
import tempfile
import zipfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from etude.errors import UserError
from etude.sandbox import probe
from etude.sandbox.layers import prepare
from etude.tasks.codebase import PackageSettings, with_environment
from etude.tasks.task import Candidate, Codebase, Edit, Span, Task

Value = TypeVar("Value")
COPIED = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "coverage")

SOLVED = '''"""Sums."""


def total(values):
    """Return the sum of values."""
    result = 0
    for value in values:
        result += value
    return result


def mean(values):
    """Return the mean."""
    return total(values) / len(values)


def name():
    return "calc"
'''
BROKEN = SOLVED.replace("result += value", "result = value")
TESTS = """import unittest

import pytest

from calc import mean, name, total


@pytest.mark.parametrize("values", [[1, 2], [3, 4, 5]])
def test_total(values):
    assert total(values) == sum(values)


def test_mean():
    assert mean([2, 4]) == 3


def test_name():
    assert name() == "calc"


def test_one():
    assert total([7]) == 7


@pytest.mark.skip(reason="never")
def test_skipped():
    raise AssertionError


class TestOld(unittest.TestCase):
    def test_total_of_three(self):
        self.assertEqual(total([1, 1, 1]), 3)
"""
FAILING = ("test_calc.py::TestOld::test_total_of_three", "test_calc.py::test_mean", "test_calc.py::test_total[values0]",
           "test_calc.py::test_total[values1]")  # fmt: skip
PASSING = ("test_calc.py::test_name", "test_calc.py::test_one")


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """Run asynchronous work, or skip the test where no sandbox can be made."""

    async def guarded() -> Value:
        try:
            await probe.strongest()
        except UserError as error:
            work.close()
            pytest.skip(str(error))
        return await work

    return asyncio.run(guarded())


@functools.lru_cache(maxsize=1)
def wheels() -> Path:
    """Return a folder with wheels of what tests need, zipped from what is installed here: pip needs no index then."""
    folder = Path(tempfile.mkdtemp(prefix="etude-test-wheels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in COPIED:
        found = importlib.metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name}-{found.version}-py3-none-any.whl", "w") as wheel:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    wheel.write(str(found.locate_file(file)), str(file))
    return folder


def offline() -> dict[str, str]:
    """Return settings that make pip install from the wheels alone."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels()), "PIP_CONFIG_FILE": os.devnull}


@functools.lru_cache(maxsize=1)
def cache() -> Path:
    """Return a cache for all tests of this process: making a Python takes ten seconds."""
    folder = Path(tempfile.mkdtemp(prefix="etude-test-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.lru_cache(maxsize=1)
def environment() -> Codebase:
    """Return a codebase that has a Python with pytest."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in offline().items():
            patch.setenv(name, value)
        return with_environment(Codebase("calc", "1", "", cache(), (), ()), PackageSettings(folder="calc"), cache())


def python() -> Path:
    return environment().python


def write(folder: Path, tests: str = TESTS) -> Path:
    """Write the solved tree of `calc`, flat."""
    (folder / "calc").mkdir(parents=True)
    (folder / "calc" / "__init__.py").write_text(SOLVED, encoding="utf-8")
    (folder / "test_calc.py").write_text(tests, encoding="utf-8")
    (folder / "LICENSE").write_text("MIT", encoding="utf-8")
    return folder


def codebase(folder: Path, tests: str = TESTS) -> Codebase:
    """Return the codebase `calc`, its tests known."""
    prepare(write(folder / "written", tests), folder / "tree")
    ids = tuple(sorted((*FAILING, *PASSING)))
    return Codebase("calc", "1", "0" * 64, folder / "tree", ("calc",), ("test_calc.py",), python(), licence="MIT", ids=ids,
                 installed=environment().installed, seconds=dict.fromkeys(ids, 0.01))  # fmt: skip


def task() -> Task:
    """Return a task of `calc`: every total is its last value; two failing functions are hidden."""
    candidate = Candidate(
        "mutation",
        ("augmented",),
        (Edit("calc/__init__.py", BROKEN, SOLVED),),
        (Span("calc/__init__.py", 8, 8, "total"),),
    )
    hidden = ("test_calc.py::TestOld::test_total_of_three", "test_calc.py::test_mean")
    return Task(
        "calc-1",
        "calc",
        "1",
        candidate,
        {"terse": "sums are wrong"},
        FAILING,
        PASSING,
        hidden,
        "debugging",
        {"lines": 1, "files": 1},
        0.1,
    )
