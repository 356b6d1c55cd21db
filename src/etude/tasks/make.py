"""Making a set: codebases examined, candidates tried, tasks kept. Every try is a line in a log, and a restart goes on after the last.

Packages are worked on side by side, one a core; within a package the order is fixed. So what is made depends on the recipe
and its seed, and not on how often it was interrupted.

The solved tree of a task is the pristine tree of its codebase, so that all tests pass on it is found out once a codebase: three runs,
one of them with another order of hashes, and one that also measures which tests run which lines. A test that runs none of the
changed lines cannot tell the trees apart, unless a line is changed that runs on import: so a candidate is tried on few tests.
Which of them fail on the broken tree is found out twice. A test that does not end the same way each time is flaky, and counts
for nothing.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from etude.data.settings import SourceSettings
from etude.data.sources.repository import commit_of, history_of
from etude.errors import UserError, one_line
from etude.files import digest_of, read_json, write_json, write_text
from etude.progress import counted
from etude.sandbox.box import SandboxError
from etude.sandbox.images import WHERE, Backend, settled
from etude.tasks import prompts
from etude.tasks.codebase import PackageSettings, permissive, unpack, with_environment
from etude.tasks.commanded import spoilt_tests, written
from etude.tasks.generators import deletion, history, mutation, other_languages
from etude.tasks.generators.parsed import Parsed, changed_line_numbers
from etude.tasks.losses import lost_candidates, lost_packages, lost_tests
from etude.tasks.manifest import built_codebase, codebase_row, find_manifest, read_rows, task_of, task_row, write_set
from etude.tasks.score import check, visible
from etude.tasks.seal import gate
from etude.tasks.suite import FAST, entries_of, layers_of, run_tests, side_by_side, write_entries
from etude.tasks.task import Codebase, Generator, Split, Task, function_of
from etude.toml import read_layer, validated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from etude.jsonl import MetricsLog
    from etude.progress import Reporter
    from etude.tasks.suite import Run
    from etude.tasks.task import Candidate, Edit

TRIES = 4  # candidates for every task wanted
CATEGORIES = {"deletion": "new feature", "version": "iterate on feature"}  # the others are "debugging"
GENERATORS = {"mutation": mutation, "deletion": deletion}
OTHER = {"mutation": other_languages.mutations, "deletion": other_languages.deletions}
KEPT_TRACES = 3
ATTEMPTS = 3  # where the sandbox fails, which says nothing of the candidate
Row = dict[str, Any]
ON_IMPORT = ""
MOST_SECONDS = 15.0  # of tests in a score; of slower suites some are drawn
MOST_FAILING = 0.8  # of all tests: more is a tree that does not even import
LONGEST_RUN = 60.0  # seconds of the tests that see a candidate


class SetSettings(BaseModel):
    """A recipe for a set of tasks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name of the set")
    seed: int = Field(0, description="random seed")
    split: Split = Field("train", description="split, which decides the templates of its prompts: train or bench")
    mutation: int = Field(20, ge=0, description="mutations wanted of every package")
    deletion: int = Field(10, ge=0, description="deletions wanted of every package")
    version: int = Field(0, ge=0, description="differences between releases wanted of every package with `older` ones")
    history: int = Field(
        0, ge=0, description="changes wanted from the history of every package that is a git repository"
    )
    history_lines: int = Field(1, ge=1, description="fewest changed lines of a task from history")
    sandbox: Backend = Field("auto", description=WHERE)
    take: dict[str, list[Generator]] = Field(
        {}, description="manifests of which tasks are taken over as they are, and of which generators"
    )
    package: list[PackageSettings] = Field(min_length=1, description="codebases to make tasks from")

    def wanted(self, package: PackageSettings) -> dict[str, int]:
        """Return how many tasks each generator is to give of a package."""
        usual = {name: round(float(getattr(self, name)) * package.share) for name in GENERATORS}
        return {**usual, "version": self.version * bool(package.older), "history": self.history * bool(package.git)}


def read_settings(path: Path) -> SetSettings:
    """Read a recipe."""
    layer = read_layer(path)
    settings: SetSettings = validated(SetSettings, layer.table, [], [layer])
    return settings


