"""Small errors in working functions: one, or two or three in the same function, class or module.

Messages, log calls, `__repr__`, annotations and version strings are left alone: tests seldom see them. Every site leads at
most one candidate, so that a package is covered before any place is tried twice.

What a mutation does to one node: each operator looks at a node and offers cuts, one offer a way to break it.

An offer need not parse; whoever takes it finds out. Texts between operands that hold a comment are left alone.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.tasks.generators.parsed import Cut, Function, overlap, parse, read_sources, shape, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.tasks.generators.parsed import Parsed

    Offer = tuple[str, tuple[Cut, ...]]
    import random
    from collections.abc import Mapping, Sequence
    from pathlib import Path


# Yields measured on twelve packages (facts/envs.md 1.3) and how much an error looks like one a person makes.
WEIGHTS = {
    "compare": 3.0, "boolop": 3.0, "negate": 2.5, "if_negate": 2.0, "if_swap": 2.0, "del_if": 2.0, "del_elif": 2.5, "del_else": 2.0,
    "binop": 1.5, "augmented": 1.5, "constant": 2.0, "default": 1.5, "twin": 3.0, "index": 2.0, "slice": 2.5, "swap_args": 2.0,
    "drop_keyword": 2.0, "wrong_variable": 0.4, "del_assign": 2.0, "del_expr": 1.5, "del_for": 1.0, "ret_none": 0.3,
    "loop_exit": 1.5, "remove_try": 1.5, "remove_with": 0.7, "except_less": 2.5,
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
ARITHMETIC = {
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
KEPT_ORDER = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "print",
    "super",
    "cast",
    "TypeVar",
    "namedtuple",
}


def between(file: Parsed, left: Any, right: Any, pattern: str, text: str) -> tuple[Cut, ...] | None:
    """Return the cut of the one operator between two operands."""
    first, last = file.span(left)[1], file.span(right)[0]
    gap = file.content[first:last].decode()
    found = re.fullmatch(rf"([\s)\\]*)(?P<op>{pattern})[\s(\\]*", gap)
    if not found:
        return None
    return (Cut(first + len(gap[: found.start("op")].encode()), first + len(gap[: found.end("op")].encode()), text),)


def _compare(file: Parsed, node: ast.Compare) -> Iterator[Offer]:
    operands = [node.left, *node.comparators]
    for i, operator in enumerate(node.ops):
        if cuts := between(file, operands[i], operands[i + 1], *COMPARISONS[type(operator)]):
            yield "compare", cuts


def _boolop(file: Parsed, node: ast.BoolOp) -> Iterator[Offer]:
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        if cuts := between(file, left, right, old, new):
            yield "boolop", cuts


def is_text(node: ast.expr) -> bool:
    """Whether an expression visibly builds a text: most often a message, which few tests look at."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _binop(file: Parsed, node: ast.BinOp) -> Iterator[Offer]:
    if type(node.op) in ARITHMETIC and not is_text(node):
        pattern, text = ARITHMETIC[type(node.op)]
        if cuts := between(file, node.left, node.right, pattern, text):
            yield "binop", cuts


def _unary(file: Parsed, node: ast.UnaryOp) -> Iterator[Offer]:
    first, last = file.span(node)
    if found := re.match(r"(not\b|-)\s*", file.content[first:last].decode()):
        yield "negate", (Cut(first, first + found.end()),)


