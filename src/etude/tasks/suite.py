"""Runs tests of a codebase in a fresh sandbox and checks the report.

Every id must be reported as passed; absent, skipped, failed and timed out all count as "not passed". A report is accepted only with
the nonce of this run, in an unbroken sequence that ends with a count and an exit code which agree with the messages before and with
how the process ended.

Code under test shares an interpreter with the reporter, so a determined attacker can still forge reports. Therefore some runs
contain tests with wrong expectations (`spoil.py`). Nothing else differs between runs: the tests, their order, the files that are
written anew and the times of all files are the same. Tests and their data cannot be written, removed or renamed during a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from etude.sandbox import cgroups
from etude.sandbox.box import WORKSPACE, Entry, Limits, Missing, Place, SandboxError
from etude.sandbox.layers import write_layer
from etude.sandbox.local import open_sandbox
from etude.tasks.codebase import RUNNER
from etude.tasks.generators.languages import LANGUAGES
from etude.tasks.generators.parsed import is_below, is_test_path, paths_below
from etude.tasks.locks import system_paths
from etude.tasks.readers import ONE_STREAM, read
from etude.tasks.services import start_lines
from etude.work import cores, together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence

    from etude.tasks.task import Codebase, Edit

    Ids = Collection[str] | None  # of tests; None: all there are

Test = tuple[Literal["test"], str, str, float, str]
Message = tuple[Literal["start", "broken"], str, str] | Test | tuple[Literal["end"], int, int]
MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)
State = Literal["complete", "timeout", "memory", "crash", "tampered", "no build"]
FAST = "/dev/shm"  # noqa: S108 - a private folder is made in it
LIMITS = Limits(output=32 << 20)
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0", "TZ": "UTC", "COLUMNS": "80"}
EFFORT = 0.4  # of the time a test has, that it may compute
COVERAGE = ".etude-coverage.json"  # as report_plugin.py has it, which is not imported: only environments have pytest


@dataclass(frozen=True)
class Run:
    """How tests ended. What is in no outcome did not run to its end."""

    state: State
    outcomes: dict[str, str] = field(default_factory=dict)  # passed, failed or skipped
    seconds: dict[str, float] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # files that could not be collected, and why
    wall: float = 0.0  # seconds of the whole run
    printed: str = ""  # the end of what it printed
    covered: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # lines of each file that each test ran

    def passed(self, ids: Iterable[str]) -> list[str]:
        return [each for each in ids if self.outcomes.get(each) == "passed"]


def place_of(codebase: Codebase, layers: Sequence[Path]) -> Place:
    """Return a sandbox with layers above the pristine tree, as tests and agents get it."""
    if codebase.command:
        folders, env = toolchain(codebase.command.language)
        hidden = tuple(each for each in LANGUAGES[codebase.command.language].hides if Path(each).is_dir())
        return Place((*layers, codebase.tree), folders, hidden, {"TZ": "UTC", **env}, limits=LIMITS)
    prefix = codebase.python.parent.parent
    system = system_paths(prefix)
    path = ":".join(filter(None, [f"{prefix}/bin", system.get("PATH"), "/usr/local/bin:/usr/bin:/bin"]))
    paths = {**system, "PYTHONPATH": ":".join(codebase.python_path), "PATH": path}
    started = (codebase.python, (RUNNER,))
    return Place((*layers, codebase.tree), (prefix,), codebase.hidden, ENVIRONMENT | paths, started, LIMITS)


@lru_cache(maxsize=16)
def toolchain(language: str) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the folders of a language's tools that lie outside of /usr, and the variables that they need."""
    env, folders = dict(LANGUAGES[language].env), list[Path]()
    rustc = shutil.which("rustc") if language == "rust" else None
    if rustc and not rustc.startswith("/usr/"):
        asked = subprocess.run([rustc, "--print", "sysroot"], capture_output=True, text=True, check=False, cwd="/")
        folders = [Path(asked.stdout.strip())] if asked.returncode == 0 else []
        env["PATH"] = ":".join([*(f"{folder}/bin" for folder in folders), "/usr/local/bin:/usr/bin:/bin"])
    return tuple(folders), env