class Coverage:
    """The lines of each file that each test runs; those that run on import are under no name."""

    def __init__(self, files: Mapping[str, Mapping[str, Collection[int]]]) -> None:
        self.files = files

    def run_by_tests(self) -> dict[str, set[int]]:
        """Return the lines of each file that any test runs."""
        each = self.files.items()
        return {path: {line for test in tests if test != ON_IMPORT for line in tests[test]} for path, tests in each}

    def tests_of_file(self, path: str) -> set[str]:
        """Return the tests that run any line of a file."""
        return set(self.files.get(path, {})) - {ON_IMPORT}

    def tests_of(self, edits: Iterable[Edit]) -> set[str] | None:
        """Return the tests that can see edits; None: any of them may."""
        seen: set[str] = set()
        for edit in edits:
            if edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
                return None
            changed, tests = changed_line_numbers(edit.broken, edit.fixed), self.files.get(edit.path, {})
            if not changed.isdisjoint(tests.get(ON_IMPORT, ())):
                return None
            seen |= {test for test, lines in tests.items() if not changed.isdisjoint(lines)}
        return seen


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate. No reason: it is a task."""

    reason: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    traces: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


async def examine(codebase: Codebase) -> tuple[Codebase, Coverage, dict[str, int], list[Row]]:
    """Find the tests that always pass on the pristine tree, and what they cover; count those that do not, and say why."""
    first = await run_tests(codebase, cover=True, traces=True)
    runs = [first, await run_tests(codebase, cold=True), await run_tests(codebase)]
    for run in runs:
        if run.state != "complete":
            raise UserError(f"{codebase.name}: its own tests end as {run.state}: {run.printed[-300:]}")
    ids = tuple(sorted(test for test in first.outcomes if all(run.outcomes.get(test) == "passed" for run in runs)))
    if not ids:
        why = next(iter(first.broken.values()), first.printed)
        raise UserError(f"{codebase.name}: none of its tests pass; set `needs`, `tests` or `pytest`: {why[-300:]}")
    known = {*ids, ON_IMPORT}
    files = {path: {test: tests[test] for test in tests if test in known} for path, tests in first.covered.items()}
    codebase = replace(codebase, ids=ids, seconds={test: runs[2].seconds[test] for test in ids})
    functions, drawn = {*map(function_of, ids)}, random.Random(codebase.digest)  # noqa: S311 - which error is no secret here
    async with layers_of(codebase.tree, spoilt_tests(codebase, functions, functions, drawn)) as layers:
        unspoilable = frozenset((await run_tests(codebase, layers, ids)).passed(ids))
    flaky = sum(1 for test in first.outcomes if len({run.outcomes.get(test) for run in runs}) > 1)
    counts = {"stable": len(ids), "flaky": flaky, "never passed": len(first.outcomes) - len(ids) - flaky,
              "files not collected": len(first.broken), "unspoilable": len(unspoilable)}  # fmt: skip
    return replace(codebase, unspoilable=unspoilable), Coverage(files), counts, lost_tests(first, ids, runs)


async def screen(codebase: Codebase, candidate: Candidate) -> str:
    """Say why no test that a commit changed fails without it, by one run each of the whole files on both trees."""
    changed = [path for path in candidate.about["tests"] if path.endswith(".py") and (codebase.tree / path).is_file()]
    few = replace(codebase, tests=tuple(path for path in changed if not path.endswith("conftest.py")))
    if not few.tests:
        return "commit changes test data only" if not changed else ""
    fixed = await run_tests(few)
    passed = fixed.passed(fixed.outcomes)
    if fixed.state != "complete" or not passed:
        why = next(iter(fixed.broken.values()), fixed.printed) if fixed.state == "complete" else fixed.state
        return f"tests of the commit do not pass: {' '.join(why[-300:].split())}"
    async with layers_of(codebase.tree, entries_of(candidate.edits, "broken")) as layers:
        broken = await run_tests(few, layers)
    return "" if len(broken.passed(passed)) < len(passed) else "tests of the commit pass without it"


async def try_candidate(codebase: Codebase, coverage: Coverage, candidate: Candidate) -> Verdict:
    """Find which tests fail on the broken tree, twice over."""
    seen = coverage.tests_of(candidate.edits)
    tests = set(codebase.ids) if seen is None else seen
    if not tests:
        return Verdict("no test runs what was changed")
    if sum(codebase.seconds[test] for test in tests) > LONGEST_RUN:
        return Verdict("the tests that run it take too long")
    async with layers_of(codebase.tree, entries_of(candidate.edits, "broken")) as layers:
        runs: list[Run] = []
        for _ in range(2):
            runs.append(await run_tests(codebase, layers, tests, traces=not runs))
            failed = len(tests) - len(runs[-1].passed(tests))
            if runs[-1].state in {"timeout", "memory", "no build"}:
                return Verdict(f"tests end by {runs[-1].state}")
            if not failed or failed > MOST_FAILING * len(codebase.ids):
                return Verdict("most tests fail" if failed else "no test fails")
    passed = [set(run.passed(tests)) for run in runs]
    flaky = passed[0] ^ passed[1]
    failing = tests - passed[0] - passed[1]
    if not failing - codebase.unspoilable:
        return Verdict("no test fails twice that could show a forged report")
    kept = chosen(codebase, coverage, candidate, failing | flaky)
    if not kept:
        return Verdict("no test still passes")
    seconds = sum(codebase.seconds[test] for test in {*failing, *kept})
    return Verdict("", tuple(sorted(failing)), kept, runs[0].traces, seconds)


def chosen(codebase: Codebase, coverage: Coverage, candidate: Candidate, left_out: Collection[str]) -> tuple[str, ...]:
    """Return the tests that must still pass: all, or of slow suites those of the changed files first and then some others."""
    rest = [test for test in codebase.ids if test not in left_out]
    if sum(codebase.seconds[test] for test in rest) <= MOST_SECONDS:
        return tuple(rest)
    near = {test for edit in candidate.edits for test in coverage.tests_of_file(edit.path)}
    random.Random(codebase.digest).shuffle(rest)  # noqa: S311
    kept, room = [], MOST_SECONDS
    for test in sorted(rest, key=lambda each: each not in near):
        if codebase.seconds[test] <= room:
            kept.append(test)
            room -= codebase.seconds[test]
    return tuple(sorted(kept))


class Maker:
    """One making of a set."""

    def __init__(self, settings: SetSettings, state: Path, log: MetricsLog, cache: Path, reporter: Reporter) -> None:
        self.settings, self.state, self.log, self.cache, self.reporter = settings, state, log, cache, reporter
        self.failed: dict[str, str] = {}  # packages that gave nothing, and why
        self.codebases: dict[str, tuple[Codebase, Row]] = {}
        self.kept: Counter[str] = Counter()  # tasks by package
        self.passed_over: Counter[str] = Counter()  # by generators, before any try
        self.lost: list[Row] = []  # tests that cannot be used

    async def make(self, workers: int = 0) -> None:
        """Try candidates of all packages until there are enough tasks of each."""
        wanted = {package.name: sum(self.settings.wanted(package).values()) for package in self.settings.package}
        with self.reporter.task(f"making {self.settings.name}", sum(wanted.values()), "tasks") as self.progress:

            async def one(package: PackageSettings) -> None:
                try:
                    await self._package(package, self.settings.wanted(package))
                except (UserError, SandboxError) as error:
                    self.failed[package.name] = str(error)
                    self.reporter.say(f"left out: {error}")
                self.progress.skip(max(0, wanted[package.name] - self.kept[package.name]))

            await side_by_side(one, self.settings.package, workers)

    async def _package(self, package: PackageSettings, wanted: dict[str, int]) -> None:
        if package.git:  # a branch goes on, and HEAD is another commit in the next clone: the manifest names this one
            where = SourceSettings(name=package.name, git=package.git, revision=package.revision)
            package = package.model_copy(update={"revision": await asyncio.to_thread(commit_of, where)})
        codebase, coverage = await self._examined(package)
        for name, generator in GENERATORS.items():
            rng = random.Random(f"{self.settings.seed}/{codebase.digest}/{name}")  # noqa: S311
            if codebase.command:
                language = codebase.command.language
                candidates = OTHER[name](codebase.tree, codebase.sources, language, rng, self.passed_over)
            else:
                run = coverage.run_by_tests()
                candidates = generator.candidates(codebase.tree, codebase.sources, rng, run, self.passed_over)
            await self._generated(codebase, coverage, candidates, wanted[name])
        if wanted["version"]:
            await self._releases(package)
        if wanted["history"]:
            await self._commits(package, codebase)

    async def _releases(self, package: PackageSettings) -> None:
        """Try the differences between releases, the newest first, about as many of each pair."""
        pins = [str(package.pypi), *(f"{package.name}=={version}" for version in package.older)]
        kept = 0
        for number, (newer, older) in enumerate(pairwise(pins)):
            share = -(-(self.settings.version - kept) // (len(pins) - 1 - number))
            try:
                codebase, coverage = await self._examined(package.model_copy(update={"pypi": newer}))
                settings = package.model_copy(update={"pypi": older})
                before = await asyncio.to_thread(unpack, settings, self.cache, self.reporter)
            except UserError as error:
                self.reporter.say(f"left out: {newer} after {older}: {error}")
                continue
            whole = history.candidate_between(before.tree, codebase.tree, codebase.sources, self.passed_over)
            if whole:
                kept += await self._generated(codebase, coverage, history.pieces(whole), share)

    async def _commits(self, package: PackageSettings, codebase: Codebase) -> None:
        """Try the commits of a repository, each on the tree as it was then."""
        where = SourceSettings(name=package.name, git=package.git, revision=package.revision)
        repository, head = await asyncio.to_thread(history_of, where, self.cache, self.reporter)
        kept = 0
        for candidate in history.candidates(
            repository, codebase.sources, self.passed_over, self.settings.history_lines, head
        ):
            then = package.model_copy(update={"revision": candidate.about["commit"]})
            reason = await self._screened(then, candidate)
            if reason:
                self.passed_over[reason.partition(":")[0]] += 1
            else:
                kept += await self._generated(*await self._examined(then), iter([candidate]), 1)
            self.reporter.check_stop()
            if kept == self.settings.history:
                break

    async def _screened(self, package: PackageSettings, candidate: Candidate) -> str:
        """Say why a commit cannot be a task, by two runs of the tests that it changed; most are told by these."""
        key = f"screen/{package.name}/{digest_of([candidate.about['commit'], package.model_dump()])[:16]}"
        row = self.log.get(key)
        if row is None:
            began, reason = time.monotonic(), ""
            try:
                unpacked = await asyncio.to_thread(unpack, package, self.cache, self.reporter)
                codebase = await asyncio.to_thread(with_environment, unpacked, package, self.cache)
                reason = await screen(codebase, candidate)
            except UserError as error:
                reason = f"commit cannot be used: {one_line(error)}"
            row = self.log.put(key, reason=reason, seconds=round(time.monotonic() - began, 2))
        return str(row["reason"])

    async def _examined(self, package: PackageSettings) -> tuple[Codebase, Coverage]:
        """Return a codebase with its stable tests, examined now or earlier."""
        unpacked = await asyncio.to_thread(unpack, package, self.cache, self.reporter)
        if not permissive(unpacked.licence) and not package.licence:
            advice = 'state it as `licence` if you may use it, or `licence = "proprietary"` for code of your own'
            raise UserError(f"{package.name}: its licence is {unpacked.licence or 'not known'}; {advice}")
        settings = digest_of(package.model_dump(exclude={"older", "share"}))
        note = self.state / "codebases" / f"{unpacked.key}-{settings[:8]}.json"
        if not note.exists():
            began = time.monotonic()
            plain = await asyncio.to_thread(with_environment, unpacked, package, self.cache)
            codebase, coverage, counts, lost = await examine(replace(plain, sandbox=settled(self.settings.sandbox)))
            facts = {
                "coverage": coverage.files,
                "counts": counts,
                "lost": lost,
                "took": round(time.monotonic() - began, 1),
            }
            write_json(note, {"row": codebase_row(codebase, package), **facts})
            self.reporter.say(f"{unpacked.key}: tests: {counted(counts)}")
        facts = read_json(note)
        codebase = await asyncio.to_thread(built_codebase, facts["row"], self.cache, self.reporter)
        codebase = replace(codebase, sandbox=settled(self.settings.sandbox))
        self.codebases[codebase.key] = codebase, facts["row"]
        self.lost += [{"package": codebase.key, **row} for row in facts.get("lost", [])]
        return codebase, Coverage(facts["coverage"])

    async def _generated(self, codebase: Codebase, coverage: Coverage, some: Iterator[Candidate], wanted: int) -> int:
        """Try candidates in their order until there are enough tasks; return how many there are."""
        kept = 0
        for number, candidate in zip(range(TRIES * wanted), some, strict=False):
            key = f"try/{codebase.key}/{_examination(codebase)}/{candidate.generator}/{number:05d}"
            row = self.log.get(key)
            if row is None:
                began = time.monotonic()
                row = await self._tried(codebase, coverage, candidate, key)
                row = self.log.put(key, **row, seconds=round(time.monotonic() - began, 2))
            if not row["reason"]:
                kept += 1
                self.kept[codebase.name] += 1
                self.progress.advance()
            self.reporter.check_stop()
            if kept == wanted:
                break
        return kept

    async def _tried(self, codebase: Codebase, coverage: Coverage, candidate: Candidate, key: str) -> Row:
        """Return the line of one try: the task without its prompts, or why it is none."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                verdict = await try_candidate(codebase, coverage, candidate)
                break
            except SandboxError as error:
                if attempt == ATTEMPTS:
                    raise
                self.reporter.say(f"trying again, for the sandbox failed: {one_line(error)}")
        row: Row = {"reason": verdict.reason, "kinds": candidate.kinds}
        if verdict.reason:
            return row
        rng = random.Random(f"{self.settings.seed}/{key}")  # noqa: S311
        task, row["reason"] = await asyncio.to_thread(sealed, codebase, candidate, verdict, rng)
        # So far only tests that run the changed code were tried; tests that share state break others, or hang them.
        if not row["reason"] and (wrong := await check(task, codebase)):
            row["reason"] = f"not confirmed: {wrong}"
        if not row["reason"]:
            seen = sorted(verdict.traces, key=lambda test: (function_of(test) in task.hidden, test))
            traces = {test: verdict.traces[test] for test in seen[:KEPT_TRACES]}
            row |= {"task": task_row(task, codebase), "about": candidate.about, "traces": traces}
        return row

    def unused(self) -> list[Row]:
        """Return what could not be used, why, and what to do: packages, tests, candidates; also written beside the log."""
        tries = Counter(
            (row["key"].split("/")[3], row["reason"].partition(":")[0]) for row in self._tries() if row["reason"]
        )
        early = Counter({("", reason): count for reason, count in self.passed_over.items()})
        rows = [*lost_packages(self.failed), *self.lost, *lost_candidates(tries), *lost_candidates(early)]
        write_text(self.state / "unused.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return rows

    def _tries(self) -> Iterator[Row]:
        """Yield the lines of the tries that this recipe makes; others are of another, or from before it was changed."""
        for row in sorted(self.log.rows("try/"), key=lambda each: str(each["key"])):
            _, name, examination, _, _ = row["key"].split("/")
            if name in self.codebases and _examination(self.codebases[name][0]) == examination:
                yield row

    def finish(self, path: Path) -> Row:
        """Draw the prompts and write the manifest; return its header, which says what the making gave."""
        tasks: dict[str, Row] = {}
        reasons: Counter[str] = Counter()
        kept: dict[str, Counter[str]] = {generator: Counter() for generator in get_args(Generator)}
        for row in self._tries():
            _, name, _, generator, _ = row["key"].split("/")
            reason = row["reason"]
            if not reason:
                task = self._prompted(row, self.codebases[name][0])
                reason = "" if task["prompts"] else "no prompt that does not leak"
                reason = "kept before" if task["task"] in tasks else reason
            if not reason:
                tasks[task["task"]] = task
                kept[generator][name] += 1
            reasons[f"{generator}: {reason.partition(':')[0] or 'kept'}"] += 1
        rows = {
            key: row
            for key, (_, row) in sorted(self.codebases.items())
            if key in {t["codebase"] for t in tasks.values()}
        }
        self._take(rows, tasks, kept)
        header = {"name": self.settings.name, "seed": self.settings.seed, "split": self.settings.split, "tasks": len(tasks),
                  "python": platform.python_version(), "sandbox": settled(self.settings.sandbox),
                  "kept": {name: counts for name, counts in kept.items() if counts},
                  "tries": dict(sorted(reasons.items())), "passed_over": dict(sorted(self.passed_over.items())),
                  "left_out": dict(sorted(self.failed.items())), "seconds": round(self.log.total("seconds"))}  # fmt: skip
        if not tasks:  # a manifest of nothing would be refused by whoever reads it
            counts = [f"{count} × {what}" for what, count in reasons.most_common(3)]
            why = [*(f"{package}: {reason}" for package, reason in sorted(self.failed.items())), *counts]
            raise UserError(f"not one task was made, so {path} is not written: {'; '.join(why) or 'none was wanted'}")
        write_set(path, header, rows.values(), tasks.values())
        return header

    def _take(self, codebases: dict[str, Row], tasks: dict[str, Row], kept: dict[str, Counter[str]]) -> None:
        """Add the tasks of other sets, which were validated when those were made."""
        for named, generators in self.settings.take.items():
            _, rows, theirs = read_rows(find_manifest(named, "take"))
            wanted = {row["task"]: row for row in theirs if row["generator"] in generators and row["task"] not in tasks}
            used = {row["codebase"] for row in wanted.values()}
            if both := sorted(used & codebases.keys()):  # a task names tests by their numbers in its codebase
                raise UserError(
                    f"{named} has a codebase {both[0]} as well; begin with another version, or do not take it"
                )
            codebases |= {row["codebase"]: row for row in rows if row["codebase"] in used}
            tasks |= wanted
            for row in wanted.values():
                kept[row["generator"]][row["codebase"]] += 1

    def _prompted(self, row: Row, codebase: Codebase) -> Row:
        """Return the line of a task with its prompts; what a test that the agent sees has printed is preferred."""
        task = task_of(row["task"], codebase)
        candidate = replace(task.candidate, about=row["about"])
        order = sorted(row["traces"], key=lambda test: function_of(test) in task.hidden)
        failures = [prompts.failure_of(test, row["traces"][test]) for test in order]
        rng = random.Random(f"{self.settings.seed}/{task.id}")  # noqa: S311
        return {**row["task"], "prompts": prompts.prompts(candidate, codebase.name, failures, rng, self.settings.split)}


def _examination(codebase: Codebase) -> str:
    """Return what tells one examination from another: a line names tests by their numbers in it."""
    return digest_of([codebase.digest, codebase.ids])[:8]


def sealed(codebase: Codebase, candidate: Candidate, verdict: Verdict, rng: random.Random) -> tuple[Task, str]:
    """Return a task with its hidden tests chosen, or why the tree that the agent would see gives the solution away."""
    changed = sum(span.last - span.first + 1 for span in candidate.spans)
    difficulty = {"lines": changed, "files": len(candidate.edits), "failing": len(verdict.fail_to_pass),
                  "sites": len(candidate.kinds)}  # fmt: skip
    digest = digest_of([asdict(edit) for edit in candidate.edits])[:8]
    name = f"{codebase.name}-{candidate.generator}-{digest}"
    category = CATEGORIES.get(candidate.generator, "debugging")
    task = Task(name, codebase.name, codebase.version, candidate, {}, verdict.fail_to_pass, verdict.pass_to_pass,
                hidden_of(codebase, verdict, rng), category, difficulty, verdict.seconds)  # fmt: skip
    if not task.hidden:
        return task, "too few of the failing tests can be hidden"
    try:
        seen = visible(task, codebase)
    except (UserError, SyntaxError, UnicodeDecodeError) as error:
        return task, f"its tests cannot be hidden: {one_line(error)}"
    with tempfile.TemporaryDirectory(prefix="etude-gate-", dir=FAST if Path(FAST).is_dir() else None) as work:
        tree = Path(work, "tree")
        shutil.copytree(codebase.tree, tree, symlinks=True)
        write_entries(tree, seen)
        leaks = gate(tree, candidate, codebase)
    if not codebase.command:
        leaks += gate(codebase.python.parent.parent / "lib", candidate, codebase, environment=True)
    return task, f"leak: {leaks[0]}" if leaks else ""


def hidden_of(codebase: Codebase, verdict: Verdict, rng: random.Random) -> tuple[str, ...]:
    """Draw the test functions that the agent does not see: at least half of those that fail, the only one if there is one."""
    functions = sorted(set(map(function_of, verdict.fail_to_pass)))
    if codebase.command:
        known = written(codebase)
        can = [each for each in functions if each.partition("::")[2] in known]
        return tuple(sorted(rng.sample(can, (len(functions) + 1) // 2))) if len(can) * 2 >= len(functions) else ()
    in_files = set()  # in the test files themselves: not inherited, not made by a loop
    for path in {function.partition("::")[0] for function in functions if ".py::" in function}:
        text = (codebase.tree / path).read_text(encoding="utf-8", errors="replace")
        in_files |= {f"{path}::{name.replace('.', '::')}" for name, _ in Parsed(path, text).definitions}
    can = [each for each in functions if each in in_files]
    wanted = (len(functions) + 1) // 2
    return tuple(sorted(rng.sample(can, wanted))) if len(can) >= wanted else ()