def other_value(value: object) -> str | None:
    """Return a constant near another one."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int) and abs(value) < 1000:
        return str(value + 1 if value != 1 else 0)
    return None


def _constant(file: Parsed, node: ast.Constant) -> Iterator[Offer]:
    if text := other_value(node.value):
        yield "constant", (file.replaced(node, text),)


def _choice(file: Parsed, node: ast.IfExp) -> Iterator[Offer]:
    if not isinstance(node.orelse, (ast.IfExp, ast.Lambda)):
        yield (
            "if_swap",
            (file.replaced(node.body, file.source(node.orelse)), file.replaced(node.orelse, file.source(node.body))),
        )


def _subscript(file: Parsed, node: ast.Subscript) -> Iterator[Offer]:
    if isinstance(node.slice, ast.Slice):
        for bound in (node.slice.lower, node.slice.upper):
            if bound is not None:
                yield "slice", (file.replaced(bound, ""),)
    elif file.source(node.slice) in {"0", "-1"}:
        yield "index", (file.replaced(node.slice, "-1" if file.source(node.slice) == "0" else "0"),)


def _call(file: Parsed, node: ast.Call) -> Iterator[Offer]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    end = file.span(node.func)[1]
    if twin := TWINS.get(name):
        yield "twin", (Cut(end - len(name), end, twin),)
    if name in KEPT_ORDER:
        return
    for left, right in zip(node.args, node.args[1:], strict=False):
        texts = file.source(left), file.source(right)
        if texts[0] != texts[1] and not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            yield "swap_args", (file.replaced(left, texts[1]), file.replaced(right, texts[0]))
    parts = sorted([*node.args, *node.keywords], key=file.span)
    for before, part in zip([None, *parts], parts, strict=False):
        if isinstance(part, ast.keyword) and part.arg and (before is not None or len(parts) == 1):
            yield "drop_keyword", (Cut(file.span(before or part)[0 if before is None else 1], file.span(part)[1]),)


def _handler(file: Parsed, node: ast.ExceptHandler) -> Iterator[Offer]:
    if isinstance(node.type, ast.Tuple) and len(node.type.elts) == 2:
        for kept in node.type.elts:
            yield "except_less", (file.replaced(node.type, file.source(kept)),)


def _block_cut(file: Parsed, block: list[ast.stmt], text: bytes) -> Cut:
    return Cut(file.starts[block[0].lineno - 1], file.starts[block[-1].end_lineno or 0], text.decode())


def _block_text(file: Parsed, block: list[ast.stmt]) -> bytes:
    return file.content[file.starts[block[0].lineno - 1] : file.starts[block[-1].end_lineno or 0]]


def _header_before(file: Parsed, block: list[ast.stmt], header: bytes) -> int | None:
    """Return the line of the `else:` that a block belongs to."""
    line = block[0].lineno - 1
    while line and not file.lines[line - 1].strip().startswith(header):
        if not re.match(rb"\s*(#|$)", file.lines[line - 1]):
            return None
        line -= 1
    return line or None


def _if(file: Parsed, node: ast.If) -> Iterator[Offer]:
    if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        yield "if_negate", (file.replaced(node.test, f"not {file.source(node.test)}"),)
    if not node.orelse or not file.whole_lines(node.body[0]) or not file.whole_lines(node.orelse[0]):
        return
    begin = file.starts[node.lineno - 1]
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and file.source(node.orelse[0]).startswith("elif"):
        return
    if file.source(node).startswith("elif"):
        yield "del_elif", (Cut(begin, file.starts[(_header_before(file, node.orelse, b"else") or node.lineno) - 1]),)
    one, other = _block_text(file, node.body), _block_text(file, node.orelse)
    yield "if_swap", (_block_cut(file, node.body, other), _block_cut(file, node.orelse, one))
    if line := _header_before(file, node.orelse, b"else"):
        yield "del_else", (Cut(file.starts[line - 1], file.starts[node.end_lineno or 0]),)


def _unwrapped(file: Parsed, node: ast.Try | ast.With) -> Cut | None:
    """Return the cut that leaves the body of a statement, less indented; lines inside long strings keep theirs."""
    if not file.whole_lines(node) or not file.whole_lines(node.body[0]):
        return None
    extra = len(file.indent(node.body[0].lineno)) - len(file.indent(node.lineno))
    kept = {
        line
        for each in ast.walk(node)
        if isinstance(each, (ast.JoinedStr, ast.Constant))
        for line in range(each.lineno + 1, (each.end_lineno or 0) + 1)
    }
    first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
    lines = [text if n in kept else text[extra:] or text for n, text in enumerate(file.lines[first - 1 : last], first)]
    return Cut(file.starts[node.lineno - 1], file.starts[node.end_lineno or 0], b"".join(lines).decode())


def _try(file: Parsed, node: ast.Try) -> Iterator[Offer]:
    if not node.orelse and not node.finalbody and (cut := _unwrapped(file, node)):
        yield "remove_try", (cut,)


def _with(file: Parsed, node: ast.With) -> Iterator[Offer]:
    if not any(item.optional_vars for item in node.items) and (cut := _unwrapped(file, node)):
        yield "remove_with", (cut,)


def _return(file: Parsed, node: ast.Return) -> Iterator[Offer]:
    if node.value is not None and file.source(node.value) != "None":
        yield "ret_none", (file.replaced(node.value, "None"),)


def _augmented(file: Parsed, node: ast.AugAssign) -> Iterator[Offer]:
    if not is_text(node.value) and type(node.op) in ARITHMETIC:
        pattern, text = ARITHMETIC[type(node.op)]
        if cuts := between(file, node.target, node.value, pattern + "=", text + "="):
            yield "augmented", cuts


OPERATORS: dict[type[ast.AST], Callable[[Parsed, Any], Iterator[Offer]]] = {
    ast.Compare: _compare, ast.BoolOp: _boolop, ast.BinOp: _binop, ast.UnaryOp: _unary, ast.Constant: _constant, ast.IfExp: _choice,
    ast.Subscript: _subscript, ast.Call: _call, ast.ExceptHandler: _handler, ast.If: _if, ast.Try: _try, ast.With: _with,
    ast.Return: _return, ast.AugAssign: _augmented,
}  # fmt: skip


SHORTEST = 4  # lines of a function
COMBINED = 0.4  # share of candidates with more than one site
UNTESTED = {"__repr__", "__del__", "__sizeof__"}
LOGGERS = {"log", "logger", "logging", "_log", "_logger", "LOG", "LOGGER", "warnings", "warn", "print", "debug"}
NOT_ENTERED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Lambda)


@dataclass(frozen=True)
class Site:
    """One way to break one function."""

    file: Parsed
    function: str
    kind: str
    cuts: tuple[Cut, ...]
    lines: tuple[int, int]  # of which a test must run at least one
    line: int  # of the statement

    def clashes(self, other: Site) -> bool:
        """Whether both cannot be made."""
        return self.file is other.file and any(overlap(one, two) for one in self.cuts for two in other.cuts)


def _is_log(node: ast.AST) -> bool:
    while isinstance(node, (ast.Call, ast.Attribute, ast.Expr)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in LOGGERS


def _passed_over(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    return isinstance(node, NOT_ENTERED) or (isinstance(node, (ast.Expr, ast.Call)) and _is_log(node))


class _Finder:
    """Walks a function in the order of its text, knowing which names are bound by then."""

    def __init__(self, file: Parsed, name: str, function: Function) -> None:
        self.file, self.name, self.function = file, name, function
        arguments = function.args
        self.bound = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]

    def sites(self) -> Iterator[Site]:
        body = self.function.body
        start = body[1:] if ast.get_docstring(self.function, clean=False) is not None else body
        for default in [*self.function.args.defaults, *filter(None, self.function.args.kw_defaults)]:
            if isinstance(default, ast.Constant) and (text := other_value(default.value)):
                cuts = (self.file.replaced(default, text),)
                last = self.function.end_lineno or 0
                yield Site(self.file, self.name, "default", cuts, (body[0].lineno, last), self.function.lineno)
        yield from self._block(start)

    def _block(self, block: Sequence[ast.stmt]) -> Iterator[Site]:
        for statement in block:
            if _passed_over(statement):
                continue
            for kind in self._removals(statement):
                if cut := self.file.without(statement, block):
                    inside = getattr(statement, "body", [statement])
                    yield self._site(kind, (cut,), statement, inside[0])
            yield from self._node(statement, statement)
            targets = [
                each for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            ]
            self.bound += [each.id for each in targets if each.id not in self.bound]

    def _removals(self, statement: ast.stmt) -> Iterator[str]:
        """Name the way a statement may be removed: never one that only leaves a name unbound, which any run shows."""
        if isinstance(statement, ast.If) and not statement.orelse and self.file.source(statement).startswith("if"):
            yield "del_if"
        elif isinstance(statement, ast.For):
            yield "del_for"
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Call, ast.Await)):
            yield "del_expr"
        elif isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if all(
                isinstance(each, (ast.Attribute, ast.Subscript)) or getattr(each, "id", "") in self.bound
                for each in targets
            ):
                yield "del_assign"

    def _node(self, node: ast.AST, statement: ast.stmt) -> Iterator[Site]:
        if offers := OPERATORS.get(type(node)):
            for kind, cuts in offers(self.file, node):
                yield self._site(kind, cuts, statement, node)
        if isinstance(node, (ast.Break, ast.Continue)):
            yield self._site("loop_exit", (self._other_exit(node),), statement, node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.bound:
            others = [name for name in self.bound if name not in {node.id, "self", "cls"}]
            if others and node.id not in {"self", "cls"}:
                other = others[node.lineno % len(others)]
                yield self._site("wrong_variable", (self.file.replaced(node, other),), statement, node)
        for name, value in ast.iter_fields(node):
            if name in {"decorator_list", "returns", "annotation", "args"} and isinstance(
                node, (*Function.__args__, ast.AnnAssign)
            ):
                continue
            yield from self._field(value, statement)

    def _other_exit(self, node: ast.Break | ast.Continue) -> Cut:
        return self.file.replaced(node, "continue" if isinstance(node, ast.Break) else "break")

    def _field(self, value: object, statement: ast.stmt) -> Iterator[Site]:
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from self._block(value)
            return
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _passed_over(child):
                yield from self._node(child, statement)

    def _site(self, kind: str, cuts: tuple[Cut, ...], statement: ast.stmt, node: ast.AST) -> Site:
        first = getattr(node, "lineno", statement.lineno)
        simple = not hasattr(statement, "body")
        lines = (statement.lineno if simple else first, first)
        return Site(self.file, self.name, kind, cuts, lines, statement.lineno)


def sites_of(file: Parsed) -> list[Site]:
    """Return all sites of a file's functions."""
    found: list[Site] = []
    for name, node in file.definitions:
        short = (node.end_lineno or 0) - node.lineno + 1 < SHORTEST
        if isinstance(node, ast.ClassDef) or short or node.name in UNTESTED or "version" in node.name.lower():
            continue
        found += _Finder(file, name, node).sites()
    return found


