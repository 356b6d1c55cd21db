"""Small errors in working functions: one, or two or three in the same function, class or module.

An operator looks at one node of the syntax tree and offers cuts of the text, one offer a way to break it. An offer need not parse;
whoever takes it finds out. Operators whose surroundings hold a comment are left alone. So are messages, log calls, `__repr__`,
annotations and version strings: tests seldom see them. Every site leads at most one candidate, so that a package is covered before
any place is tried twice.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise, repeat
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.tasks.generators.parsed import Cut, Function, overlap, parse, read_sources, shape, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.tasks.generators.parsed import Parsed

    Offer = tuple[str, tuple[Cut, ...]]  # the kind of error, and the cuts that make it
    Operators = dict[type[ast.AST], Callable[[Parsed, Any], Iterator[Offer]]]

# Shares in percent of what 3,732 small fixes of 30 repositories change (benchmarks/bug_kinds.py, results/bug_kinds-cpu.json). Where
# operators share a kind it is divided: a wrong function by half, a quarter each for a method's name and its twin; a negation by half.
# 0.1 is for what was seen less often, or never.
WEIGHTS = {
    "del_if": 9.04, "del_assign": 6.19, "text": 6.18, "drop_operand": 5.24, "drop_keyword": 3.4, "wrong_variable": 3.26,
    "unwrap_call": 2.95, "wrong_attribute": 2.85, "wrong_function": 2.63, "del_expr": 2.0, "unwrap_if": 1.88,
    "drop_argument": 1.45, "drop_method": 1.42, "remove_try": 1.34, "twin": 1.31, "drop_element": 1.05, "extra_operand": 1.03,
    "except_less": 0.85, "compare": 0.81, "del_for": 0.79, "drop_term": 0.69, "del_return": 0.68, "except_other": 0.57,
    "index": 0.53, "drop_choice": 0.53, "del_elif": 0.48, "constant": 0.47, "drop_attribute": 0.45, "default": 0.34,
    "slice": 0.3, "drop_subscript": 0.28, "none_check": 0.27, "del_else": 0.26, "swap_args": 0.15, "boolop": 0.1, "negate": 0.1,
    "if_negate": 0.1, "if_swap": 0.1, "binop": 0.1, "augmented": 0.1, "ret_none": 0.1, "loop_exit": 0.1, "remove_with": 0.1,
    "del_raise": 0.1,
}  # fmt: skip
OTHER_OPERATOR: dict[type[ast.AST], tuple[str, str]] = {  # a pattern of the operator, and what takes its place
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: (r"\|", "&"),
    ast.Pow: (r"\*\*", "*"), ast.BitXor: (r"\^", "|"),
}  # fmt: skip
_TWINS = (
    "min max", "any all", "startswith endswith", "lstrip rstrip", "split rsplit", "lower upper", "find rfind", "index rindex",
    "partition rpartition", "keys values", "union intersection", "ceil floor", "ljust rjust", "removeprefix removesuffix",
)  # fmt: skip
TWINS = {name: pair.split()[1 - i] for pair in _TWINS for i, name in enumerate(pair.split())}
TWINS |= {"sorted": "list", "appendleft": "append", "popleft": "pop", "fullmatch": "match", "append": "extend"}
_ERRORS = (
    "KeyError IndexError", "AttributeError TypeError", "ValueError TypeError", "OSError ValueError", "ImportError AttributeError",
    "StopIteration IndexError", "LookupError KeyError", "Exception ValueError", "UnicodeDecodeError UnicodeEncodeError",
)  # fmt: skip
OTHER_ERRORS = {name: pair.split()[1 - i] for pair in reversed(_ERRORS) for i, name in enumerate(pair.split())}
ORDER_KNOWN = re.compile("is(instance|subclass)|(get|has|set)attr|print|super|cast|TypeVar|namedtuple")


def _is_text(node: ast.expr) -> bool:
    """Whether an expression visibly builds a text: most often a message, which few tests look at."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def operators(
    file: Parsed,
    kind: str,
    triples: Any,
    assigns: str = "",
    table: Mapping[type[ast.AST], tuple[str, str]] = OTHER_OPERATOR,
) -> Iterator[Offer]:
    """Offer another operator between each two operands, where nothing else stands between them."""
    for left, right, operator in triples:
        if type(operator) not in table:
            continue
        pattern, text = table[type(operator)]
        first, last = file.span(left)[1], file.span(right)[0]
        between = file.content[first:last].decode()
        if match := re.fullmatch(rf"([\s)\\]*)(?P<op>{pattern}{assigns})[\s(\\]*", between):
            begin, end = (first + len(between[:place].encode()) for place in match.span("op"))
            yield kind, (Cut(begin, end, text + assigns),)


