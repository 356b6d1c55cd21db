"""Making a set: codebases examined, candidates tried, tasks kept. Every try is a line in a log, and a restart goes on after the last.

Packages are worked on side by side, one a core; within a package the order is fixed. So what is made depends on the recipe
and its seed, and not on how often it was interrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import platform
import random
import shutil
import tempfile
import time
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.errors import UserError, one_line
from etude.files import digest_of, read_json, write_json
from etude.parallel import cores
from etude.sandbox.box import SandboxError
from etude.tasks import prompts, seal
from etude.tasks.environment import environment
from etude.tasks.generators import deletion, history, mutation
from etude.tasks.generators.parsed import Parsed
from etude.tasks.manifest import codebase_row, ready, task_of, task_row, write_set
from etude.tasks.score import check, visible
from etude.tasks.source import PackageSettings, permissive, unpack
from etude.tasks.suite import FAST, Ready, lay
from etude.tasks.task import Split, Task
from etude.tasks.validate import Coverage, Verdict, examine, try_candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.jsonl import MetricsLog
    from etude.progress import Reporter
    from etude.progress import Task as Progress
    from etude.tasks.task import Candidate

TRIES = 4  # candidates for every task wanted
CATEGORIES = {
    "mutation": "debugging",
    "deletion": "new feature",
    "version": "iterate on feature",
    "history": "debugging",
}
GENERATORS = {"mutation": mutation, "deletion": deletion}
KEPT_TRACES = 3
ATTEMPTS = 3
Row = dict[str, Any]


class SetSettings(BaseModel):
    """A recipe for a set of tasks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="names the set")
    seed: int = Field(0, description="everything drawn depends on it")
    split: Split = Field("train", description="which templates its prompts are made of: train or bench")
    mutation: int = Field(20, ge=0, description="mutations wanted of every package")
    deletion: int = Field(10, ge=0, description="deletions wanted of every package")
    version: int = Field(
        0, ge=0, description="differences between releases wanted of every package that names `older` ones"
    )
    history: int = Field(0, ge=0, description="fixes wanted from the history of every package that is a git repository")
    package: list[PackageSettings] = Field(min_length=1, description="the codebases")


