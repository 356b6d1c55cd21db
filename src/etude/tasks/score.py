"""Scores an agent's changes: only its changes to the code count, tested by the original tests in a fresh sandbox.

Tests, their configuration and files that Python or pytest load by themselves are not taken from the agent: the originals are used.
Other files that the agent changed are ignored and listed, without a penalty: real users leave scratch files behind, too.

Code under test shares an interpreter with the program that reports results, so it could forge reports. Therefore the tests are run
several times, and in each run some of the hidden tests have wrong expectations (`spoil.py`). Only this process knows which; nothing
else differs between runs. Code that passes a test with a wrong expectation has forged its report.

Before any run, changed code is searched for suspicious constructs: imports of test tools, frames and traces, tables of the
interpreter, code built from text, ways to end or fork the process, replaced functions of the standard library, and texts that name
any of these. What the file contained before, or what the reference solution uses, is allowed. The search is easily evaded (names put
together at run time, a module imported from another file); it gives a clear reason for plain cheats and makes the others longer.
docs/benchmark.md lists the attacks that remain possible.

Two cases need no test run: code without changes, and changes that were scored before (`Scores`). Groups of attempts at one task, in
training and benchmarks, often leave the same code behind, so it is scored once, and attempts that arrive meanwhile wait for that
score. Flaky tests were removed when tasks were validated; a cheat has one draw for all attempts that contain it, which is no worse
than one draw each. Failures of the infrastructure are never stored.
"""

from __future__ import annotations

import ast
import asyncio
import random
import re
import secrets
import sys
import tomllib
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Literal

from etude.files import digest_of
from etude.sandbox.box import Entry, SandboxError
from etude.syntax import parse_python
from etude.tasks.commanded import own, rewritten, spoilt_tests
from etude.tasks.generators.languages import emptied
from etude.tasks.generators.parsed import is_test_path
from etude.tasks.seal import hide
from etude.tasks.suite import Run, entries_of, file_entry, layers_of, longest_run, run_tests
from etude.tasks.task import Codebase, Task, function_of
from etude.work import cores

FORBIDDEN = tomllib.loads(Path(__file__).with_name("forbidden.toml").read_text(encoding="utf-8"))
NAMES, ATTRIBUTES, MODULES = (frozenset(FORBIDDEN[kind]) for kind in ("names", "attributes", "modules"))
PARTS = {module: re.compile(parts) for module, parts in FORBIDDEN["parts"].items()}
INNER = "|".join(sorted(ATTRIBUTES))
TEXTS = re.compile(rf"(?i)pytest|unittest|/workspace|/proc\b|etude|conftest|\btest_|\b(?:{INNER})\b")
# Files that Python or pytest would pick up by themselves, or that are no source.
CONFIGURES = r"(site|user)customize\.py|\.?pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml"
NOT_TAKEN = re.compile(rf"(?s){CONFIGURES}|.*\.(pth|pyc|pyo|so|pyd)")
How = Literal["run", "known", "idle"]
FEWEST_RUNS, MOST_RUNS = 3, 5
OTHER_RUNS = 2  # of other languages, where each run is a build
OPENING = 30.0  # seconds for the sandboxes of one scoring, on a busy machine
# Of a file that is taken, of all: they are written anew for every run, into memory.
MOST_BYTES, MOST_LEFT = 4 << 20, 64 << 20
MOST_FILES, LONGEST_PATH = 5_000, 1_000  # taken; bytes
LONGEST_NAME = 5  # dots
MOST_READ = 1 << 20  # bytes of code that is new: its syntax tree takes hundreds of times as much memory, and a minute
MOST_REMEMBERED = 20_000  # changes: a few megabytes, or 30 if all fail with much to say
SHOWN_TESTS, SHOWN = 2, 800  # failing tests whose output is kept, for people to read; characters of each


