"""Small errors in working functions: one, or two or three in the same function, class or module.

Messages, log calls, `__repr__`, annotations and version strings are left alone: tests seldom see them. Every site leads at
most one candidate, so that a package is covered before any place is tried twice.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.tasks.generators.operators import OPERATORS, WEIGHTS, other_value
from etude.tasks.generators.parsed import Cut, Function, overlap, parse, read_sources, shape, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.tasks.generators.parsed import Parsed

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