def broken_by(sites: Sequence[Site]) -> tuple[Edit, ...] | None:
    """Return the edits of some sites of one file; None if the result does not parse or means the same."""
    file = sites[0].file
    text = file.cut([cut for site in sites for cut in site.cuts])
    try:
        if shape(parse(text)) == file.shape:
            return None
    except (SyntaxError, ValueError, RecursionError):
        return None
    return (Edit(file.path, text, file.text),)


def _companions(lead: Site, sites: Sequence[Site], rng: random.Random) -> list[Site]:
    """Return up to two more sites in the lead's function, class or module, none of which touches another."""
    scope = rng.choice([lead.function, lead.function.rpartition(".")[0], ""])
    near = [site for site in sites if site.function == scope or site.function.startswith(f"{scope}." if scope else "")]
    chosen = [lead]
    wanted = rng.choice([2, 3])
    for site in rng.sample(near, len(near)):
        if (
            len(chosen) < wanted
            and site.line not in {each.line for each in chosen}
            and not any(map(site.clashes, chosen))
        ):
            chosen.append(site)
    return chosen


def candidates(
    tree: Path, sources: Sequence[str], rng: random.Random, covered: Mapping[str, set[int]] | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """Yield mutations of the lines that tests run, the likeliest to be noticed first; what is left out is counted by reason."""
    left_out = Counter() if left_out is None else left_out
    by_file: dict[str, list[Site]] = {}
    for file in read_sources(tree, sources, left_out):
        sites = sites_of(file)
        run = None if covered is None else covered.get(file.path, set())
        by_file[file.path] = [s for s in sites if run is None or not run.isdisjoint(range(s.lines[0], s.lines[1] + 1))]
        left_out["site is run by no test"] += len(sites) - len(by_file[file.path])
    everything = [site for sites in by_file.values() for site in sites]
    shares = Counter((site.file.path, site.function) for site in everything)

    def chance(site: Site) -> float:
        weight = WEIGHTS[site.kind] / shares[site.file.path, site.function] ** 0.7  # long functions do not take it all
        return float(rng.random() ** (1 / weight))  # sorting by this draws without replacement, in proportion to weight

    seen: set[tuple[Edit, ...]] = set()
    for _, lead in sorted(((chance(site), site) for site in everything), key=lambda pair: -pair[0]):
        chosen = _companions(lead, by_file[lead.file.path], rng) if rng.random() < COMBINED else [lead]
        edits = broken_by(chosen)
        if edits is None or edits in seen:
            left_out["mutant does not parse or changes nothing" if edits is None else "mutant again"] += 1
            continue
        seen.add(edits)
        yield _candidate(chosen, edits)


def _candidate(sites: Sequence[Site], edits: tuple[Edit, ...]) -> Candidate:
    lead = sites[0]
    about = lead.file.about(lead.function, dict(lead.file.definitions)[lead.function])
    return Candidate("mutation", tuple(site.kind for site in sites), edits, solution_spans(edits), about)
