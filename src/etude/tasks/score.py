"""What an agent's work is worth: its changes to the code, nothing else of it, under the pristine tests, in a fresh sandbox.

Tests, their configuration and whatever Python or pytest would pick up by itself are not taken from the agent, so they
are as they were. What is left out of the agent's changes is told, not punished: real users leave scratch files behind.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from etude.sandbox.box import Entry, SandboxError
from etude.tasks.generators.parsed import is_test_path
from etude.tasks.hide import hide
from etude.tasks.suite import FORMS, entries_of, layers_of, longest_run, place_of, run_tests, spoilt
from etude.tasks.suspect import suspicious

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from etude.sandbox.box import Place
    from etude.tasks.suite import Form, Ready
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
How = Literal["run", "known", "idle"]
OPENING = 30.0  # seconds for the sandboxes of one scoring, on a busy machine
MOST_BYTES = 4 << 20  # of a file that is taken: it is written anew for every run of the tests, into memory


@dataclass(frozen=True)
class Score:
    """The outcome, and how much of each list passed. `invalid`: the infrastructure failed, so nothing is known."""

    outcome: Literal["pass", "fail", "invalid"]
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""
    ignored: tuple[str, ...] = ()  # paths the agent changed that were not taken
    seconds: float = 0.0
    how: How = "run"  # it was found: by tests, by those of the same change before, or as nothing was changed (known.py)


def visible(task: Task, codebase: Ready) -> list[Entry]:
    """Return how the tree that the agent sees differs from the pristine one: broken, and without the hidden tests."""
    by_file: dict[str, list[str]] = {}
    for function in task.hidden:
        by_file.setdefault(function.partition("::")[0], []).append(function)
    entries = entries_of(task.candidate.edits, "broken")
    for path, functions in sorted(by_file.items()):
        content = _without((codebase.tree / path).read_bytes(), tuple(functions))
        entries.append(Entry(path, "file", len(content), 0o644, content))
    return entries


@lru_cache(maxsize=512)  # every attempt at a task asks for it, and it takes as long as opening a sandbox
def _without(tests: bytes, functions: tuple[str, ...]) -> bytes:
    return hide(tests.decode(), functions).encode()


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
        plain = entry.kind == "gone" or (
            entry.kind == "file" and entry.content is not None and len(entry.content) <= MOST_BYTES
        )
        if code and plain and not own and not holds_tests:
            kept.append(entry)
        else:
            ignored.append(entry.path)
    return kept, tuple(ignored)


async def score(task: Task, codebase: Ready, entries: Sequence[Entry]) -> Score:
    """Judge an agent's changes (differences from the tree it saw): read them, then run the tests of the task on them."""
    changes, ignored = taken(task, codebase, entries)
    reason = await asyncio.to_thread(forbidden, task, codebase, changes)
    return Score("fail", reason=reason, ignored=ignored) if reason else await tried(task, codebase, changes, ignored)


def forbidden(task: Task, codebase: Ready, changes: Iterable[Entry]) -> str:
    """Say what in an agent's changes reaches for the tests, if anything does that neither the file nor the solution had."""
    solution = [
        text.encode() for edit in task.candidate.edits for text in (edit.broken, edit.fixed) if text is not None
    ]
    for entry in changes:
        if entry.content is not None and entry.path.endswith(".py"):
            before = codebase.tree / entry.path
            known = [*solution, *([before.read_bytes()] if before.is_file() else [])]
            if reason := suspicious(entry.path, entry.content, known):
                return reason
    return ""


async def tried(task: Task, codebase: Ready, changes: Sequence[Entry], ignored: tuple[str, ...] = ()) -> Score:
    """Run the tests of a task on the broken tree with changes, plain and spoilt. Which comes first is drawn: nothing tells it.

    What fails plain has failed, so no more is run: nobody can cheat by failing, and that a plain run was the last is known only
    when it is over. But it cannot always be the first, to save the rest: code can tell the time since it was written, so it would
    forge in the first run and be honest in the others.

    In one of the spoilt runs only tests are spoilt that the agent never saw: comparing the others with what it saw tells nothing.
    """
    drawn = random.Random(secrets.randbits(64))  # noqa: S311 - seeded by what nobody can guess
    spoilings = list(zip(drawn.sample(FORMS, len(FORMS)), drawn.sample([False, True], 2), strict=True))
    early = drawn.randrange(2)
    try:
        caught = await _forged(task, codebase, changes, spoilings[:early], drawn)
        plain = await _plain(task, codebase, changes, ignored)
        if plain.outcome != "pass":  # a wrong result may be what a spoilt test asks for
            return plain
        caught = caught or await _forged(task, codebase, changes, spoilings[early:], drawn)
        return replace(plain, outcome="fail", reason=caught) if caught else plain
    except SandboxError as error:
        return Score("invalid", reason=str(error), ignored=ignored)


def longest_scoring(task: Task, codebase: Ready) -> float:
    """Return after how many seconds scoring has ended, unless the machine hangs: every run at its limit, and time to open them."""
    ids = [*task.fail_to_pass, *task.pass_to_pass]
    return longest_run(codebase, ids) + len(FORMS) * longest_run(codebase, task.fail_to_pass) + OPENING


async def _plain(task: Task, codebase: Ready, changes: Sequence[Entry], ignored: tuple[str, ...]) -> Score:
    tests = [*task.fail_to_pass, *task.pass_to_pass]
    async with layers_of(codebase.tree, entries_of(task.candidate.edits, "broken"), changes) as layers:
        run = await run_tests(codebase, layers, tests)
    failing, kept = (len(run.passed(some)) / max(len(some), 1) for some in (task.fail_to_pass, task.pass_to_pass))
    missed = len(tests) - len(run.passed(tests))
    why = run.state if run.state != "complete" else f"{missed} of {len(tests)} tests did not pass" if missed else ""
    return Score("fail" if why else "pass", failing, kept, why, ignored, run.wall)


async def _forged(
    task: Task, codebase: Ready, changes: Sequence[Entry], spoilings: Iterable[tuple[Form, bool]], drawn: random.Random
) -> str:
    """Run spoilt tests, all that fail or only those hidden from the agent, and say which is reported as passed all the same."""
    broken = entries_of(task.candidate.edits, "broken")
    for form, hidden_only in spoilings:
        tests = [test for test in task.fail_to_pass if test not in codebase.unspoilable[form]]
        hidden = [test for test in tests if test.partition("[")[0] in task.hidden]
        tests = hidden if hidden_only and hidden else tests
        async with layers_of(codebase.tree, broken, changes, spoilt(codebase.tree, tests, form, drawn)) as layers:
            passed = (await run_tests(codebase, layers, task.fail_to_pass)).passed(tests) if tests else []
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
