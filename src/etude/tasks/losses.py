"""What of a repository could not be used, why, and what to do: packages, files of tests, tests, candidates, each counted.

A reason is read from what was said: the message of a refusal, the end of a failing test's output. The first that fits counts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from etude.tasks.suite import Run

Row = dict[str, Any]
EXAMPLE = 200  # characters
# What is said, the reason in a few words, what to do.
OF_OUTPUT = [(re.compile(said, re.IGNORECASE), reason, fix) for said, reason, fix in [
    (r"ModuleNotFoundError: No module named|ImportError: cannot import", "not importable",
     "`needs` the package that has the module, or `extras`; code that must be compiled is not built"),
    (r"fixture '.*' not found", "fixture not found", "`needs` the pytest plug-in, and `pytest = [\"-p\", \"ITS_MODULE\"]`"),
    (r"async def functions are not natively supported", "no plug-in for async tests",
     "`needs = [\"pytest-asyncio\"]` and `pytest = [\"-p\", \"pytest_asyncio.plugin\"]`"),
    (r"gaierror|name resolution|Name or service not known|Network is unreachable|Max retries exceeded|URLError", "needs a network",
     "none: there is no network; or start a server by `services`"),
    (r"Connection ?refused|could not connect|Error \d+ connecting to|No such file or directory\. Is the server running",
     "needs a server", "start it with `services`, and get it with `apt`"),
    (r"No such file or directory|FileNotFoundError|command not found", "a file or program is missing",
     "a program: `apt`; a file: it is not in the repository (submodules are not fetched), or is a build product"),
    (r"PermissionError|Read-only file system", "writes where it may not", "none: tests may write to /tmp, and not beside tests"),
    (r"DeprecationWarning|PytestRemoved|pytest\.PytestWarning|InvalidMarker|'.*' not found in `markers`", "pytest is too new",
     "`needs = [\"pytest<8\"]`, or a `lock`"),
    (r"timed? ?out|took longer", "too slow", "deselect it: `pytest = [\"--deselect=ID\"]`"),
]]  # fmt: skip
OF_PACKAGE = [(re.compile(said, re.IGNORECASE), reason, fix) for said, reason, fix in [
    (r"its licence is", "no licence", "`licence`: its SPDX name, or \"proprietary\" for code of your own"),
    (r"no (code|tests) found", "no code or no tests found", "`sources` and `tests`: folders and files"),
    (r"no environment for its tests", "no environment", "`needs`, `drop`, `lock = \"none\"`; what must be built needs its compiler"),
    (r"tests would need .* which needs it", "its tests need a package that needs it", "`drop` what brings it"),
    (r"anonymous shared memory|shmget", "needs shared memory",
     "none: the sandbox denies it, and with it PostgreSQL; Redis and SQLite work"),
    (r"not ready after|ended with 97", "a service does not start", "run its command by hand; the example has the end of its log"),
    (r"tests end as timeout", "too slow", "`tests` or `pytest = [\"--ignore=PATH\"]`: the suite has 10 minutes"),
    (r"tests end as memory", "too much memory", "`tests`: fewer; a sandbox has 2 GB"),
    (r"\bapt", "no packages of the system", "`apt-get update`, or install them and leave `apt` out"),
]]  # fmt: skip
OF_CANDIDATE = {
    "no test fails": "none: no test notices the change; more tests make more tasks",
    "no test runs what was changed": "none, as above",
    "most tests fail": "none: the change breaks the import of nearly everything",
    "no test still passes": "none, as above",
    "no test fails twice that could show a forged report": "tests that compare with a number or a word show it; `assert x` does not",
    "too few of the failing tests can be hidden": "tests that are made in loops or inherited cannot be hidden; write them out",
    "its tests cannot be hidden": "the test file is no Python of this version",
    "leak": "the solution stands elsewhere in the repository: remove the copy",
    "the tests that run it take too long": "faster tests; `share` asks for fewer tasks",
    "tests end by timeout": "none: the change makes the code run forever",
    "tests end by memory": "none: the change uses up memory",
    "not confirmed": "tests that depend on each other, or on time: deselect them with `pytest`",
    "no prompt that does not leak": "none: nothing can be said without giving the code away",
    "commit changes no tests": "none: only commits that change tests, too, have a check",
    "commit changes no source": "`sources`, if code lies elsewhere",
    "commit is too small": "`history_lines`: fewest changed lines",
    "commit is too large": "none: 600 lines is the limit",
    "tests of the commit pass without it": "none: they do not test what was changed",
    "tests of the commit do not pass": "as for tests that do not pass: `needs`, `apt`, `lock`; old commits may need an older Python",
    "commit cannot be used": "its tree has other places of code or tests, or other needs: a set of its own",
}


def lost_tests(first: Run, stable: Iterable[str], runs: Iterable[Run]) -> list[Row]:
    """Return what became of the tests of a pristine tree that cannot be used, by reason."""
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}

    def count(what: str, reason: str, fix: str, name: str, said: str = "") -> None:
        key = what, reason, fix
        counts[key] += 1
        examples.setdefault(key, f"{name}: {' '.join(said.split())[-EXAMPLE:]}".removesuffix(": "))

    for path, why in first.broken.items():
        count(
            "test file",
            *_read(OF_OUTPUT, why, ("cannot be collected", "run pytest on it; `needs`, or leave it out of `tests`")),
            f"{path}: {why}",
        )
    for test in sorted(set(first.outcomes) - set(stable)):
        outcomes = {run.outcomes.get(test) for run in runs}
        trace = first.traces.get(test, "")
        if len(outcomes) > 1:
            count("test", "flaky", "passes only sometimes: it counts for nothing; deselect it if it is slow", test)
        elif outcomes == {"skipped"}:
            count(
                "test", "skipped here", "it says why itself: often a missing package (`needs`) or another system", test
            )
        else:
            usual = (
                "fails before anything is changed",
                "run it with pytest: it may need a file, a service, another version",
            )
            count("test", *_read(OF_OUTPUT, trace, usual), test, trace)
    return [{"of": what, "reason": reason, "count": n, "fix": fix, "example": examples[what, reason, fix]}
            for (what, reason, fix), n in counts.most_common()]  # fmt: skip


def lost_packages(failed: Mapping[str, str]) -> list[Row]:
    """Return the packages that gave nothing."""
    rows = []
    for name, why in failed.items():
        usual = (
            *_read(OF_OUTPUT, why, ("none of its tests pass", "`needs`, `tests` or `pytest`; the example says why")),
        )
        reason, fix = _read(OF_PACKAGE, why, usual)
        rows.append(
            {"package": name, "of": "package", "reason": reason, "count": 1, "fix": fix, "example": why[-EXAMPLE:]}
        )
    return rows


def lost_candidates(counts: Mapping[tuple[str, str], int]) -> list[Row]:
    """Return the candidates, by generator and reason, that became no task."""
    return [{"of": f"{generator} candidate" if generator else "candidate", "reason": reason, "count": n,
             "fix": OF_CANDIDATE.get(reason, "none")}
            for (generator, reason), n in sorted(counts.items(), key=lambda each: -each[1])]  # fmt: skip


def _read(known: list[tuple[re.Pattern[str], str, str]], said: str, usual: tuple[str, str]) -> tuple[str, str]:
    return next(((reason, fix) for pattern, reason, fix in known if pattern.search(said)), usual)