def findings(content: bytes) -> dict[str, int]:
    """Return the suspicious constructs of a file, each with its first line; none for a file that is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            tree = parse_python(content)  # bytes: in the encoding that Python would take
        uses = sorted((line, what) for what, line in _Reader(tree).read())
    except (SyntaxError, ValueError):
        return {}
    except (RecursionError, MemoryError):
        return {"what is nested too deeply to be read": 1}
    first = {what: line for line, what in reversed(uses)}
    return dict(sorted(first.items(), key=lambda each: each[1]))


class _Reader:
    """Finds suspicious constructs in one file. Names are resolved by its imports, aliases included."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.known: dict[int, set[str]] = {}  # of an attribute, by its id
        self.stands_for: dict[str, set[str]] = {}  # by a name of this file; several, if it is imported several times
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    own = alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
                    self.stands_for.setdefault(alias.asname or own, set()).add(_full(node, alias))

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield what is suspicious, and its line."""
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        loose = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in self.nodes:
            uses: Iterable[str] = ()
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in loose:
                text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
                uses = [f"the text {each.lower()!r}" for each in TEXTS.findall(text)]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [_full(node, alias) for alias in node.names]
                parts = isinstance(node, ast.ImportFrom)
                watched = [n for n in names if n.partition(".")[0] in MODULES or (parts and _watched(n, whole=False))]
                uses = [f"import of {name}" for name in watched]
            elif isinstance(node, ast.Name | ast.Attribute):
                uses = self._used(node, whole=id(node) not in inner)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"setattr", "delattr", "vars"}:
                uses = [f"a change of {n}" for each in node.args[:1] for n in self._names(each) if _standard(n)]
            yield from ((what, getattr(node, "lineno", 1)) for what in uses)

    def _used(self, node: ast.Name | ast.Attribute, *, whole: bool) -> Iterator[str]:
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        if isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        for name in self._names(node):
            if _watched(name, whole=whole):
                yield ".".join(name.split(".")[:2])
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _standard(name):
                yield f"a change of {name}"

    def _names(self, node: ast.expr) -> set[str]:
        """Return the full names that an expression may refer to, if it begins with an import; long names are cut."""
        if isinstance(node, ast.Attribute):
            if id(node) not in self.known:  # every part of a.b.c asks for all before it
                names = self._names(node.value)
                short = {name for name in names if name.count(".") < LONGEST_NAME}
                self.known[id(node)] = (names - short) | {f"{name}.{node.attr}" for name in short}
            return self.known[id(node)]
        return self.stands_for.get(node.id, set()) if isinstance(node, ast.Name) else set()


def _full(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the full name that an import binds. A watched module imported from another file counts as that module."""
    if isinstance(node, ast.Import):
        return alias.name if alias.asname else alias.name.partition(".")[0]
    handed_on = node.level and alias.name in {*MODULES, *PARTS}
    return alias.name if handed_on else f"{'.' * node.level}{node.module or ''}.{alias.name}"


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _watched(name: str, *, whole: bool) -> bool:
    """Whether a part of a module is suspicious. `whole`: the module itself is used as a value, which is suspicious, too."""
    module, part = (*name.split("."), "")[:2]
    if module not in PARTS or not part:
        return module in PARTS and whole
    return part == "*" or PARTS[module].fullmatch(part) is not None


@dataclass(frozen=True)
class Score:
    """The outcome, and how much of each list passed. `invalid`: the infrastructure failed, so nothing is known."""

    outcome: Literal["pass", "fail", "invalid"]
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""
    ignored: tuple[str, ...] = ()  # paths the agent changed that were not taken
    seconds: float = 0.0
    how: How = "run"  # by tests, by those of the same change before, or as nothing was changed
    said: dict[str, str] = field(default_factory=dict)  # the end of what the first failing tests printed, for people