def read_settings(path: Path) -> SetSettings:
    """Read a recipe."""
    try:
        return SetSettings(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Maker:
    """One making of a set."""

    def __init__(self, settings: SetSettings, state: Path, log: MetricsLog, cache: Path, reporter: Reporter) -> None:
        self.settings, self.state, self.log, self.cache, self.reporter = settings, state, log, cache, reporter
        self.failed: dict[str, str] = {}  # packages that gave nothing, and why
        self.codebases: dict[str, tuple[Ready, Row]] = {}
        self.passed_over: Counter[str] = Counter()  # by generators, before any try

    def _wanted(self, package: PackageSettings) -> int:
        usual = sum(self._share(package, generator) for generator in GENERATORS)
        return usual + self.settings.version * bool(package.older) + self.settings.history * bool(package.git)

    def _share(self, package: PackageSettings, generator: str) -> int:
        return round(float(getattr(self.settings, generator)) * package.share)

    async def make(self, workers: int = 0) -> None:
        """Try candidates of all packages until there are enough tasks of each."""
        room = asyncio.Semaphore(workers or cores())
        wanted = sum(map(self._wanted, self.settings.package))
        with self.reporter.task(f"making {self.settings.name}", wanted, "tasks") as progress:

            async def one(package: PackageSettings) -> None:
                async with room:
                    before = progress.done
                    try:
                        await self._package(package, progress)
                    except (UserError, SandboxError) as error:
                        self.failed[package.name] = str(error)
                        self.reporter.say(f"left out: {error}")
                        progress.skip(max(0.0, self._wanted(package) - (progress.done - before)))

            try:
                async with asyncio.TaskGroup() as group:
                    for package in self.settings.package:
                        group.create_task(one(package))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None  # most often the wish to stop, which all of them hear

    async def _package(self, package: PackageSettings, progress: Progress) -> None:
        codebase, coverage = await self._examined(package)
        for generator, module in GENERATORS.items():
            drawn = random.Random(f"{self.settings.seed}/{codebase.digest}/{generator}")  # noqa: S311
            candidates = module.candidates(
                codebase.tree, codebase.sources, drawn, coverage.run_by_tests(), self.passed_over
            )
            wanted = self._share(package, generator)
            kept = await self._generated(codebase, coverage, candidates, wanted, progress)
            progress.skip(wanted - kept)
        if self.settings.version and package.older:
            progress.skip(self.settings.version - await self._releases(package, progress))
        if self.settings.history and package.git:
            progress.skip(self.settings.history - await self._commits(package, codebase, progress))

    async def _releases(self, package: PackageSettings, progress: Progress) -> int:
        """Try the differences between releases, the newest first, about as many of each pair."""
        pins = [str(package.pypi), *(f"{package.name}=={version}" for version in package.older)]
        kept = 0
        for number, (newer, older) in enumerate(pairwise(pins)):
            share = -(-(self.settings.version - kept) // (len(pins) - 1 - number))
            try:
                codebase, coverage = await self._examined(package.model_copy(update={"pypi": newer}))
                before = await asyncio.to_thread(
                    unpack, package.model_copy(update={"pypi": older}), self.cache, self.reporter
                )
            except UserError as error:
                self.reporter.say(f"left out: {newer} after {older}: {error}")
                continue
            whole = history.candidate_between(before.tree, codebase.tree, codebase.sources, self.passed_over)
            kept += await self._generated(
                codebase, coverage, history.pieces(whole) if whole else iter(()), share, progress
            )
        return kept

    async def _commits(self, package: PackageSettings, codebase: Ready, progress: Progress) -> int:
        """Try the commits of a repository, each on the tree as it was then."""
        repository = Path(str(package.git)).expanduser()
        if not repository.is_dir():
            raise UserError(
                f"{package.name}: its history is read from a local clone; clone it and give the folder as `git`"
            )
        kept = 0
        for candidate in history.candidates(repository, codebase.sources, self.passed_over):
            then, coverage = await self._examined(package.model_copy(update={"revision": candidate.about["commit"]}))
            kept += await self._generated(then, coverage, iter([candidate]), 1, progress)
            if kept == self.settings.history:
                break
        return kept

    async def _examined(self, package: PackageSettings) -> tuple[Ready, Coverage]:
        """Return a codebase with its stable tests, examined now or earlier."""
        unpacked = await asyncio.to_thread(unpack, package, self.cache, self.reporter)
        if not permissive(unpacked.licence):
            raise UserError(
                f"{package.name}: its licence is {unpacked.licence or 'not known'}; state it as `licence` if it is permissive"
            )
        key = f"{unpacked.name}=={unpacked.version}"
        note = self.state / "codebases" / f"{key}-{digest_of(package.model_dump(exclude={'older', 'share'}))[:8]}.json"
        if not note.exists():
            python = await asyncio.to_thread(environment, unpacked, package, self.cache)
            plain = Ready(unpacked.name, unpacked.version, unpacked.digest, unpacked.tree, unpacked.sources, unpacked.tests,
                          python.python, unpacked.paths, unpacked.licence, tuple(package.pytest), python.hidden)  # fmt: skip
            began = time.monotonic()
            codebase, coverage, counts = await examine(plain)
            row = codebase_row(codebase, package, python.installed)
            write_json(
                note,
                {"row": row, "coverage": coverage.files, "counts": counts, "took": round(time.monotonic() - began, 1)},
            )
            self.reporter.say(f"{key}: {counts}")
        found = read_json(note)
        codebase = await asyncio.to_thread(ready, found["row"], self.cache, self.reporter)
        self.codebases[key] = codebase, found["row"]
        return codebase, Coverage(found["coverage"])

    async def _generated(
        self, codebase: Ready, coverage: Coverage, candidates: Iterator[Candidate], wanted: int, progress: Progress
    ) -> int:
        """Try candidates in their order until there are enough tasks; return how many there are."""
        kept = 0
        for number, candidate in zip(range(TRIES * wanted), candidates, strict=False):
            key = f"try/{codebase.name}=={codebase.version}/{_examination(codebase)}/{candidate.generator}/{number:05d}"
            row = self.log.get(key)
            if row is None:
                row = self.log.put(key, **await self._tried(codebase, coverage, candidate, key))
            if not row["reason"]:
                kept += 1
                progress.advance()
            self.reporter.check_stop()
            if kept == wanted:
                break
        return kept

    async def _tried(self, codebase: Ready, coverage: Coverage, candidate: Candidate, key: str) -> Row:
        """Return the line of one try: the task without its prompts, or why it is none."""
        began = time.monotonic()
        verdict = await self._judged(codebase, coverage, candidate)
        row: Row = {"reason": verdict.reason, "kinds": candidate.kinds}
        if not verdict.reason:
            rng = random.Random(f"{self.settings.seed}/{key}")  # noqa: S311
            task, row["reason"] = await asyncio.to_thread(sealed, codebase, candidate, verdict, rng)
            # So far only tests that run the changed code were tried; tests that share state break others, or hang them.
            if not row["reason"] and (wrong := await check(task, codebase)):
                row["reason"] = f"not confirmed: {wrong}"
            if not row["reason"]:
                seen = sorted(verdict.traces, key=lambda test: (seal.function_of(test) in task.hidden, test))
                traces = {test: verdict.traces[test] for test in seen[:KEPT_TRACES]}
                row |= {"task": task_row(task, codebase), "about": candidate.about, "traces": traces}
        return {**row, "seconds": round(time.monotonic() - began, 2)}

    async def _judged(self, codebase: Ready, coverage: Coverage, candidate: Candidate) -> Verdict:
        """Try a candidate; where the sandbox fails, which says nothing of the candidate, try again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await try_candidate(codebase, coverage, candidate)
            except SandboxError as error:
                self.reporter.say(f"trying again, for the sandbox failed: {one_line(error)}")
        return await try_candidate(codebase, coverage, candidate)

    def finish(self, path: Path) -> Row:
        """Draw the prompts and write the manifest; return its header, which says what the making gave."""
        tasks: dict[str, Row] = {}
        reasons: Counter[str] = Counter()
        kept: dict[str, Counter[str]] = {generator: Counter() for generator in CATEGORIES}
        for row in sorted(self.log.rows("try/"), key=lambda each: str(each["key"])):
            _, name, examination, generator, _ = row["key"].split("/")
            if name not in self.codebases or _examination(self.codebases[name][0]) != examination:
                continue  # of another recipe, or from before the recipe was changed
            reason = row["reason"]
            if not reason:
                task = self._prompted(row, self.codebases[name][0])
                reason = "" if task["prompts"] else "no prompt that does not leak"
                reason = "kept before" if task["task"] in tasks else reason
            if not reason:
                tasks[task["task"]] = task
                kept[generator][name] += 1
            reasons[f"{generator}: {reason.partition(':')[0] or 'kept'}"] += 1
        header = {"name": self.settings.name, "seed": self.settings.seed, "split": self.settings.split, "tasks": len(tasks),
                  "python": platform.python_version(), "kept": {name: counts for name, counts in kept.items() if counts},
                  "tries": dict(sorted(reasons.items())), "passed_over": dict(sorted(self.passed_over.items())),
                  "left_out": self.failed, "seconds": round(self.log.total("seconds"))}  # fmt: skip
        used = {task["codebase"] for task in tasks.values()}
        rows = [row for key, (_, row) in sorted(self.codebases.items()) if key in used]
        write_set(path, header, rows, tasks.values())
        return header

    def _prompted(self, row: Row, codebase: Ready) -> Row:
        """Return the line of a task with its prompts; what a test that the agent sees has printed is preferred."""
        task = task_of(row["task"], codebase)
        candidate = dataclasses.replace(task.candidate, about=row["about"])
        order = sorted(row["traces"], key=lambda test: seal.function_of(test) in task.hidden)
        failures = [prompts.failure_of(test, row["traces"][test]) for test in order]
        rng = random.Random(f"{self.settings.seed}/{task.id}")  # noqa: S311
        return {**row["task"], "prompts": prompts.prompts(candidate, codebase.name, failures, rng, self.settings.split)}


def _examination(codebase: Ready) -> str:
    """Return what tells one examination from another: a line names tests by their numbers in it."""
    return digest_of([codebase.digest, codebase.ids])[:8]


def sealed(codebase: Ready, candidate: Candidate, verdict: Verdict, rng: random.Random) -> tuple[Task, str]:
    """Return a task with its hidden tests chosen, or why the tree that the agent would see gives the solution away."""
    changed = sum(span.last - span.first + 1 for span in candidate.spans)
    difficulty = {
        "lines": changed,
        "files": len(candidate.edits),
        "failing": len(verdict.fail_to_pass),
        "sites": len(candidate.kinds),
    }
    name = (
        f"{codebase.name}-{candidate.generator}-{digest_of([dataclasses.asdict(edit) for edit in candidate.edits])[:8]}"
    )
    task = Task(name, codebase.name, codebase.version, candidate, {}, verdict.fail_to_pass, verdict.pass_to_pass,
                hidden_of(codebase, verdict, rng), CATEGORIES[candidate.generator], difficulty, verdict.seconds)  # fmt: skip
    if not task.hidden:
        return task, "too few of the failing tests can be hidden"
    try:
        seen = visible(task, codebase)
    except (UserError, SyntaxError, UnicodeDecodeError) as error:
        return task, f"its tests cannot be hidden: {one_line(error)}"
    with tempfile.TemporaryDirectory(prefix="etude-gate-", dir=FAST if Path(FAST).is_dir() else None) as work:
        tree = Path(work, "tree")
        shutil.copytree(codebase.tree, tree, symlinks=True)
        lay(tree, seen)
        leaks = seal.gate(tree, candidate, codebase)
    leaks += seal.gate(codebase.python.parent.parent / "lib", candidate, codebase, environment=True)
    return task, f"leak: {leaks[0]}" if leaks else ""


def hidden_of(codebase: Ready, verdict: Verdict, rng: random.Random) -> tuple[str, ...]:
    """Draw the test functions that the agent does not see: at least half of those that fail, the only one if there is one."""
    functions = sorted({seal.function_of(test) for test in verdict.fail_to_pass})
    known = {}
    for path in {function.partition("::")[0] for function in functions}:
        text = (codebase.tree / path).read_text(encoding="utf-8", errors="replace") if path.endswith(".py") else ""
        known[path] = {name for name, _ in Parsed(path, text).definitions}
    can = [each for each in functions if each.partition("::")[2].replace("::", ".") in known[each.partition("::")[0]]]
    wanted = (len(functions) + 1) // 2
    return tuple(sorted(rng.sample(can, wanted))) if len(can) >= wanted else ()
