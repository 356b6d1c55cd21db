"""What kind of code an agent left, in numbers: never one score, and compared with what the reference solution did to the same files.

Two versions of a file are compared: which lines came and went, in which functions, and which of them only look different. Lint
findings are those of ruff with one fixed set of rules, the same for every codebase and deaf to `noqa`, and only those that are new:
per file and rule, how many more there are after than before. Limits: taste is not measured; a new helper function is welcome wherever
it stands in a file that the reference touches; a new file is not, since the reference needed none. A file of more than 300,000
characters is not read as code: it counts as unparsable, and as replaced from its first line to its last. So judging takes seconds.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import json
import subprocess
import sys
import tempfile
import textwrap
import tokenize
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.syntax import parse_python
from etude.tasks.generators.parsed import LARGEST_FILE, differing, is_below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Pair = tuple[str | None, str | None]  # a file before and after; None: there is none
    Change = Mapping[str, Pair]  # by path
    Findings = Mapping[tuple[str, str], Counter[str]]  # by name and text of a file: findings by rule

DEEP = 200  # levels of syntax; ruff overflows its stack at some thousands


@lru_cache(maxsize=4096)
def hunks(pair: Pair) -> list[tuple[int, int, int, int]]:
    """Return the runs of lines that differ, by their numbers from 0: before[i:j] became after[k:m]."""
    before, after = ((text or "").splitlines() for text in pair)
    if max(len(text or "") for text in pair) > LARGEST_FILE:
        return [(0, len(before), 0, len(after))] if before != after else []
    return differing(before, after)


def size(change: Change) -> int:
    """Return how many lines were added and removed."""
    return sum(j - i + m - k for pair in change.values() for i, j, k, m in hunks(pair))


def churn(pair: Pair) -> int:
    """Return how many changed lines say the same as before: other spaces, line breaks, quotes, brackets or commas, same syntax."""
    before, after = ((text or "").splitlines() for text in pair)
    return sum(j - i + m - k for i, j, k, m in hunks(pair) if _meaning(before[i:j]) == _meaning(after[k:m]))


def _meaning(lines: list[str]) -> tuple[str, ...]:
    """Return the indentation, syntax and comments of some lines; or the lines themselves if they do not parse alone."""
    written = [line for line in lines if line.strip()]
    indentation = written[0][: -len(written[0].lstrip())] if written else ""
    tree = parsed(textwrap.dedent("\n".join(written)))
    if tree is None:
        return indentation, *(line.strip() for line in written)
    return indentation, ast.dump(tree), *(line.partition("#")[2] for line in written if "#" in line)


@lru_cache(maxsize=4096)
def parsed(text: str) -> ast.Module | None:
    """Return a file's syntax tree, or None: what a model wrote need not be Python, or is too long or too deep for tools to read."""
    if len(text) > LARGEST_FILE:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = parse_python(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    level: list[ast.AST] = [tree]
    for _ in range(DEEP):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return None if level else tree


@lru_cache(maxsize=1024)
def owners(text: str | None) -> Mapping[int, str]:
    """Return for each line inside of a function the qualified name of the innermost one."""
    names: dict[int, str] = {}
    waiting: list[tuple[ast.AST, str]] = [(parsed(text or "") or ast.Module([], []), "")]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if not isinstance(node, ast.ClassDef):
                names |= dict.fromkeys(range(first - 1, node.end_lineno or node.lineno), name)
        waiting += ((child, name) for child in ast.iter_child_nodes(node))
    return names


def touched(pair: Pair) -> set[str]:
    """Return the functions in which lines came or went."""
    before, after = map(owners, pair)
    old = {before.get(line, "") for i, j, _, _ in hunks(pair) for line in range(i, j)}
    return (old | {after.get(line, "") for _, _, k, m in hunks(pair) for line in range(k, m)}) - {""}


@lru_cache(maxsize=1024)
def decisions(tree: ast.AST) -> int:
    """Return the number of decision points (McCabe, counted as radon does): a function's complexity is one more than its own."""
    return sum(map(_decisions, ast.walk(tree)))


def _decisions(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.Assert():
            return 1
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.match_case(pattern=ast.MatchAs(pattern=None)):
            return 0  # `case _` is an else
        case ast.match_case():
            return 1
        case _:
            return 0


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


def measure(change: Change, reference: Change, tests: Sequence[str] = ()) -> Quality:
    """Return the quality of an agent's change, beside the reference's; `tests`: files and folders that hold the tests."""
    own, reference = ({path: each[path] for path in each if not is_below(path, tests)} for each in (change, reference))
    python, solution = ({path: each[path] for path in each if path.endswith(".py")} for each in (own, reference))
    findings = _linted({key for path, pair in (*python.items(), *solution.items()) for key in _keys(path, pair)})
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


def _is_scratch(path: str, pair: Pair) -> bool:
    """Return whether a new file looks like one that was made to try something and forgotten."""
    name = PurePosixPath(path).name.lower()
    return pair[0] is None and (path.startswith("test_") or any(fnmatch.fnmatch(name, each) for each in SCRATCH))


def _introduced(python: Change, findings: Findings) -> Counter[str]:
    """Return new findings by rule: one that moved within its file is not new."""
    new: Counter[str] = Counter()
    for path, pair in python.items():
        before, after = (findings[key] for key in _keys(path, pair))
        new.update(after - before)
    return new


def _complexity(python: Change) -> int:
    """Return decision points added; files that are not Python on one side are left out, and counted as unparsable."""
    trees = [[parsed(text or "") for text in pair] for pair in python.values()]
    return sum(decisions(after) - decisions(before) for before, after in trees if before and after)


def _comment_density(python: Change) -> float | None:
    added = commented = 0
    for pair in python.values():
        after = (pair[1] or "").splitlines()
        lines = [line for _, _, k, m in hunks(pair) for line in range(k, m) if after[line].strip()]
        added += len(lines)
        commented += len(_commented(pair[1] or "").intersection(lines))
    return commented / added if added else None


@lru_cache(maxsize=1024)
def _commented(text: str) -> frozenset[int]:
    """Return the lines that hold a comment; of text that cannot be tokenised, those that begin with one."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline)) if len(text) <= LARGEST_FILE else []
    except (SyntaxError, tokenize.TokenError):
        return frozenset(number for number, line in enumerate(text.splitlines()) if line.lstrip().startswith("#"))
    return frozenset(token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT)


def _keys(path: str, pair: Pair) -> list[tuple[str, str]]:
    """Return how both sides are linted. Names a model chose never reach the file system, but ruff treats one of them apart."""
    name = "__init__.py" if PurePosixPath(path).name == "__init__.py" else "module.py"
    return [(name, text or "") for text in pair]


def _linted(texts: set[tuple[str, str]]) -> Findings:
    order = sorted(texts)
    findings: dict[tuple[str, str], Counter[str]] = {key: Counter() for key in order}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(order):
            if parsed(text):
                Path(folder, str(number)).mkdir()
                Path(folder, str(number), name).write_text(text, encoding="utf-8", errors="replace")
        done = subprocess.run([sys.executable, "-P", "-m", *RUFF, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip()[-200:]
            raise UserError(f"ruff, which counts lint findings, failed: {why}; install it with: pip install ruff")
        for finding in json.loads(done.stdout):
            findings[order[int(Path(finding["filename"]).parent.name)]][str(finding["code"])] += 1
    return findings