def visible(task: Task, codebase: Codebase) -> list[Entry]:
    """Return the differences of the tree that the agent sees from the original: broken code, no hidden tests."""
    entries = entries_of(task.candidate.edits, "broken")
    if codebase.command:
        return [*entries, *rewritten(codebase, task.hidden, emptied)]
    for path in sorted({function.partition("::")[0] for function in task.hidden}):
        functions = tuple(function for function in task.hidden if function.partition("::")[0] == path)
        entries.append(file_entry(path, _without((codebase.tree / path).read_bytes(), functions)))
    return entries


@lru_cache(maxsize=512)  # every attempt at a task asks for it, and it takes as long as opening a sandbox
def _without(tests: bytes, functions: tuple[str, ...]) -> str:
    return hide(tests.decode(), functions)


def taken(task: Task, codebase: Codebase, entries: Sequence[Entry]) -> tuple[list[Entry], tuple[str, ...]]:
    """Return the agent's changes to the code, and the paths of its other changes."""
    places = {*codebase.sources, *(edit.path for edit in task.candidate.edits)}
    inside = tuple(f"{place}/" for place in codebase.sources)
    changes, ignored, room = list[Entry](), list[str](), MOST_LEFT
    for entry in entries:
        path, size = entry.path, len(entry.content or b"")
        name = path.encode(errors="backslashreplace").decode()  # one that is no text cannot be written into a result
        if entry.kind == "folder":
            continue  # comes with what is in it
        code = (path in places or path.startswith(inside)) and own(codebase, path)
        fits = size <= min(MOST_BYTES, room) and len(name.encode()) <= LONGEST_PATH and len(changes) < MOST_FILES
        plain = fits and name == path and (entry.kind == "gone" or (entry.kind == "file" and entry.content is not None))
        test = is_test_path(path) or any(f"{place}/".startswith(f"{path}/") for place in codebase.tests)
        if code and plain and not (test or "/__pycache__/" in path or NOT_TAKEN.fullmatch(path.rpartition("/")[2])):
            changes.append(entry)
            room -= size
        else:
            ignored.append(name)
    return changes, tuple(ignored)


