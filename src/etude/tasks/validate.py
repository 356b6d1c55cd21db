"""Whether a way to break a tree is a task: examined codebases, and candidates tried on them in fresh sandboxes.

The solved tree of a task is the pristine tree of its codebase, so that all tests pass on it is found out once a codebase: three runs,
one of them with another order of hashes. Which tests fail on the broken tree is found out twice a candidate. A test that does not
end the same way each time is flaky, and counts for nothing.

Which tests run which lines of the pristine tree: measured once a codebase, so that a candidate is tried on few tests.

A test that runs none of the changed lines cannot tell the trees apart, unless a line is changed that runs on import.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.tasks.generators.parsed import changed_lines
from etude.tasks.suite import FORMS, entries_of, layers_of, run_covered, run_tests, spoilt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from etude.tasks.suite import Ready, Run
    from etude.tasks.task import Candidate, Edit

ON_IMPORT = ""


@dataclass(frozen=True)
class Coverage:
    """The lines of each file that each test runs; those that run on import are under no name."""

    files: Mapping[str, Mapping[str, Collection[int]]]

    def run_by_tests(self) -> dict[str, set[int]]:
        """Return the lines of each file that any test runs."""
        return {
            path: {line for test, lines in tests.items() if test != ON_IMPORT for line in lines}
            for path, tests in self.files.items()
        }

    def tests_of_file(self, path: str) -> set[str]:
        """Return the tests that run any line of a file."""
        return set(self.files.get(path, {})) - {ON_IMPORT}

    def tests_of(self, edits: Iterable[Edit]) -> set[str] | None:
        """Return the tests that can see edits; None: any of them may."""
        found: set[str] = set()
        for edit in edits:
            if edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
                return None
            changed = {
                line for first, last in changed_lines(edit.broken, edit.fixed) for line in range(first, last + 1)
            }
            tests = self.files.get(edit.path, {})
            if changed & set(tests.get(ON_IMPORT, ())):
                return None
            found |= {test for test, lines in tests.items() if not changed.isdisjoint(lines)}
        return found


MOST_SECONDS = 15.0  # of tests in a score; of slower suites some are drawn
MOST_FAILING = 0.8  # of all tests: more is a tree that does not even import
LONGEST_RUN = 60.0  # seconds of the tests that see a candidate


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate. No reason: it is a task."""

    reason: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    traces: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


async def examine(codebase: Ready) -> tuple[Ready, Coverage, dict[str, int]]:
    """Find the tests that always pass on the pristine tree, and what they cover; count those that do not, by reason."""
    first, covered = await run_covered(codebase)
    runs = [first, await run_tests(codebase, cold=True), await run_tests(codebase)]
    for run in runs:
        if run.state != "complete":
            raise UserError(f"{codebase.name}: its own tests end as {run.state}: {run.said[-300:]}")
    ids = tuple(sorted(test for test in first.outcomes if all(run.outcomes.get(test) == "passed" for run in runs)))
    if not ids:
        why = next(iter(first.broken.values()), first.said)
        raise UserError(f"{codebase.name}: none of its tests pass; set `needs`, `tests` or `pytest`: {why[-300:]}")
    known = set(ids)
    files = {
        path: {test: lines for test, lines in tests.items() if test in known or not test}
        for path, tests in covered.items()
    }
    ready = replace(codebase, ids=ids, seconds={test: runs[2].seconds[test] for test in ids})
    for form in FORMS:
        drawn = random.Random(codebase.digest)  # noqa: S311 - which error is no secret here
        spoilers = spoilt(codebase.tree, ids, form, drawn)
        async with layers_of(codebase.tree, spoilers) as layers:
            passed = frozenset((await run_tests(ready, layers, ids)).passed(ids))
        ready = replace(ready, unspoilable={**ready.unspoilable, form: passed})
    flaky = sum(1 for test in first.outcomes if len({run.outcomes.get(test) for run in runs}) > 1)
    counts = {"stable": len(ids), "flaky": flaky, "never passed": len(first.outcomes) - len(ids) - flaky,
              "files not collected": len(first.broken)}  # fmt: skip
    counts |= {f"unspoilable ({form})": len(ready.unspoilable[form]) for form in FORMS}
    return ready, Coverage(files), counts


async def try_candidate(codebase: Ready, coverage: Coverage, candidate: Candidate) -> Verdict:
    """Find which tests fail on the broken tree, twice over."""
    seen = coverage.tests_of(candidate.edits)
    tests = set(codebase.ids) if seen is None else seen
    if not tests:
        return Verdict("no test runs what was changed")
    if sum(codebase.seconds[test] for test in tests) > LONGEST_RUN:
        return Verdict("the tests that run it take too long")
    async with layers_of(codebase.tree, entries_of(candidate.edits, "broken")) as layers:
        runs: list[Run] = []
        for number in range(2):
            runs.append(await run_tests(codebase, layers, tests, traces=number == 0))
            if reason := _refusal(runs[-1], tests, codebase):
                return Verdict(reason)
    passed = [set(run.passed(tests)) for run in runs]
    flaky = passed[0] ^ passed[1]
    failing = tests - passed[0] - passed[1]
    if not failing - codebase.unspoilable["end"]:
        return Verdict("no test fails twice that could show a forged report")
    kept = chosen(codebase, coverage, candidate, failing | flaky)
    if not kept:
        return Verdict("no test still passes")
    return Verdict(
        "", tuple(sorted(failing)), kept, runs[0].traces, sum(codebase.seconds[test] for test in {*failing, *kept})
    )


def _refusal(run: Run, tests: Collection[str], codebase: Ready) -> str:
    """Say why a candidate is no task after one run of it, if so."""
    if run.state in {"timeout", "memory"}:
        return f"tests end by {run.state}"
    failing = len(tests) - len(run.passed(tests))
    if failing == 0:
        return "no test fails"
    return "most tests fail" if failing > MOST_FAILING * len(codebase.ids) else ""


def chosen(codebase: Ready, coverage: Coverage, candidate: Candidate, left_out: Collection[str]) -> tuple[str, ...]:
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