def _compare(file: Parsed, node: ast.Compare) -> Iterator[Offer]:
    match node:
        case ast.Compare(ops=[ast.IsNot() | ast.Is() as op], comparators=[ast.Constant(value=None)]):
            truth = "" if isinstance(op, ast.IsNot) else "not "
            yield "none_check", (file.replaced(node, truth + file.source(node.left)),)
    operands = [node.left, *node.comparators]
    yield from operators(file, "compare", zip(operands, operands[1:], node.ops, strict=False))


def _boolop(file: Parsed, node: ast.BoolOp) -> Iterator[Offer]:
    yield from operators(file, "boolop", zip(node.values, node.values[1:], repeat(node.op), strict=False))
    yield from (("drop_operand", (cut,)) for cut in _without_one(file, node.values))


def _without_one(file: Parsed, items: Sequence[ast.expr]) -> Iterator[Cut]:
    """Yield cuts that take one item out of a row, with the sign between it and its neighbour."""
    spans = [file.span(each) for each in items]
    for place, (first, last) in enumerate(spans):
        if len(spans) > 1:
            yield Cut(first, spans[1][0]) if place == 0 else Cut(spans[place - 1][1], last)


def _binop(file: Parsed, node: ast.BinOp) -> Iterator[Offer]:
    if not _is_text(node):
        yield from operators(file, "binop", [(node.left, node.right, node.op)])
        yield from (("drop_term", (file.replaced(node, file.source(each)),)) for each in (node.left, node.right))


def _augmented(file: Parsed, node: ast.AugAssign) -> Iterator[Offer]:
    if not _is_text(node.value):
        yield from operators(file, "augmented", [(node.target, node.value, node.op)], assigns="=")


def _unary(file: Parsed, node: ast.UnaryOp) -> Iterator[Offer]:
    if match := re.match(r"(not\b|-)\s*", file.source(node)):
        first = file.span(node)[0]
        yield "negate", (Cut(first, first + match.end()),)


def _other_value(value: object) -> str:
    """Return a constant near another one, or nothing."""
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1 if value != 1 else 0) if isinstance(value, int) and abs(value) < 1000 else ""


def _constant(file: Parsed, node: ast.Constant) -> Iterator[Offer]:
    if text := _other_value(node.value):
        yield "constant", (file.replaced(node, text),)


def _exchanged(file: Parsed, one: ast.expr, other: ast.expr) -> tuple[Cut, ...]:
    return file.replaced(one, file.source(other)), file.replaced(other, file.source(one))


def _choice(file: Parsed, node: ast.IfExp) -> Iterator[Offer]:
    if not isinstance(node.orelse, (ast.IfExp, ast.Lambda)):
        yield "if_swap", _exchanged(file, node.body, node.orelse)
    yield from (("drop_choice", (file.replaced(node, file.source(each)),)) for each in (node.body, node.orelse))


def _row(file: Parsed, node: ast.Tuple | ast.List | ast.Set) -> Iterator[Offer]:
    if len(node.elts) > 2 and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        yield from (("drop_element", (cut,)) for cut in _without_one(file, node.elts))


def _attribute(file: Parsed, node: ast.Attribute) -> Iterator[Offer]:
    if isinstance(node.ctx, ast.Load) and file.source(node.value) not in {"self", "cls"}:
        yield "drop_attribute", (file.replaced(node, file.source(node.value)),)


