"""A set of two tasks of the small package `calc`, as a manifest with all it needs in a cache: no index is asked."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import asdict
from pathlib import Path

from etude.files import digest_of
from etude.progress import Reporter
from etude.tasks.codebase import PackageSettings, unpack, with_environment
from etude.tasks.manifest import TaskSet, codebase_row, load_set, task_row, write_set
from etude.tasks.task import Candidate, Edit, Span
from tests.tasks import small

PINS = ("pytest==0",)  # never installed: the environment is there already
NAMELESS = small.SOLVED.replace('    return "calc"\n', '    return ""\n')


def write(folder: Path) -> tuple[Path, Path]:
    """Write the set; return its manifest and the cache."""
    cache, reporter = folder / "cache", Reporter(quiet=True)
    key = digest_of([f"{sys.version_info.major}.{sys.version_info.minor}", True, list(PINS)])[:16]
    (cache / "environments").mkdir(parents=True)
    (cache / "environments" / key).symlink_to(small.python().parent.parent)
    settings = PackageSettings(folder=str(small.write(folder / "calc")), licence="MIT")
    found = unpack(settings, cache, reporter)
    ids = tuple(sorted((*small.FAILING, *small.PASSING)))
    calc = dataclasses.replace(with_environment(found, settings, cache, PINS), ids=ids, installed=PINS,
                               seconds=dict.fromkeys(ids, 0.01))  # fmt: skip
    total = dataclasses.replace(
        small.task(),
        version=calc.version,
        prompts={"terse": "sums are wrong", "premise": "bug in name: sums are wrong"},
    )
    edit = Edit("calc/__init__.py", NAMELESS, small.SOLVED)
    name = dataclasses.replace(
        total, id="calc-2", candidate=Candidate("deletion", ("body",), (edit,), (Span(edit.path, 17, 17, "name"),)), category="new feature",
        fail_to_pass=("test_calc.py::test_name",), pass_to_pass=tuple(each for each in ids if each != "test_calc.py::test_name"),
        hidden=("test_calc.py::test_name",), prompts={"terse": "name() says nothing"},
    )  # fmt: skip
    rows = [task_row(each, calc) for each in (total, name)]
    write_set(folder / "calc.jsonl", {"name": "calc"}, [codebase_row(calc, settings)], rows)
    assert asdict(load(folder / "calc.jsonl", cache).tasks[0].candidate) == asdict(total.candidate)
    return folder / "calc.jsonl", cache


def load(manifest: Path, cache: Path) -> TaskSet:
    return load_set(manifest, cache, Reporter(quiet=True))
