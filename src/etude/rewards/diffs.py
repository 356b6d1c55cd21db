"""Two versions of a file, compared: which lines came and went, in which functions, and which of them only look different."""

from __future__ import annotations

import ast
import difflib
import textwrap
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from etude.syntax import parse_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    Pair = tuple[str | None, str | None]  # a file before and after; None: there is none
    Change = Mapping[str, Pair]  # by path

DEEP = 200  # levels of syntax; ruff overflows its stack at some thousands
LONG = 2000  # lines from which on a difference need not be the shortest


class Hunk(NamedTuple):
    """Neighbouring lines, by their numbers from 0: before[first:last] became after[start:end]."""

    first: int
    last: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return how many lines went and came."""
        return self.last - self.first + self.end - self.start


@lru_cache(maxsize=4096)
def hunks(pair: Pair) -> tuple[Hunk, ...]:
    """Return where two versions differ."""
    before, after = ((text or "").splitlines() for text in pair)
    shorter = min(len(before), len(after))  # equal ends are cut off: difflib is quadratic
    head = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    tail = next((n for n in range(shorter - head) if before[-1 - n] != after[-1 - n]), shorter - head)
    inner = before[head : len(before) - tail], after[head : len(after) - tail]
    found = difflib.SequenceMatcher(None, *inner, autojunk=len(inner[1]) > LONG).get_opcodes()
    return tuple(Hunk(*(place + head for place in places)) for kind, *places in found if kind != "equal")


def size(change: Change) -> int:
    """Return how many lines were added and removed."""
    return sum(hunk.size for pair in change.values() for hunk in hunks(pair))


def churn(pair: Pair) -> int:
    """Return how many changed lines say the same as before: other spaces, line breaks, quotes, brackets or commas, same syntax."""
    before, after = ((text or "").splitlines() for text in pair)
    return sum(
        hunk.size
        for hunk in hunks(pair)
        if _meaning(before[hunk.first : hunk.last]) == _meaning(after[hunk.start : hunk.end])
    )


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
    """Return a file's syntax tree, or None: what a model wrote need not be Python, or is nested so deeply that tools crash."""
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
    found: dict[int, str] = {}
    waiting: list[tuple[ast.AST, str]] = [(parsed(text or "") or ast.Module([], []), "")]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if not isinstance(node, ast.ClassDef):
                found |= dict.fromkeys(range(first - 1, node.end_lineno or node.lineno), name)
        waiting += ((child, name) for child in ast.iter_child_nodes(node))
    return found


def touched(pair: Pair) -> set[str]:
    """Return the functions in which lines came or went."""
    before, after = map(owners, pair)
    old = {before.get(line, "") for hunk in hunks(pair) for line in range(hunk.first, hunk.last)}
    new = {after.get(line, "") for hunk in hunks(pair) for line in range(hunk.start, hunk.end)}
    return (old | new) - {""}


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
