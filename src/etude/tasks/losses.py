"""What of a repository could not be used for tasks, why, and what to do: counts by package, test file, test and candidate.

A reason is read from what was said (losses.toml): the message of a refusal, the end of a failing test's output.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from etude.tasks.suite import Run

Row = dict[str, Any]
EXAMPLE = 200  # characters
TEXTS = tomllib.loads(Path(__file__).with_name("losses.toml").read_text(encoding="utf-8"))
OF_OUTPUT, OF_PACKAGE = (
    [(re.compile(each["said"], re.IGNORECASE), each["reason"], each["fix"]) for each in TEXTS[of]]
    for of in ("output", "package")
)
OF_CANDIDATE: dict[str, str] = TEXTS["candidate"]


def lost_tests(first: Run, stable: Iterable[str], runs: Iterable[Run]) -> list[Row]:
    """Return the tests of an original tree that cannot be used, counted by reason."""
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}

    def count(what: str, reason: str, fix: str, name: str, said: str = "") -> None:
        key = what, reason, fix
        counts[key] += 1
        examples.setdefault(key, f"{name}: {' '.join(said.split())[-EXAMPLE:]}".removesuffix(": "))

    for path, why in first.broken.items():
        usual = "cannot be collected", "run pytest on it; `needs`, or leave it out of `tests`"
        count("test file", *_read(OF_OUTPUT, why, usual), f"{path}: {why}")
    for test in sorted(set(first.outcomes) - set(stable)):
        outcomes = {run.outcomes.get(test) for run in runs}
        trace = first.traces.get(test, "")
        if len(outcomes) > 1:
            count("test", "flaky", "passes only sometimes: it counts for nothing; deselect it if it is slow", test)
        elif outcomes == {"skipped"}:
            fix = "it says why itself: often a missing package (`needs`) or another system"
            count("test", "skipped here", fix, test)
        else:
            usual = "fails before anything is changed", "run pytest: it may need a file, a service, another version"
            count("test", *_read(OF_OUTPUT, trace, usual), test, trace)
    return [{"of": what, "reason": reason, "count": n, "fix": fix, "example": examples[what, reason, fix]}
            for (what, reason, fix), n in counts.most_common()]  # fmt: skip


def lost_packages(failed: Mapping[str, str]) -> list[Row]:
    """Return the packages without any task, with the reason."""
    rows = []
    for name, why in failed.items():
        usual = _read(OF_OUTPUT, why, ("none of its tests pass", "`needs`, `tests` or `pytest`; the example says why"))
        reason, fix = _read(OF_PACKAGE, why, usual)
        about = {"reason": reason, "count": 1, "fix": fix, "example": why[-EXAMPLE:]}
        rows.append({"package": name, "of": "package", **about})
    return rows


def lost_candidates(counts: Mapping[tuple[str, str], int]) -> list[Row]:
    """Return the candidates, by generator and reason, that became no task."""
    return [{"of": f"{generator} candidate" if generator else "candidate", "reason": reason, "count": n,
             "fix": OF_CANDIDATE.get(reason, "none")}
            for (generator, reason), n in sorted(counts.items(), key=lambda each: -each[1])]  # fmt: skip


def _read(known: list[tuple[re.Pattern[str], str, str]], said: str, usual: tuple[str, str]) -> tuple[str, str]:
    return next(((reason, fix) for pattern, reason, fix in known if pattern.search(said)), usual)
