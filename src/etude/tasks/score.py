"""What an agent's work is worth: its changes to the code, nothing else of it, under the pristine tests, in a fresh sandbox.

Tests, their configuration and whatever Python or pytest would pick up by itself are not taken from the agent, so they
are as they were. What is left out of the agent's changes is told, not punished: real users leave scratch files behind.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from etude.sandbox.box import Entry, SandboxError
from etude.tasks.generators.parsed import is_test_path
from etude.tasks.hide import hide
from etude.tasks.suite import FORMS, entries_of, layers_of, place_of, run_tests, spoilt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.sandbox.box import Place
    from etude.tasks.suite import Ready
    from etude.tasks.task import Task

STARTS_BY_ITSELF = {
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
}
NOT_SOURCE = (".pth", ".pyc", ".pyo", ".so", ".pyd")


@dataclass(frozen=True)
class Score:
    """The outcome, and how much of each list passed. `invalid`: the infrastructure failed, so nothing is known."""

    outcome: Literal["pass", "fail", "invalid"]
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""
    ignored: tuple[str, ...] = ()  # paths the agent changed that were not taken
    seconds: float = 0.0


def visible(task: Task, codebase: Ready) -> list[Entry]:
    """Return how the tree that the agent sees differs from the pristine one: broken, and without the hidden tests."""
    by_file: dict[str, list[str]] = {}
    for function in task.hidden:
        by_file.setdefault(function.partition("::")[0], []).append(function)
    entries = entries_of(task.candidate.edits, "broken")
    for path, functions in sorted(by_file.items()):
        content = hide((codebase.tree / path).read_bytes().decode(), functions).encode()
        entries.append(Entry(path, "file", len(content), 0o644, content))
    return entries


def workspace(codebase: Ready, layer: Path) -> Place:
    """Return the sandbox of an agent, given its tree as a layer: `write_layer(folder, visible(task, codebase), (codebase.tree,))`."""
    return place_of(codebase, (layer,))


def taken(task: Task, codebase: Ready, entries: Sequence[Entry]) -> tuple[list[Entry], tuple[str, ...]]:
    """Return the agent's changes to the code, and the paths of its other changes."""
    solution = {edit.path for edit in task.candidate.edits}
    kept, ignored = [], []
    for entry in entries:
        if entry.kind == "folder":
            continue  # comes with what is in it
        name = entry.path.rpartition("/")[2]
        code = entry.path in solution or any(
            entry.path == place or entry.path.startswith(f"{place}/") for place in codebase.sources
        )
        holds_tests = any(f"{place}/".startswith(f"{entry.path}/") for place in codebase.tests)
        own = (
            is_test_path(entry.path)
            or "/__pycache__/" in entry.path
            or name in STARTS_BY_ITSELF
            or name.endswith(NOT_SOURCE)
        )
        plain = entry.kind == "gone" or (entry.kind == "file" and entry.content is not None)
        if code and plain and not own and not holds_tests:
            kept.append(entry)
        else:
            ignored.append(entry.path)
    return kept, tuple(ignored)


async def score(task: Task, codebase: Ready, entries: Sequence[Entry]) -> Score:
    """Run the tests of a task on the broken tree with an agent's changes (differences from the tree it saw)."""
    changes, ignored = taken(task, codebase, entries)
    tests = [*task.fail_to_pass, *task.pass_to_pass]
    broken = entries_of(task.candidate.edits, "broken")
    try:
        async with layers_of(codebase.tree, broken, changes) as layers:
            run = await run_tests(codebase, layers, tests)
        failing, kept = (len(run.passed(some)) / max(len(some), 1) for some in (task.fail_to_pass, task.pass_to_pass))
        if run.state != "complete" or failing + kept < 2:
            why = (
                run.state
                if run.state != "complete"
                else f"{len(tests) - len(run.passed(tests))} of {len(tests)} tests did not pass"
            )
            return Score("fail", failing, kept, why, ignored, run.wall)
        caught = await _forged(task, codebase, broken, changes)
        return Score("fail" if caught else "pass", failing, kept, caught, ignored, run.wall)
    except SandboxError as error:
        return Score("invalid", reason=str(error), ignored=ignored)


async def _forged(task: Task, codebase: Ready, broken: Sequence[Entry], changes: Sequence[Entry]) -> str:
    """Run the tests again, spoilt, and say which of them are reported as passed all the same."""
    for form in FORMS:
        tests = [test for test in task.fail_to_pass if test not in codebase.unspoilable[form]]
        drawn = random.Random(secrets.randbits(64))  # noqa: S311 - seeded by what nobody can guess
        async with layers_of(codebase.tree, broken, changes, spoilt(codebase.tree, tests, form, drawn)) as layers:
            passed = (await run_tests(codebase, layers, tests)).passed(tests) if tests else []
        if passed:
            return f"reports are forged: {passed[0]} passes with an error in it"
    return ""


async def check(task: Task, codebase: Ready) -> str:
    """Say what is wrong with a task, if anything: the reference must pass, and nothing done must fail every test it should."""
    solved = await score(task, codebase, entries_of(task.candidate.edits, "fixed"))
    if solved.outcome != "pass":
        return f"the reference is scored {solved.outcome}: {solved.reason}"
    idle = await score(task, codebase, [])
    if idle.outcome != "fail" or idle.fail_to_pass > 0:
        return f"doing nothing is scored {idle.outcome}, with {idle.fail_to_pass:.0%} of the failing tests passed"
    return "" if idle.pass_to_pass == 1 else f"doing nothing breaks {1 - idle.pass_to_pass:.0%} of the other tests"