@lru_cache(maxsize=64)
def tests_and_data(codebase: Codebase) -> tuple[str, ...]:
    """Return the files that hold tests or what they need, which code under test must not change."""
    paths, sources = paths_below(codebase.tree, ["."]), codebase.sources
    return tuple(p for p in paths if is_test_path(p) or (is_below(p, codebase.tests) and not is_below(p, sources)))


async def run_tests(
    codebase: Codebase, layers: Sequence[Path] = (), ids: Ids = None,
    *, traces: bool = False, cold: bool = False, cover: bool = False, longest: float = inf,
) -> Run:  # fmt: skip
    """Run tests in a fresh sandbox. `ids` None: all there are. SandboxError: the sandbox failed, not what ran in it.

    `cold`: in a Python that starts afresh, with another order of hashes. `cover`: also find which lines each test runs.
    `longest`: seconds it may take, if that is less than usual.
    """
    if codebase.command:
        return await _run_command(codebase, layers, ids, longest)
    nonce = secrets.token_hex(16)
    order = {"nonce": nonce, **order_of(codebase, ids, traces=traces, cover=cover)}
    sandbox = await open_sandbox(replace(place_of(codebase, layers), fixed=tests_and_data(codebase)), codebase.sandbox)
    try:
        words = [str(codebase.python), "-m", RUNNER]
        if codebase.services:
            words = ["/bin/sh", "-c", f'{start_lines(codebase.services)}exec "$0" "$@"', *words]
        env, line = {"PYTHONHASHSEED": "1"} if cold else {}, json.dumps(order).encode() + b"\n"
        result = await sandbox.exec(words, env=env, stdin=line, timeout=min(longest, longest_run(codebase, ids)))
        printed = result.err[-4000:].decode(errors="replace")
        messages = _messages(result.out, nonce)
        if not messages or messages[0][0] != "start":
            what = f"it ended with {result.rc} and {len(result.out)} bytes of output"
            raise SandboxError(f"{codebase.name}: the test runner did not start: {what}: {printed[-500:]}")
        state: State = "timeout" if result.timed_out else "memory" if result.oom else _judged(messages, result.rc)
        if result.cut[0]:
            state = "tampered"
        if state == "crash":
            printed += f"\n(exit code {result.rc} after {messages[-1][:2]}, {result.out.count(nonce.encode())} reports)"
        content = await sandbox.read(COVERAGE, 1 << 28) if cover and state == "complete" else b"{}"
    finally:
        await sandbox.close()
    return _gathered(messages, state, wall=result.seconds, printed=printed, covered=json.loads(content))


async def _run_command(codebase: Codebase, layers: Sequence[Path], ids: Ids, longest: float) -> Run:
    """Build and run all tests of another language; what counts is read here, from what came out and how the process ended.

    Tests in files with code count for nothing: an agent may change these files.
    """
    command = codebase.command
    assert command
    sandbox = await open_sandbox(replace(place_of(codebase, layers), fixed=tests_and_data(codebase)), codebase.sandbox)
    limit = min(longest, longest_run(codebase, None if ids is None else codebase.ids))
    try:
        if command.build:
            built = await sandbox.exec(f"{{ {command.build}\n}} 2>&1", timeout=limit)
            if built.rc or built.timed_out:
                return Run("no build", wall=built.seconds, printed=built.out[-4000:].decode(errors="replace"))
        one = "" if command.reader in ONE_STREAM else " 2>&1"
        result = await sandbox.exec(f"{{ {command.test}\n}}{one}", timeout=limit)
        out = await sandbox.read(command.report, LIMITS.output) if command.report else result.out
    except Missing as error:
        return Run("crash", printed=f"no report: {error}; {result.err[-2000:].decode(errors='replace')}")
    finally:
        await sandbox.close()
    report = read(command.reader, out.decode(errors="replace"))
    failed = "failed" in report.outcomes.values()
    state: State = "crash" if report.faults else "complete"
    state = "timeout" if result.timed_out else "memory" if result.oom else state
    if state == "complete" and (result.cut[0] or bool(result.rc) != failed):
        state = "tampered"
    own = {path for path in paths_below(codebase.tree, codebase.sources) if not is_test_path(path)}
    outcomes = {test: str(it) for test, it in report.outcomes.items() if test.partition("::")[0] not in own}
    printed = "; ".join(report.faults) + "\n" + (result.err or result.out)[-4000:].decode(errors="replace")
    seconds = dict.fromkeys(outcomes, result.seconds / max(len(outcomes), 1))
    return Run(state, outcomes, seconds, report.traces, wall=result.seconds, printed=printed)


