"""What kind of code an agent left, in numbers: never one score, and compared with what the reference solution did to the same files.

Findings are those of ruff with one fixed set of rules, the same for every codebase and deaf to `noqa`, and only those that are new:
per file and rule, how many more there are after than before. Limits: taste is not measured; a new helper function is welcome wherever
it stands in a file that the reference touches; a new file is not, since the reference needed none.
"""

from __future__ import annotations

import fnmatch
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.rewards.diffs import churn, decisions, hunks, owners, parsed, size, touched

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from etude.rewards.diffs import Change, Pair

    Findings = Mapping[tuple[str, str], Counter[str]]  # by name and text of a file: findings by rule

PRINTS, COMMENTED = ("T100", "T201", "T203"), "ERA001"
RULES = ("F", "E4", "E7", "E9", "B", "C4", "PIE", "PLE", "PLW", "RET", "SIM", *PRINTS, COMMENTED)
RUFF = (
    "ruff", "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet", "--target-version", "py311",
    "--output-format", "json", "--select", ",".join(RULES),
)  # fmt: skip
SCRATCH = (
    "*.orig", "*.rej", "*.bak", "*.tmp", "*.swp", "*~", "*.log", "*.patch", "*.diff", "*.out",
    "scratch*", "tmp*", "temp*", "debug*", "repro*", "try_*", "check_*", "fix_*", "verify_*", "demo*", "foo.py", "a.py", "x.py",
)  # fmt: skip


@dataclass(frozen=True)
class Quality:
    """What one change is like; edits of tests are left out."""

    lines: int  # added and removed
    reference_lines: int
    files: int
    lint: int  # findings introduced
    complexity: int  # decision points added
    reference_complexity: int
    unrelated_files: int  # that the reference does not touch
    unrelated_functions: int  # that were there before and the reference leaves alone
    comment_density: float | None  # share of added lines of Python that hold a comment
    reference_comment_density: float | None
    churn: int  # changed lines that only look different
    scratch_files: int  # new files whose names say so
    debug_prints: int  # more than the reference adds
    commented_code: int
    unparsable: int  # files that are no longer Python


@dataclass(frozen=True)
class Work:
    """One agent's change, beside the reference's; `tests`: files and folders that hold the tests."""

    change: Change
    reference: Change
    tests: tuple[str, ...] = ()


def measure(works: Sequence[Work]) -> list[Quality]:
    """Return the quality of each change. ruff runs once for all of them, and sees each text once."""
    changes = [change for work in works for change in (work.change, work.reference)]
    findings = _linted(
        {key for change in changes for path, pair in _python(change).items() for key in _keys(path, pair)}
    )
    return [_quality(work, findings) for work in works]


def _quality(work: Work, findings: Findings) -> Quality:
    own, reference = (
        {path: pair for path, pair in change.items() if not _below(path, work.tests)}
        for change in (work.change, work.reference)
    )
    python, solution = _python(own), _python(reference)
    new, expected = _introduced(python, findings), _introduced(solution, findings)
    unrelated = {
        (path, name)
        for path in python.keys() & solution.keys()
        for name in (touched(own[path]) & set(owners(own[path][0]).values())) - touched(reference[path])
    }
    return Quality(
        lines=size(own), reference_lines=size(reference), files=len(own),
        lint=sum(count for rule, count in new.items() if rule not in {*PRINTS, COMMENTED}),
        complexity=_complexity(python), reference_complexity=_complexity(solution),
        unrelated_files=len(own.keys() - reference.keys()), unrelated_functions=len(unrelated),
        comment_density=_comment_density(python), reference_comment_density=_comment_density(solution),
        churn=sum(map(churn, own.values())),
        scratch_files=sum(_is_scratch(path, pair) for path, pair in own.items() if path not in reference),
        debug_prints=max(0, sum(new[rule] - expected[rule] for rule in PRINTS)), commented_code=new[COMMENTED],
        unparsable=sum(parsed(after or "") is None and parsed(before or "") is not None for before, after in python.values()),
    )  # fmt: skip


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _python(change: Change) -> Change:
    return {path: pair for path, pair in change.items() if path.endswith(".py")}


def _is_scratch(path: str, pair: Pair) -> bool:
    """Tell whether a new file looks like one that was made to try something and forgotten."""
    name = PurePosixPath(path).name.lower()
    return pair[0] is None and (path.startswith("test_") or any(fnmatch.fnmatch(name, each) for each in SCRATCH))


def _introduced(python: Change, findings: Findings) -> Counter[str]:
    """Return new findings by rule: one that moved within its file is not new."""
    found: Counter[str] = Counter()
    for path, pair in python.items():
        before, after = (findings[key] for key in _keys(path, pair))
        found.update(after - before)
    return found


def _complexity(python: Change) -> int:
    """Return decision points added; files that are not Python on one side are left out, and counted as unparsable."""
    trees = [[parsed(text or "") for text in pair] for pair in python.values()]
    return sum(decisions(after) - decisions(before) for before, after in trees if before and after)


def _comment_density(python: Change) -> float | None:
    added = commented = 0
    for pair in python.values():
        after = (pair[1] or "").splitlines()
        lines = [line for hunk in hunks(pair) for line in range(hunk.start, hunk.end) if after[line].strip()]
        added += len(lines)
        commented += len(_commented(pair[1] or "").intersection(lines))
    return commented / added if added else None


@lru_cache(maxsize=1024)
def _commented(text: str) -> frozenset[int]:
    """Return the lines that hold a comment; of text that cannot be tokenised, those that begin with one."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return frozenset(number for number, line in enumerate(text.splitlines()) if line.lstrip().startswith("#"))
    return frozenset(token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT)


def _keys(path: str, pair: Pair) -> list[tuple[str, str]]:
    """Return how both sides are linted. Names a model chose never reach the file system, but ruff treats one of them apart."""
    name = "__init__.py" if PurePosixPath(path).name == "__init__.py" else "module.py"
    return [(name, text or "") for text in pair]


def _linted(texts: set[tuple[str, str]]) -> Findings:
    found: dict[tuple[str, str], Counter[str]] = {key: Counter() for key in sorted(texts)}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(found):
            if parsed(text):
                Path(folder, str(number)).mkdir()
                Path(folder, str(number), name).write_text(text, encoding="utf-8", errors="replace")
        done = subprocess.run([sys.executable, "-m", *RUFF, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip()[-200:]
            raise UserError(f"ruff, which counts lint findings, failed: {why}; install it with: pip install ruff")
        order = list(found)
        for finding in json.loads(done.stdout):
            found[order[int(Path(finding["filename"]).parent.name)]][str(finding["code"])] += 1
    return found