def _subscript(file: Parsed, node: ast.Subscript) -> Iterator[Offer]:
    if isinstance(node.ctx, ast.Load):
        yield "drop_subscript", (file.replaced(node, file.source(node.value)),)
    if isinstance(node.slice, ast.Slice):
        yield from (("slice", (file.replaced(bound, ""),)) for bound in (node.slice.lower, node.slice.upper) if bound)
    elif (other := {"0": "-1", "-1": "0"}.get(file.source(node.slice))) is not None:
        yield "index", (file.replaced(node.slice, other),)


def _call(file: Parsed, node: ast.Call) -> Iterator[Offer]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    end = file.span(node.func)[1]
    if twin := TWINS.get(name):
        yield "twin", (Cut(end - len(name), end, twin),)
    if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        yield "unwrap_call", (file.replaced(node, file.source(node.args[0])),)
    if isinstance(node.func, ast.Attribute) and file.source(node.func.value) not in {"self", "cls"}:
        yield "drop_method", (file.replaced(node, file.source(node.func.value)),)
    if len(node.args) > 1:
        yield "drop_argument", (Cut(file.span(node.args[-2])[1], file.span(node.args[-1])[1]),)
    if ORDER_KNOWN.fullmatch(name):
        return
    for left, right in pairwise(node.args):
        starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
        if not starred and file.source(left) != file.source(right):
            yield "swap_args", _exchanged(file, left, right)
    parts = sorted([*node.args, *node.keywords], key=file.span)
    for before, part in zip([None, *parts], parts, strict=False):
        if isinstance(part, ast.keyword) and part.arg and (before is not None or len(parts) == 1):
            yield "drop_keyword", (Cut(file.span(before or part)[0 if before is None else 1], file.span(part)[1]),)


def _handler(file: Parsed, node: ast.ExceptHandler) -> Iterator[Offer]:
    if isinstance(node.type, ast.Tuple) and len(node.type.elts) == 2:
        yield from (("except_less", (file.replaced(node.type, file.source(each)),)) for each in node.type.elts)
    elif isinstance(node.type, ast.Name) and (other := OTHER_ERRORS.get(node.type.id)):
        yield "except_other", (file.replaced(node.type, other),)


def _else_line(file: Parsed, block: list[ast.stmt]) -> int | None:
    """Return the line of the `else:` that a block belongs to."""
    line = block[0].lineno - 1
    while line and re.match(rb"\s*(#|$)", file.lines[line - 1]):
        line -= 1
    return line if line and file.lines[line - 1].strip().startswith(b"else") else None


def _if(file: Parsed, node: ast.If) -> Iterator[Offer]:
    if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        yield "if_negate", (file.replaced(node.test, f"not {file.source(node.test)}"),)
    if (
        not node.orelse
        and file.source(node).startswith("if")
        and not isinstance(node.body[-1], (ast.Return, ast.Raise))
    ):
        yield from (("unwrap_if", cuts) for cuts in _unwrapped(file, node))
    if not node.orelse or not file.whole_lines(node.body[0]) or not file.whole_lines(node.orelse[0]):
        return
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and file.source(node.orelse[0]).startswith("elif"):
        return
    line = _else_line(file, node.orelse)
    if file.source(node).startswith("elif"):
        yield "del_elif", (Cut(file.starts[node.lineno - 1], file.starts[(line or node.lineno) - 1]),)
    blocks = [(file.starts[b[0].lineno - 1], file.starts[b[-1].end_lineno or 0]) for b in (node.body, node.orelse)]
    texts = [file.content[first:last].decode() for first, last in reversed(blocks)]
    yield "if_swap", tuple(Cut(*block, text) for block, text in zip(blocks, texts, strict=True))
    if line:
        yield "del_else", (Cut(file.starts[line - 1], file.starts[node.end_lineno or 0]),)


