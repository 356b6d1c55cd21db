"""Tests made wrong: the same tests with one expectation changed, so that right code fails them and nothing tells them from true ones.

Code under test shares an interpreter with what reports on it, so it can report what it likes. What it cannot know is what is true of
tests that it has never seen. So some of these are wrong, others are not, anew in each run: who forges outcomes, swallows assertions
or returns what claims to equal anything passes the wrong ones too, and is found out; who does not must do the work.

A spoilt test is a mutant of the true one. Expected values change by a letter, a digit or a sign, in the quotes and on the line they
have; other assertions turn into their opposites. An assertion that surely runs is changed where there is one, else all of them.
That a spoilt test does fail is not taken for granted: what passes it is compared with the reference solution (`score.py`).
"""

from __future__ import annotations

import ast
import re
import string
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from etude.tasks.generators.mutation import OTHER_OPERATOR, operators
from etude.tasks.generators.parsed import Cut, Function, Parsed, overlap
from etude.tasks.suite import file_entry

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from etude.sandbox.box import Entry

_PAIRS = ("Equal NotEqual", "True False", "In NotIn", "Is IsNot", "IsNone IsNotNone", "IsInstance NotIsInstance", "Greater LessEqual",
          "Less GreaterEqual", "Regex NotRegex", "AlmostEqual NotAlmostEqual")  # fmt: skip
TURNED = {f"assert{name}": f"assert{pair.split()[1 - i]}" for pair in _PAIRS for i, name in enumerate(pair.split())}
OPPOSITE = {**OTHER_OPERATOR, ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<")}
COMPARES = re.compile(r"(?i)assert_?(\w*_?equals?|\w*_?close|same)|eq_?")
RAISES = re.compile(r"raises(_?regexp?)?|assertRaises(Regexp?)?|assert_raises")
ERRORS = ("KeyError", "TypeError", "AttributeError", "ZeroDivisionError", "OSError", "IndexError")
TRIES = 40


def spoilt(tree: Path, functions: Iterable[str], wrong: Collection[str], rng: random.Random) -> list[Entry]:
    """Return the files that test functions (path::Class::name) are in, those among them spoilt that are to be wrong."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for path, _, name in (function.partition("::") for function in sorted(functions)):
        by_file[path] += [name.replace("::", ".")] if f"{path}::{name}" in wrong else []
    entries = []
    for path, names in by_file.items():
        with suppress(SyntaxError, UnicodeDecodeError, FileNotFoundError):  # not Python: its tests cannot be spoilt
            entries.append(file_entry(path, spoil((tree / path).read_bytes().decode(), names, rng)))
    return entries


def spoil(text: str, names: Iterable[str], rng: random.Random) -> str:
    """Return a test file whose functions of these qualified names are wrong; its lines stay where they are."""
    file = Parsed("", text)
    nodes, cuts = dict(file.definitions), list[Cut]()
    for function in (nodes.get(name) for name in names):
        if isinstance(function, Function):
            cuts += [each for each in _errors(file, function, rng) if not any(overlap(each, other) for other in cuts)]
    return file.cut(cuts)


def _errors(file: Parsed, function: Function, rng: random.Random) -> list[Cut]:
    """Return another expectation for one statement that surely runs, or for all there are, or one where there is none."""
    sure = [cut for statement in function.body for cut in _expectation(file, statement, rng)]
    nested = [cut for node in ast.walk(function) for cut in _expectation(file, node, rng)] if not sure else []
    if sure or nested:
        return [rng.choice(sure)] if sure else nested
    calls = [each for each in function.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    if calls:  # of a helper that checks for itself, and returns nothing
        start = file.span(calls[-1])[0]
        return [Cut(start, start, "assert ")]
    last = function.body[-1]
    start = file.span(last)[0]
    return [
        Cut(
            start,
            start,
            "assert None; " if last.lineno == function.lineno else f"assert None\n{file.indent(last.lineno)}",
        )
    ]


def _expectation(file: Parsed, node: ast.AST, rng: random.Random) -> Iterator[Cut]:
    """Yield the cut that changes what a statement expects, if it expects something."""
    match node:
        case ast.Assert(test=ast.Compare(ops=[ast.Eq()], left=left, comparators=[right]) as test):
            literal = isinstance(left, ast.Constant) and not isinstance(right, ast.Constant)
            yield _another(file, left if literal else right, test, rng)
        case ast.Assert(test=ast.Compare() as test):
            yield from _opposite(file, test)
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=operand)):
            yield file.replaced(node.test, file.source(operand))
        case ast.Assert():
            simple = isinstance(node.test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
            yield file.replaced(
                node.test, f"not {file.source(node.test)}" if simple else f"not ({file.source(node.test)})"
            )
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[_, expected, *_])) if (
            COMPARES.fullmatch(name) and not (name in TURNED and _is_bare(expected) and rng.random() < 0.5)
        ):
            yield _another(file, expected, None, rng)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) as method)) if name in TURNED:
            end = file.span(method)[1]
            yield Cut(end - len(name), end, TURNED[name])
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                match item.context_expr:
                    case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[error, *_]) if (
                        RAISES.fullmatch(name)
                    ):
                        yield file.replaced(error, rng.choice([each for each in ERRORS if each != file.source(error)]))


def _opposite(file: Parsed, test: ast.Compare) -> Iterator[Cut]:
    cuts = [cut for _, (cut,) in operators(file, "", [(test.left, test.comparators[0], test.ops[0])], table=OPPOSITE)]
    yield cuts[0] if cuts and len(test.ops) == 1 else file.replaced(test, f"not ({file.source(test)})")


def _is_bare(expected: ast.expr) -> bool:
    return not any(isinstance(node, ast.Constant) for node in ast.walk(expected))


def _another(file: Parsed, expected: ast.expr, test: ast.Compare | None, rng: random.Random) -> Cut:
    """Return a near value in the place of an expected one; of what has no constants in it the opposite, or a list of it."""
    if cut := _another_constant(file, expected, rng):
        return cut
    opposite = list(_opposite(file, test)) if test else []
    return opposite[0] if opposite and rng.random() < 0.5 else file.replaced(expected, f"[{file.source(expected)}]")


def _another_constant(file: Parsed, node: ast.AST, rng: random.Random) -> Cut | None:
    """Change one letter or digit of one constant, so that it is another value of the same kind."""
    inner = {id(part) for each in ast.walk(node) if isinstance(each, ast.JoinedStr) for part in ast.walk(each)}
    constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant) and id(each) not in inner]
    for constant in rng.sample(constants, len(constants)):
        source = file.source(constant)
        if isinstance(constant.value, bool):
            return file.replaced(constant, str(not constant.value))
        places = [i for i, sign in enumerate(source) if sign in string.digits + string.ascii_letters]
        for place in rng.choices(places, k=TRIES) if places and constant.value is not None else ():
            alike = next(
                kind
                for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase)
                if source[place] in kind
            )
            made = source[:place] + rng.choice(alike) + source[place + 1 :]
            with suppress(SyntaxError, ValueError):
                value = ast.literal_eval(made)
                if type(value) is type(constant.value) and value != constant.value:
                    return file.replaced(constant, made)
    return None
