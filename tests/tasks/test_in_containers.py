"""A codebase of ours in a container: its environment is this machine's, seen at its own path; PODMAN_IMAGE names an image."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from etude.sandbox.images import settled
from etude.tasks.score import score
from etude.tasks.suite import entries_of, layers_of, run_tests
from etude.tasks.task import Edit
from tests.tasks import small


@pytest.mark.slow
def test_tests_run_and_scores_are_those_of_namespaces(tmp_path: Path) -> None:
    image = os.environ.get("PODMAN_IMAGE", "")
    if not image or not shutil.which("podman"):
        pytest.skip("podman is not installed, or PODMAN_IMAGE names no image of it")
    calc = replace(small.codebase(tmp_path), sandbox=settled(f"podman:{image}"))
    task = small.task()

    async def tried() -> None:
        async with layers_of(calc.tree, entries_of([Edit("calc/__init__.py", small.BROKEN, None)], "broken")) as layers:
            seen = (await run_tests(calc, layers)).outcomes
        assert seen | {"test_calc.py::test_skipped": "skipped"} == {
            **dict.fromkeys(small.FAILING, "failed"), **dict.fromkeys(small.PASSING, "passed"), "test_calc.py::test_skipped": "skipped",
        }  # fmt: skip
        assert (await score(task, calc, entries_of(task.candidate.edits, "fixed"))).outcome == "pass"
        assert (await score(task, calc, [])).outcome == "fail"

    small.run(tried())