async def score(task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
    """Judge an agent's changes (differences from the tree it saw): read them, then run the tests of the task on them."""
    changes, ignored = taken(task, codebase, entries)
    reason = await asyncio.to_thread(forbidden, task, codebase, changes)
    return Score("fail", reason=reason, ignored=ignored) if reason else await tried(task, codebase, changes, ignored)


def forbidden(task: Task, codebase: Codebase, changes: Iterable[Entry]) -> str:
    """Return why an agent's changes are refused: a suspicious construct that neither the old file nor the solution has."""
    texts = [text for edit in task.candidate.edits for text in (edit.broken, edit.fixed) if text is not None]
    new = 0
    for entry in changes:
        if entry.content is not None and entry.path.endswith(".py"):
            before = codebase.tree / entry.path
            known = [*map(str.encode, texts), *([before.read_bytes()] if before.is_file() else [])]
            new += max(0, len(entry.content) - max(map(len, known), default=0))
            if new > MOST_READ:
                return f"more than {MOST_READ} bytes of new code, up to {entry.path}: nobody can read that"
            if reason := suspicious(entry.path, entry.content, known):
                return reason
    return ""


def suspicious(path: str, content: bytes, known: Iterable[bytes]) -> str:
    """Return the first suspicious construct of a Python file that is not in the `known` versions, with its line, or nothing."""
    uses = findings(content)
    allowed = {what for text in known for what in findings(text)} if uses else set()
    what = next((each for each in uses if each not in allowed), "")
    return f"touches what runs the tests: {what} in {path}, line {uses[what]}" if what else ""


async def tried(
    task: Task, codebase: Codebase, changes: Sequence[Entry], ignored: tuple[str, ...] = (), *, again: bool = False
) -> Score:
    """Run the tests of a task on the changed tree: first the failing ones with some spoilt, then all of them unchanged.

    Code under test can recognise the run of all tests. It comes last, so that nothing learnt from it (a sandbox leaves traces in the
    kernel's counters and caches) helps in a run with spoilt tests. It comes earlier only for code that failed a true test.
    """
    drawn = random.Random(secrets.randbits(64))  # noqa: S311 - seeded by what nobody can guess
    longest = 2 * longest_run(codebase, task.fail_to_pass)  # of tests; opening a sandbox has time of its own
    broken = entries_of(task.candidate.edits, "broken")
    plain, why, seconds = None, "", 0.0
    try:
        runs = drawn_runs(spoilable(task), drawn, OTHER_RUNS if codebase.command else 0)
        sure = {each: drawn.choice([wrong for wrong in runs if each in wrong]) for each in spoilable(task)}
        # Each function has one error that surely makes it fail, though it may show, and others that do not show.
        for wrong in runs:
            unseen = [each for each in wrong if sure[each] is not wrong]
            files = spoilt_tests(codebase, spoilable(task), wrong, drawn, unseen)
            async with layers_of(codebase.tree, broken, changes, files) as layers:
                run = await run_tests(codebase, layers, task.fail_to_pass, longest=longest - seconds)
            seconds += run.wall
            true = [test for test in task.fail_to_pass if function_of(test) not in wrong]
            if plain is None and len(run.passed(true)) < len(true):
                plain = await _run_all(task, codebase, changes)
                if plain.state != "complete" or len(plain.passed(task.tests)) < len(task.tests):
                    break
            if why := await _odd(task, codebase, run, wrong, files):
                break
        plain = plain or await _run_all(task, codebase, changes)
    except SandboxError as error:
        if await sandbox_fails(codebase):
            return Score("invalid", reason=str(error), ignored=ignored)
        if not again:  # it may have been an accident
            return await tried(task, codebase, changes, ignored, again=True)
        return Score("fail", reason=f"its code ends the sandbox: {error}", ignored=ignored)
    shares = [len(plain.passed(tests)) / max(len(tests), 1) for tests in (task.fail_to_pass, task.pass_to_pass)]
    missed = len(task.tests) - len(plain.passed(task.tests))
    why = f"{missed} of {len(task.tests)} tests did not pass" if missed else why
    why = plain.state if plain.state != "complete" else why
    said = _said(plain, task.tests)
    return Score("fail" if why else "pass", shares[0], shares[1], why, ignored, seconds + plain.wall, said=said)


def _said(run: Run, tests: Iterable[str]) -> dict[str, str]:
    """Return the end of what the first tests that did not pass printed, or the run if it did not come to its end."""
    failed = [test for test in tests if run.outcomes.get(test) != "passed"][:SHOWN_TESTS]
    said = {test: (run.traces.get(test) or run.outcomes.get(test, "it did not run"))[-SHOWN:] for test in failed}
    return said if run.state == "complete" else {**said, "the whole run": run.printed[-SHOWN:]}


async def _run_all(task: Task, codebase: Codebase, changes: Sequence[Entry]) -> Run:
    async with layers_of(codebase.tree, entries_of(task.candidate.edits, "broken"), changes) as layers:
        return await run_tests(codebase, layers, task.tests, traces=True)


async def sandbox_fails(codebase: Codebase) -> bool:
    """Whether tests cannot be run even on the original tree. If they can, the agent's code caused the failure before."""
    try:
        return (await run_tests(codebase, ids=codebase.ids[:1])).state != "complete"
    except SandboxError:
        return True


async def _odd(task: Task, codebase: Codebase, run: Run, wrong: Collection[str], files: Sequence[Entry]) -> str:
    """Return which spoilt test passes, or which true one fails, where the reference solution has the other outcome."""
    passed = {*run.passed(task.fail_to_pass)}
    odd = [test for test in task.fail_to_pass if (test in passed) == (function_of(test) in wrong)]
    if odd:
        async with layers_of(codebase.tree, files) as layers:
            reference = {*(await run_tests(codebase, layers, task.fail_to_pass)).passed(odd)}
        odd = [test for test in odd if (test in reference) != (test in passed)]
    if not odd:
        return ""
    forged = f"reports are forged: {odd[0]} passes with a wrong expectation"
    return forged if odd[0] in passed else f"{odd[0]} did not pass again"


def spoilable(task: Task) -> list[str]:
    """Return the test functions that may be spoilt: the hidden ones, which the agent cannot compare with the original."""
    return sorted(task.hidden) or sorted({*map(function_of, task.fail_to_pass)})


def drawn_runs(functions: Sequence[str], drawn: random.Random, runs: int = 0) -> list[set[str]]:
    """Return which functions are spoilt in each run: each of them in at least one run and never in all.

    Code that forges outcomes must guess all of these. Where there are few functions there are more runs, so that even code that
    knows the number of the run, by the clock, guesses right at most once in thirty times.
    """
    runs = runs or max(FEWEST_RUNS, MOST_RUNS + 1 - len(functions))
    ways = [way for way in product((False, True), repeat=runs) if any(way) and not all(way)]
    drawn_ways = {function: drawn.choice(ways) for function in functions}
    return [{function for function, way in drawn_ways.items() if way[number]} for number in range(runs)]


def longest_scoring(task: Task, codebase: Codebase) -> float:
    """Return after how many seconds scoring has ended, unless the machine hangs: a run of all tests, some of few, and opening."""
    return longest_run(codebase, task.tests) + 2 * longest_run(codebase, task.fail_to_pass) + OPENING


async def check(task: Task, codebase: Codebase) -> str:
    """Return what is wrong with a task, or nothing: the reference must pass, and no change must fail all failing tests."""
    solved = await score(task, codebase, entries_of(task.candidate.edits, "fixed"))
    if solved.outcome != "pass":
        return f"the reference is scored {solved.outcome}: {solved.reason}"
    idle = await score(task, codebase, [])
    if idle.outcome != "fail" or idle.fail_to_pass > 0:
        return f"doing nothing is scored {idle.outcome}, with {idle.fail_to_pass:.0%} of the failing tests passed"
    return "" if idle.pass_to_pass == 1 else f"doing nothing breaks {1 - idle.pass_to_pass:.0%} of the other tests"


Scorer = Callable[[Task, Codebase, Sequence[Entry]], Awaitable[Score]]


def one_a_core(scorer: Scorer = score) -> Scorer:
    """Return a scorer that has no more tests run at once than there are cores.

    Tests have time limits: crowded, they would fail for no fault of the agent's.
    """
    free = asyncio.Semaphore(cores())

    async def scored(task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
        async with free:
            return await scorer(task, codebase, entries)

    return scored


class Scores:
    """The scores of one set of tasks, in which an id means one task."""

    def __init__(self, scorer: Scorer, *, most: int = MOST_REMEMBERED) -> None:
        self._scorer, self._most = scorer, most
        self._known: dict[str, tuple[asyncio.Lock, list[Score]]] = {}  # what was asked for longest ago comes first

    async def of(self, task: Task, codebase: Codebase, entries: Sequence[Entry]) -> Score:
        """Score an agent's changes (differences from the tree it saw), by tests only if that cannot be known."""
        changes, ignored = taken(task, codebase, entries)
        if not changes:  # as validation found
            return Score("fail", 0.0, 1.0, "the code is as it was", ignored, how="idle")
        key = change_digest(task, changes)
        lock, known = self._known[key] = self._known.pop(key, (asyncio.Lock(), []))
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        async with lock:
            if known:
                return replace(known[0], ignored=ignored, how="known")
            score = await self._scorer(task, codebase, entries)
            known += [score] if score.outcome != "invalid" else []
            return score


def change_digest(task: Task, changes: Iterable[Entry]) -> str:
    """Return a digest of a task and all that is taken over of an agent's work on it."""
    contents = [(each, None if each.content is None else sha256(each.content).hexdigest()) for each in changes]
    return digest_of([task.id, sorted((each.path, each.kind, each.mode, digest) for each, digest in contents)])