def _unwrapped(file: Parsed, node: ast.If | ast.Try | ast.With) -> Iterator[tuple[Cut]]:
    """Yield the cut that leaves the body of a statement, less indented; lines inside long strings keep theirs."""
    if file.whole_lines(node) and file.whole_lines(node.body[0]):
        extra = len(file.indent(node.body[0].lineno)) - len(file.indent(node.lineno))
        strings = [each for each in ast.walk(node) if isinstance(each, (ast.JoinedStr, ast.Constant))]
        inside = {line for each in strings for line in range(each.lineno + 1, (each.end_lineno or 0) + 1)}
        lines = list(enumerate(file.lines, 1))[node.body[0].lineno - 1 : node.body[-1].end_lineno]
        text = b"".join(line if number in inside else line[extra:] or line for number, line in lines).decode()
        yield (Cut(file.starts[node.lineno - 1], file.starts[node.end_lineno or 0], text),)


def _try(file: Parsed, node: ast.Try) -> Iterator[Offer]:
    if not node.orelse and not node.finalbody:
        yield from (("remove_try", cuts) for cuts in _unwrapped(file, node))


def _with(file: Parsed, node: ast.With) -> Iterator[Offer]:
    if not any(item.optional_vars for item in node.items):
        yield from (("remove_with", cuts) for cuts in _unwrapped(file, node))


def _return(file: Parsed, node: ast.Return) -> Iterator[Offer]:
    if node.value is not None and file.source(node.value) != "None":
        yield "ret_none", (file.replaced(node.value, "None"),)
        if isinstance(node.value, (ast.Call, ast.Await)):
            yield "del_return", (file.replaced(node, file.source(node.value)),)


def _loop_exit(file: Parsed, node: ast.Break | ast.Continue) -> Iterator[Offer]:
    yield "loop_exit", (file.replaced(node, "continue" if isinstance(node, ast.Break) else "break"),)


OPERATORS: Operators = {
    ast.Compare: _compare, ast.BoolOp: _boolop, ast.BinOp: _binop, ast.UnaryOp: _unary, ast.Constant: _constant, ast.IfExp: _choice,
    ast.Subscript: _subscript, ast.Call: _call, ast.ExceptHandler: _handler, ast.If: _if, ast.Try: _try, ast.With: _with,
    ast.Return: _return, ast.AugAssign: _augmented, ast.Tuple: _row, ast.List: _row, ast.Set: _row, ast.Attribute: _attribute,
}  # fmt: skip
WALKED: Operators = {**OPERATORS, ast.Break: _loop_exit, ast.Continue: _loop_exit}

SHORTEST = 4  # lines of a function
COMBINED = 0.4  # share of candidates with more than one site
UNTESTED = {"__repr__", "__del__", "__sizeof__"}
LOGGERS = {"log", "logger", "logging", "_log", "_logger", "LOG", "LOGGER", "warnings", "warn", "print", "debug"}
NOT_ENTERED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Lambda)
ANNOTATED = (*Function.__args__, ast.AnnAssign)


class Site(NamedTuple):
    """One way to break one function."""

    file: Parsed
    function: str
    kind: str
    cuts: tuple[Cut, ...]
    lines: tuple[int, int]  # of which a test must run at least one
    line: int  # of the statement