def order_of(codebase: Codebase, ids: Ids, *, traces: bool = False, cover: bool = False) -> dict[str, Any]:
    """Return what the runner (`report_plugin.py`) is to do, all but the nonce."""
    places = [f"{WORKSPACE}/{place}{'' if place.endswith('.py') else '/*'}" for place in codebase.sources]
    files = list(codebase.tests) if ids is None else sorted({each.partition("::")[0] for each in ids})
    # Pytest takes longer to render failures (it parses the test file for each) than to run tests, and nobody reads them.
    options = [*codebase.options, *([] if traces or ids is None else ["--tb=no"])]
    limit = 10 + 10 * max(_usual(codebase, ids), default=2.0)
    return {"ids": None if ids is None else sorted(ids), "files": files, "options": options, "paths": codebase.python_path,
            "traces": traces, "cover": places if cover else [], "limit": limit, "effort": EFFORT * limit}  # fmt: skip


def _usual(codebase: Codebase, ids: Ids) -> list[float]:
    return [codebase.seconds.get(each, 0.1) for each in ids or ()]


def longest_run(codebase: Codebase, ids: Ids) -> float:
    """Return after how many seconds a run of tests is ended."""
    return 600.0 if ids is None else 60 + 8 * sum(_usual(codebase, ids))


def _messages(out: bytes, nonce: str) -> list[Message]:
    """Return what was reported with the nonce, up to the first gap in the numbers, or the first that the runner never says."""
    messages: list[Message] = []
    with suppress(ValidationError):
        for line in out.decode(errors="replace").splitlines():
            if line.startswith(f"{nonce} {len(messages)} "):
                messages.append(MESSAGE.validate_json(line.split(" ", 2)[2]))
    return messages


def _judged(messages: Sequence[Message], code: int) -> State:
    """Say whether the last message fits what came before and how the process ended."""
    if messages[-1][0] != "end":
        return "crash"
    outcomes = {each[1]: each[2] for each in messages if each[0] == "test"}
    failed = "failed" in outcomes.values() or any(each[0] == "broken" for each in messages)
    # Whether a process that ends with this code says that something failed.
    expected = {1: True, 0: False, 5: False}.get(code, failed)
    fits = messages[-1][1:] == (code, len(outcomes)) and failed == expected
    return "complete" if fits else "tampered"


def _gathered(messages: Sequence[Message], state: State, **facts: Any) -> Run:
    run = Run(state, **facts)
    for message in messages:
        if message[0] == "test":
            _, name, outcome, seconds, trace = message
            if run.outcomes.get(name, "passed") == "passed":
                run.outcomes[name] = outcome
            run.seconds[name] = seconds
            run.traces.update({name: trace} if trace else {})
        elif message[0] == "broken":
            run.broken[message[1]] = message[2]
    return run


def file_entry(path: str, text: str | None) -> Entry:
    """Return a file as a difference from a tree; without a text it is gone."""
    content = None if text is None else text.encode()
    return Entry(path, "gone") if content is None else Entry(path, "file", len(content), 0o644, content)


def entries_of(edits: Iterable[Edit], side: Literal["broken", "fixed"]) -> list[Entry]:
    """Return edits as differences from a tree: to the broken one or to the solved one."""
    return [file_entry(edit.path, getattr(edit, side)) for edit in sorted(edits, key=lambda each: each.path)]


def write_entries(tree: Path, entries: Iterable[Entry]) -> None:
    """Make differences in a plain folder."""
    for entry in entries:
        (tree / entry.path).unlink(missing_ok=True)
        if entry.content is not None:
            (tree / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (tree / entry.path).write_bytes(entry.content)


async def side_by_side(work: Callable[[Any], Awaitable[object]], jobs: Iterable[Any], most: int = 0) -> None:
    """Do jobs, `most` or one a core at once. The first error ends all: most often the wish to stop, which all of them hear."""
    room = asyncio.Semaphore(most or cores())

    async def one(job: Any) -> None:
        async with room:
            await work(job)

    await together(map(one, jobs))


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
        for path in Path(work).rglob("*"):  # fresh times would tell what was written for this run
            os.utime(path, ns=(tree.stat().st_mtime_ns,) * 2, follow_symlinks=False)
        yield layers
