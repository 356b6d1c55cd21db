"""One attempt at a task, whoever makes it: a benchmark, a demonstration or training.

All of them give an agent the same tree, tools and search, and score its changes in the same way, so that training and benchmarks
measure the same. Exceptions from here are failures of the infrastructure: mistakes of an agent come as tool answers and as a score.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etude.agent.changes import below_folder, content_of, unified
from etude.agent.harness import SYSTEM, Harness
from etude.agent.search import Searcher, installed_embedder
from etude.agent.toolbox import Refused
from etude.agent.tools import Outcome, Toolset, ToolSettings
from etude.errors import UserError
from etude.rewards.interaction import Interaction, Premise, interaction
from etude.rewards.quality import Quality, measure
from etude.sandbox.box import Entry, Place, Sandbox, SandboxError
from etude.sandbox.layers import lookup
from etude.sandbox.local import open_sandbox
from etude.tasks.prompts import not_at_fault
from etude.tasks.score import MOST_LEFT, Score, visible
from etude.tasks.seal import FOLDERS
from etude.tasks.services import start_lines
from etude.tasks.suite import layers_of, place_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from etude.agent.trace import Trace
    from etude.rewards.quality import Change
    from etude.tasks.task import Codebase, Style, Task

    Begin = Callable[[Toolset], Harness]

# Of all files that are compared: an agent may write a gigabyte, and lint takes seconds for this much.
MOST_BYTES = 1 << 20
CLOSING = 5.0  # seconds a sandbox has to end


@dataclass(frozen=True)
class Left:
    """The changes that an agent made."""

    entries: list[Entry]  # all differences from the tree it saw
    change: Change  # the files it changed, as text


@dataclass(frozen=True)
class Judged:
    """The score of an attempt (never `invalid`), and measures of its quality and interaction."""

    score: Score
    quality: Quality | None  # None: nothing was changed, or nothing that can be measured
    interaction: Interaction


class PunctualToolset(Toolset):
    """Tools that stop at the episode's deadline: the harness checks it only between turns, and one turn may ask for long commands."""

    until = math.inf  # of time.monotonic()
    before = ""  # lines for sh before a command: what starts the services of the codebase

    async def _shell(self, command: str, seconds: int) -> Outcome:
        return await super()._shell(self.before + command, seconds)

    async def _do(self, name: str, given: dict[str, Any]) -> Outcome:
        left = self.until - time.monotonic()
        if left <= 0:
            raise Refused("Not run: the time of this episode is over.", "late")
        if name in {"shell", "bash"}:
            given["timeout"] = math.ceil(min(given.get("timeout", self.settings.shell_seconds), left))
        return await super()._do(name, given)


def searcher_for(tools: ToolSettings, cache: Path) -> Searcher | None:
    """Return the index behind the tool `search`, as a user's agent has it; None where there is no such tool."""
    return Searcher(cache, installed_embedder()) if "search" in tools.tools else None


async def work_on(
    task: Task, codebase: Codebase, trace: Trace, tools: ToolSettings, searcher: Searcher | None, begin: Begin
) -> Left:
    """Have an agent work on a task in a sandbox of its own, and put its diff into its trace. `begin`: its harness, on tools.

    SandboxError: the sandbox has ended, or could not be opened. Cancelled, nothing is left behind.
    """
    async with layers_of(codebase.tree, visible(task, codebase)) as layers:
        async with _opened(place_of(codebase, layers), codebase.sandbox) as sandbox:
            trace.made_by["sandbox"] = sandbox.backend
            toolset = PunctualToolset(sandbox, tools, searcher, str(codebase.python))
            toolset.before = start_lines(codebase.services)
            harness = begin(toolset)
            toolset.until = harness.began + harness.settings.seconds
            try:
                await harness.run(SYSTEM, trace.task)
                entries = await sandbox.diff(MOST_LEFT)
            except SandboxError as error:
                await sandbox.exec("true")  # raises if the sandbox has ended, which nothing inside can bring about
                trace.made_by["lost"] = str(error)  # the agent's doing: it has left nothing
                entries = []
        below = (*layers, codebase.tree)
        own = await asyncio.to_thread(own_changes, entries, below)
        trace.diff = await asyncio.to_thread(unified, own, below)
        return Left(entries, await asyncio.to_thread(change_of, own, below))


@asynccontextmanager
async def _opened(place: Place, backend: str) -> AsyncIterator[Sandbox]:
    """Open a sandbox. One that does not end when it should is left to its launcher, which ends it with this process."""
    sandbox = await open_sandbox(place, backend)
    try:
        yield sandbox
    finally:
        try:
            async with asyncio.timeout(CLOSING):
                await sandbox.close()
        except TimeoutError:
            logging.getLogger(__name__).warning("a sandbox did not end within %.0f s", CLOSING)


async def judge(task: Task, codebase: Codebase, trace: Trace, left: Left, style: Style, score: Score) -> Judged:
    """Measure quality and interaction of a scored attempt."""
    if score.outcome == "invalid":
        raise SandboxError(score.reason)
    compared = (left.change, reference_change(task), codebase.tests)
    quality = None
    with suppress(UserError):  # ruff works, or nothing would have begun: it cannot read what the agent wrote
        quality = await asyncio.to_thread(measure, *compared) if left.change else None
    seen = interaction(trace, premise_of(task, style, trace.task))
    trace.made_by["score"] = {"outcome": score.outcome, "reason": score.reason, "ignored": list(score.ignored),
                              "known": score.how == "known", "said": score.said}  # fmt: skip
    return Judged(score, quality, seen)


def premise_of(task: Task, style: Style, prompt: str) -> Premise | None:
    """Return the innocent names that a request with a wrong premise mentions, and the names that are at fault."""
    if style != "premise":
        return None
    words = set(re.findall(r"\w+", prompt))
    blamed = tuple(name for name in not_at_fault(task.candidate) if name.rpartition(".")[2] in words)
    names = tuple(span.name for span in task.candidate.spans if span.name)
    return Premise(blamed, names or tuple(edit.path for edit in task.candidate.edits))


def reference_change(task: Task) -> Change:
    """Return what the reference solution does to each file."""
    return {edit.path: (edit.broken, edit.fixed) for edit in task.candidate.edits}


def own_changes(entries: Sequence[Entry], layers: Sequence[Path]) -> list[Entry]:
    """Return the files that an agent changed, without caches; a removed folder counts as its removed files.

    Beyond a total size, only the beginning of the longest files is kept.
    """
    changed, room = [], MOST_BYTES
    for entry in sorted(entries, key=lambda each: each.size):
        if entry.kind == "folder" or FOLDERS & set(entry.path.split("/")):
            continue
        if entry.kind != "gone":
            changed.append(replace(entry, content=(entry.content or b"")[:room]))
            room -= len(changed[-1].content or b"")
            continue
        gone = [path for path, each in below_folder(entry.path, lookup(layers, entry.path)) if each.file]
        changed += [Entry(path, "gone") for path in gone or [entry.path]]
    return sorted(changed, key=lambda each: each.path)


def change_of(entries: Sequence[Entry], layers: Sequence[Path]) -> Change:
    """Return changed files before and after, as text; what is none is read as if it were."""
    change = {}
    for entry in entries:
        before = lookup(layers, entry.path)
        old = content_of(before)[:MOST_BYTES].decode("utf-8", "replace") if before.there else None
        new = None if entry.kind == "gone" else (entry.content or b"").decode("utf-8", "replace")
        if old != new:
            change[entry.path] = old, new
    return change