def _skipped(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    inner: ast.AST | None = node if isinstance(node, (ast.Expr, ast.Call)) else None
    while isinstance(inner, (ast.Call, ast.Attribute, ast.Expr)):
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return isinstance(node, NOT_ENTERED) or (isinstance(inner, ast.Name) and inner.id in LOGGERS)


WORD = re.compile(r"[A-Za-z][\w.-]{1,24}")


@lru_cache(maxsize=16)
def names_of(file: Parsed) -> Mapping[str, set[str]]:
    """Return what a file uses: `OWNER.` attributes that are read, `(` functions that are called, `'` words that are constants."""
    names: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            names[f"{ast.unparse(node.value)}."].add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names["("].add(node.func.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            names["'"].add(node.value)
    return names


def _near(name: str, others: set[str]) -> str:
    """Return the name that is most like one, by its ends and length: what people confuse, and what is least seen."""

    def likeness(other: str) -> tuple[int, str]:
        ends = len(commonprefix([name, other])) + len(commonprefix([name[::-1], other[::-1]]))  # noqa: RUF071 - of characters
        return 2 * ends - abs(len(name) - len(other)), other

    return max(others, key=likeness)


class _Finder:
    """Walks a function in the order of its text, knowing which names are bound by then."""

    def __init__(self, file: Parsed, name: str, function: Function) -> None:
        self.file, self.name, self.function, args = file, name, function, function.args
        self.bound = [each.arg for each in [*args.posonlyargs, *args.args, *args.kwonlyargs]]

    def sites(self) -> Iterator[Site]:
        body, last = self.function.body, self.function.end_lineno or 0
        for default in [*self.function.args.defaults, *filter(None, self.function.args.kw_defaults)]:
            if isinstance(default, ast.Constant) and (text := _other_value(default.value)):
                cuts = (self.file.replaced(default, text),)
                yield Site(self.file, self.name, "default", cuts, (body[0].lineno, last), self.function.lineno)
        yield from self._block(body[1:] if ast.get_docstring(self.function, clean=False) is not None else body)

    def _block(self, block: Sequence[ast.stmt]) -> Iterator[Site]:
        for statement in block:
            raised = isinstance(statement, ast.Raise)
            if _skipped(statement) and not raised:
                continue
            if (kind := self._removal(statement)) and (cut := self.file.without(statement, block)):
                yield self._site(kind, (cut,), statement, getattr(statement, "body", [statement])[0])
            if raised:
                continue
            yield from self._node(statement, statement)
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            stored = [node.id for node in names if isinstance(node.ctx, ast.Store)]
            self.bound += [name for name in stored if name not in self.bound]

    def _removal(self, statement: ast.stmt) -> str:
        """Name the way a statement may be removed, if any: never one that only leaves a name unbound, which any run shows."""
        match statement:
            case ast.If(orelse=[]) if self.file.source(statement).startswith("if"):
                return "del_if"
            case ast.For():
                return "del_for"
            case ast.Raise():
                return "del_raise"
            case ast.Expr(value=ast.Call() | ast.Await()):
                return "del_expr"
            case ast.Assign() | ast.AugAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                parts = (ast.Attribute, ast.Subscript)
                bound = all(isinstance(each, parts) or getattr(each, "id", "") in self.bound for each in targets)
                return "del_assign" if bound else ""
        return ""

    def _node(self, node: ast.AST, statement: ast.stmt) -> Iterator[Site]:
        for kind, cuts in WALKED[type(node)](self.file, node) if type(node) in WALKED else ():
            yield self._site(kind, cuts, statement, node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.bound:
            others = [name for name in self.bound if name not in {node.id, "self", "cls"}]
            if others and node.id not in {"self", "cls"}:
                cuts = (self.file.replaced(node, others[node.lineno % len(others)]),)
                yield self._site("wrong_variable", cuts, statement, node)
        yield from (self._site(kind, (cut,), statement, node) for kind, cut in self._other_names(node))
        for name, value in ast.iter_fields(node):
            if not (name in {"decorator_list", "returns", "annotation", "args"} and isinstance(node, ANNOTATED)):
                yield from self._field(value, statement)

    def _other_names(self, node: ast.AST) -> Iterator[tuple[str, Cut]]:
        """Offer another attribute of the same object, function or word of the same file in place of one; a condition gets another."""
        names = names_of(self.file)
        match node:
            case ast.Attribute(ctx=ast.Load(), value=owner) if others := names[f"{ast.unparse(owner)}."] - {node.attr}:
                end = self.file.span(node)[1]
                yield "wrong_attribute", Cut(end - len(node.attr), end, _near(node.attr, others))
            case ast.Call(func=ast.Name(id=name)) if others := names["("] - {name}:
                yield "wrong_function", self.file.replaced(node.func, _near(name, others))
            case ast.Constant(value=str(word)) if WORD.fullmatch(word) and (others := names["'"] - {word}):
                source = self.file.source(node)
                if source[1:-1] == word:
                    yield "text", self.file.replaced(node, source[0] + _near(word, others) + source[0])
            case ast.If(test=test) if bound := [name for name in self.bound if name not in {"self", "cls"}]:
                if self.file.source(node).startswith("if") and not isinstance(test, (ast.BoolOp, ast.NamedExpr)):
                    name = bound[node.lineno % len(bound)]
                    if name not in {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}:
                        yield "extra_operand", self.file.replaced(test, f"{self.file.source(test)} and {name}")

    def _field(self, value: object, statement: ast.stmt) -> Iterator[Site]:
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from self._block(value)
            return
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _skipped(child):
                yield from self._node(child, statement)

    def _site(self, kind: str, cuts: tuple[Cut, ...], statement: ast.stmt, node: ast.AST) -> Site:
        first = getattr(node, "lineno", statement.lineno)
        lines = (first if hasattr(statement, "body") else statement.lineno, first)
        return Site(self.file, self.name, kind, cuts, lines, statement.lineno)


def sites_of(file: Parsed) -> list[Site]:
    """Return all sites of a file's functions."""
    sites: list[Site] = []
    for name, node in file.definitions:
        short = (node.end_lineno or 0) - node.lineno + 1 < SHORTEST
        if not (isinstance(node, ast.ClassDef) or short or node.name in UNTESTED or "version" in node.name.lower()):
            sites += _Finder(file, name, node).sites()
    return sites


def broken_by(sites: Sequence[Site]) -> tuple[Edit, ...] | None:
    """Return the edits of some sites of one file; None if the result does not parse or means the same."""
    file = sites[0].file
    text = file.cut([cut for site in sites for cut in site.cuts])
    try:
        return None if shape(parse(text)) == file.shape else (Edit(file.path, text, file.text),)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _companions(lead: Site, sites: Sequence[Site], rng: random.Random) -> list[Site]:
    """Return up to two more sites in the lead's function, class or module, none of which touches another."""
    scope = rng.choice([lead.function, lead.function.rpartition(".")[0], ""])
    near = [site for site in sites if site.function == scope or site.function.startswith(f"{scope}." if scope else "")]
    chosen = [lead]
    wanted = rng.choice([2, 3])
    for site in rng.sample(near, len(near)):
        touches = any(overlap(one, two) for each in chosen for one in site.cuts for two in each.cuts)
        if len(chosen) < wanted and not touches and site.line not in {each.line for each in chosen}:
            chosen.append(site)
    return chosen


def candidates(
    tree: Path, sources: Sequence[str], rng: random.Random, covered: Mapping[str, set[int]], left_out: Counter[str]
) -> Iterator[Candidate]:
    """Yield mutations of the lines that tests run, the likeliest to be noticed first; what is left out is counted by reason."""
    by_file: dict[str, list[Site]] = {}
    for file in read_sources(tree, sources, left_out):
        sites, run = sites_of(file), covered.get(file.path, set())
        by_file[file.path] = [s for s in sites if not run.isdisjoint(range(s.lines[0], s.lines[1] + 1))]
        left_out["site is run by no test"] += len(sites) - len(by_file[file.path])
    everything = [site for sites in by_file.values() for site in sites]
    shares = Counter((site.file.path, site.function) for site in everything)
    kinds = Counter(site.kind for site in everything)

    def chance(site: Site) -> float:
        weight: float = (
            WEIGHTS[site.kind] / kinds[site.kind]
        )  # a kind that has many places comes no more often for that
        weight /= shares[site.file.path, site.function] ** 0.7  # long functions do not take it all
        # Sorting by this draws without replacement, in proportion to weight.
        return float(math.log(rng.random() or 1e-300) / weight)

    seen: set[tuple[Edit, ...]] = set()
    for _, lead in sorted(((chance(site), site) for site in everything), key=lambda pair: -pair[0]):
        chosen = _companions(lead, by_file[lead.file.path], rng) if rng.random() < COMBINED else [lead]
        edits = broken_by(chosen)
        if edits is None or edits in seen:
            left_out["mutant does not parse or changes nothing" if edits is None else "mutant again"] += 1
            continue
        seen.add(edits)
        about = lead.file.about(lead.function, dict(lead.file.definitions)[lead.function])
        yield Candidate("mutation", tuple(site.kind for site in chosen), edits, solution_spans(edits), about)
