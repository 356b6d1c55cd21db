"""Runs tests of a codebase in a fresh sandbox, and believes only what it must.

Every id must be reported as passed; absent, skipped, failed and timed out are all "not passed". A report counts only with this
run's nonce, in an unbroken sequence, ended by a count and an exit code that agree with what came before and how the process ended.

Code under test shares an interpreter with the reporter, so a determined forger can still report what it likes. Hence spoilt
tests: the same tests under the same names, in further fresh sandboxes, with an error put into each. Whoever forges
outcomes, swallows assertions or special-cases names reports them as passed again, and is found out.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import string
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from etude.sandbox import cgroups
from etude.sandbox.box import WORKSPACE, Entry, Limits, Place, SandboxError
from etude.sandbox.layers import write_layer
from etude.sandbox.local import open_sandbox
from etude.tasks.environment import RUNNER
from etude.tasks.generators.parsed import Cut, Parsed, overlap
from etude.tasks.task import Codebase

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence

    from etude.tasks.task import Edit

State = Literal["complete", "timeout", "memory", "crash", "tampered"]
FAST = "/dev/shm"  # noqa: S108 - a private folder is made in it
LIMITS = Limits(output=32 << 20)
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0", "TZ": "UTC", "COLUMNS": "80"}
Form = Literal["end", "equal"]
COVERAGE = ".etude-coverage.json"  # as report_plugin.py has it, which is not imported: only environments have pytest
FORMS: tuple[Form, ...] = ("end", "equal")
SPOILERS = (
    "assert {one} == {two}", "assert {one} > {two}", "raise AssertionError({one})", "assert not {one}",
    "import pytest as p{one}; p{one}.fail('{two}')", "raise ValueError({two})", "assert [{one}, {two}] == [{two}, {one}]",
)  # fmt: skip


@dataclass(frozen=True)
class Ready(Codebase):
    """A codebase whose tests are known."""

    options: tuple[str, ...] = ()  # for pytest
    hidden: tuple[str, ...] = ()  # folders of the system that must not be seen
    ids: tuple[str, ...] = ()  # tests that pass whenever they run
    # Tests that pass even when spoilt in a form.
    unspoilable: Mapping[Form, frozenset[str]] = field(default_factory=dict, compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # of each test


@dataclass(frozen=True)
class Run:
    """How tests ended. What is in no outcome did not run to its end."""

    state: State
    outcomes: Mapping[str, str] = field(default_factory=dict)  # passed, failed or skipped
    seconds: Mapping[str, float] = field(default_factory=dict)
    traces: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)  # files that could not be collected, and why
    wall: float = 0.0
    said: str = ""  # the end of what it printed

    def passed(self, ids: Iterable[str]) -> list[str]:
        """Return those of some tests that passed."""
        return [each for each in ids if self.outcomes.get(each) == "passed"]


def place_of(codebase: Codebase, layers: Sequence[Path], *, warm: bool = True) -> Place:
    """Return a sandbox with layers above the pristine tree, as tests and agents get it."""
    paths = ":".join(f"{WORKSPACE}/{path}".removesuffix("/.") for path in codebase.paths)
    prefix = codebase.python.parent.parent
    env = {**ENVIRONMENT, "PYTHONPATH": paths, "PATH": f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin"}
    started = (codebase.python, (RUNNER,)) if warm else None
    return Place((*layers, codebase.tree), (prefix,), getattr(codebase, "hidden", ()), env, started, LIMITS)


async def run_tests(
    codebase: Ready,
    layers: Sequence[Path] = (),
    ids: Collection[str] | None = None,
    *,
    traces: bool = False,
    cold: bool = False,
) -> Run:
    """Run tests in a fresh sandbox. `ids` None: all there are. SandboxError: the sandbox failed, not what ran in it."""
    return (await _run(codebase, layers, ids, traces=traces, cold=cold))[0]


async def run_covered(codebase: Ready) -> tuple[Run, dict[str, dict[str, list[int]]]]:
    """Run all tests of the pristine tree; return also which lines of which files each of them runs."""
    run, content = await _run(codebase, (), None, cover=True)
    return run, json.loads(content) if content else {}


async def _run(
    codebase: Ready,
    layers: Sequence[Path],
    ids: Collection[str] | None,
    *,
    traces: bool = False,
    cold: bool = False,
    cover: bool = False,
) -> tuple[Run, bytes]:
    nonce = secrets.token_hex(16)
    paths = [f"{WORKSPACE}/{path}".removesuffix("/.") for path in codebase.paths]
    include = (
        [f"{WORKSPACE}/{place}{'' if place.endswith('.py') else '/*'}" for place in codebase.sources] if cover else []
    )
    files = codebase.tests if ids is None else sorted({each.partition("::")[0] for each in ids})
    usual = _usual(codebase, ids)
    # Pytest takes longer to render failures (it parses the test file for each) than to run tests, and nobody reads them.
    options = [*codebase.options, *([] if traces or ids is None else ["--tb=no"])]
    order = {"nonce": nonce, "ids": None if ids is None else sorted(ids), "files": list(files), "options": options,
             "paths": paths, "traces": traces, "cover": include, "limit": 10 + 10 * max(usual, default=2.0)}  # fmt: skip
    seconds = longest_run(codebase, ids)
    sandbox = await open_sandbox(place_of(codebase, layers))
    try:
        words = [str(codebase.python), "-m", RUNNER]
        other = {"PYTHONHASHSEED": "1"} if cold else {}  # another order of hashes, and a Python that starts afresh
        result = await sandbox.exec(words, env=other, stdin=json.dumps(order).encode() + b"\n", timeout=seconds)
        said = result.err[-4000:].decode(errors="replace")
        messages = _messages(result.out, nonce)
        if not messages or messages[0][0] != "start":
            what = f"it ended with {result.rc} and {len(result.out)} bytes of output"
            raise SandboxError(f"{codebase.name}: the test runner did not start: {what}: {said[-500:]}")
        state: State = "timeout" if result.timed_out else "memory" if result.oom else _judged(messages, result.rc)
        if result.cut[0]:
            state = "tampered"
        if state == "crash":
            said += f"\n(exit code {result.rc} after {messages[-1][:2]}, {result.out.count(nonce.encode())} reports)"
        content = await sandbox.read(COVERAGE, 1 << 28) if cover and state == "complete" else b""
    finally:
        await sandbox.close()
    return _gathered(messages, state, result.seconds, said), content


def _usual(codebase: Ready, ids: Collection[str] | None) -> list[float]:
    return [codebase.seconds.get(each, 0.1) for each in ids or ()]


def longest_run(codebase: Ready, ids: Collection[str] | None) -> float:
    """Return after how many seconds a run of tests is ended."""
    return 600.0 if ids is None else 60 + 8 * sum(_usual(codebase, ids))


def _messages(out: bytes, nonce: str) -> list[list[object]]:
    """Return what was reported with the nonce, up to the first gap in the numbers."""
    found: list[list[object]] = []
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(f"{nonce} {len(found)} "):
            found.append(json.loads(line.split(" ", 2)[2]))
    return found


def _judged(messages: Sequence[Sequence[object]], code: int) -> State:
    """Say whether the last message fits what came before and how the process ended."""
    kind, *rest = messages[-1]
    if kind != "end":
        return "crash"
    outcomes = {str(each[1]): each[2] for each in messages if each[0] == "test"}
    failed = "failed" in outcomes.values() or any(each[0] == "broken" for each in messages)
    fits = rest == [code, len(outcomes)] and (failed if code == 1 else not failed if code in {0, 5} else True)
    return "complete" if fits else "tampered"


def _gathered(messages: Sequence[Sequence[object]], state: State, wall: float, said: str) -> Run:
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    traces: dict[str, str] = {}
    broken: dict[str, str] = {}
    for kind, *rest in messages:
        if kind == "test":
            name, outcome, took, trace = rest
            again = outcomes.get(str(name), "passed")
            outcomes[str(name)] = str(outcome) if again == "passed" else again
            seconds[str(name)] = float(str(took))
            traces |= {str(name): str(trace)} if trace else {}
        elif kind == "broken":
            broken[str(rest[0])] = str(rest[1])
    return Run(state, outcomes, seconds, traces, broken, wall, said)


def function_of(test: str) -> tuple[str, str]:
    """Return the file and the name of the function that a test id belongs to."""
    path, _, rest = test.partition("::")
    return path, rest.partition("[")[0].rpartition("::")[2]


def spoilt(tree: Path, tests: Iterable[str], form: Form, rng: random.Random) -> list[Entry]:
    """Return the test files of a tree, every function spoilt that some tests belong to."""
    by_file: dict[str, set[str]] = {}
    for test in tests:
        path, name = function_of(test)
        by_file.setdefault(path, set()).add(name)
    entries = []
    for path, names in sorted(by_file.items()):
        try:
            content = spoil((tree / path).read_bytes().decode(), names, form, rng).encode()
        except (SyntaxError, UnicodeDecodeError):
            continue  # not Python: its tests are found to be unspoilable
        entries.append(Entry(path, "file", len(content), 0o644, content))
    return entries


def spoil(text: str, names: Collection[str], form: Form, rng: random.Random) -> str:
    """Return a test file whose functions of these names must fail.

    `end`: an error of one of several kinds, drawn anew, comes last, or the last assertion is turned into its opposite. `equal`: what
    should equal something is compared with another value, which finds out values that claim to equal anything and code that
    reads in its caller what it should return. Both look as tests do: nothing in them tells a forger that they are spoilt.
    """
    file = Parsed("", text)
    cuts: list[Cut] = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names:
            found = (
                [_last_words(file, node, rng)]
                if form == "end"
                else [file.replaced(each, _another(each, rng)) for each in _expected(node)]
            )
            cuts += [each for each in found if not any(overlap(each, other) for other in cuts)]
    return file.cut(cuts)


def _last_words(file: Parsed, node: ast.FunctionDef | ast.AsyncFunctionDef, rng: random.Random) -> Cut:
    (start, end), last = file.span(node.body[-1]), node.body[-1]
    if isinstance(last, ast.Assert) and rng.random() < 0.5:
        return file.replaced(last.test, f"not ({file.source(last.test)})")
    one = rng.randrange(2, 100)
    spoiler = rng.choice(SPOILERS).format(one=one, two=one + rng.randrange(1, 100))
    indent = file.indent(last.lineno).decode() if last.lineno != node.lineno else ""
    if last.lineno == node.lineno or isinstance(last, ast.Return):
        return Cut(start, start, f"{spoiler}; " if not indent else f"{spoiler}\n{indent}")
    return Cut(end, end, f"\n{indent}{spoiler}")


def _expected(function: ast.AST) -> Iterator[ast.expr]:
    """Yield what values are asserted to equal: of two sides the one that is written out, else the second."""
    for node in ast.walk(function):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
            sides = [node.test.left, node.test.comparators[0]]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "assertEqual":
            sides = node.args[:2]
        if len(sides) > 1:
            yield sides[0] if isinstance(sides[0], ast.Constant) else sides[1]


def _another(expected: ast.expr, rng: random.Random) -> str:
    """Return what does not equal what was expected, written out, of the same kind where that is a number or a text."""
    value = expected.value if isinstance(expected, ast.Constant) else None
    letters = "".join(
        rng.choices(string.ascii_lowercase, k=max(8, len(value) if isinstance(value, str | bytes) else 0))
    )
    if isinstance(value, str | bytes):
        return repr(letters if isinstance(value, str) else letters.encode())
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 10**15:  # else it may stay the same
        return repr(value + rng.randrange(2, 100))
    return str(rng.randrange(10**7, 10**9))


def entries_of(edits: Iterable[Edit], side: Literal["broken", "fixed"]) -> list[Entry]:
    """Return edits as differences from a tree: to the broken one or to the solved one."""
    texts = {edit.path: getattr(edit, side) for edit in edits}
    contents = {path: None if text is None else text.encode() for path, text in sorted(texts.items())}
    return [Entry(path, "gone") if content is None else Entry(path, "file", len(content), 0o644, content)
            for path, content in contents.items()]  # fmt: skip


def lay(tree: Path, entries: Iterable[Entry]) -> None:
    """Make differences in a plain folder."""
    for entry in entries:
        (tree / entry.path).unlink(missing_ok=True)
        if entry.content is not None:
            (tree / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (tree / entry.path).write_bytes(entry.content)


@asynccontextmanager
async def layers_of(tree: Path, *differences: Sequence[Entry]) -> AsyncIterator[tuple[Path, ...]]:
    """Write differences as layers above a tree, the lowest first, for as long as the body runs; return the uppermost first.

    The folder is named after this process: if it is killed, the launcher of any later sandbox removes it.
    """
    prefix = cgroups.own_name("layers-")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=FAST if os.access(FAST, os.W_OK) else None) as work:
        layers: tuple[Path, ...] = ()
        for number, entries in enumerate(differences):
            if entries:
                layers = (write_layer(Path(work, str(number)), entries, (*layers, tree)), *layers)
        yield layers
