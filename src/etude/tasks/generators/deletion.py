"""Features taken out of a package that still imports: a body, a function, it and its helpers, a class, a module.

What is gone is also taken out of the imports that name it and out of `__all__`, through re-exports. A definition that other code
needs while it is imported (a decorator, a base class, a constant's value) is left, for the package would not import without it.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.tasks.generators.parsed import Cut, Definition, Function, parse, read_sources, shape, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from etude.tasks.generators.parsed import Parsed

LEVELS = ("body", "function", "class_bodies", "helpers", "class", "module")  # from the easiest to the hardest
WEIGHTS = {"body": 1.0, "function": 1.0, "class_bodies": 3.0, "helpers": 3.0, "class": 3.0, "module": 4.0}
SHORTEST = 4  # lines of a function
LONGEST = {"body": 120, "function": 120, "helpers": 200, "class_bodies": 300, "class": 300, "module": 500}


class Target(NamedTuple):
    """A definition, or a module if there is no node."""

    file: Parsed
    name: str
    node: Definition | None


class Refused(Exception):  # noqa: N818 - a reason, not an error
    """Why something cannot be taken out."""


def import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: no bodies of functions."""
    for name, value in ast.iter_fields(tree):
        if name == "body" and isinstance(tree, Function | ast.Lambda):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from import_time(child)


def fewer(file: Parsed, parts: Sequence[Any], gone: set[int]) -> list[Cut]:
    """Return the cuts that take some parts out of a comma-separated list; the layout of the others stays."""
    spans = [file.span(part) for part in parts]
    kept = [i for i in range(len(parts)) if i not in gone]
    if not kept:
        return [Cut(spans[0][0], spans[-1][1])]
    cuts = [Cut(spans[i][0], spans[i + 1][0]) for i in sorted(gone) if i < kept[-1]]
    if kept[-1] < len(parts) - 1:
        cuts.append(Cut(spans[kept[-1]][1], spans[-1][1]))
    return cuts


class Package:
    """The source files of a package, and who imports what from whom."""

    def __init__(self, tree: Path, sources: Sequence[str], left_out: Counter[str]) -> None:
        self.files = read_sources(tree, sources, left_out)
        roots = [source.rpartition("/")[0] for source in sources]
        self.modules = {file.path: self._dotted(file.path, roots) for file in self.files}
        self.users = self._users()
        self.running: set[str] = set()  # functions that importing the package may call
        self.importers = self._importers()

    @staticmethod
    def _dotted(path: str, roots: Sequence[str]) -> str:
        root = max((root for root in roots if not root or path.startswith(f"{root}/")), key=len, default="")
        return path[len(root) :].strip("/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def _users(self) -> dict[str, set[tuple[str, str]]]:
        """Return where each name is used: path and top definition, imports left out."""
        users: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for file in self.files:
            for statement in file.tree.body:
                within = getattr(statement, "name", "")
                for node in ast.walk(statement):
                    name = getattr(node, "id", None) or getattr(node, "attr", None)
                    if isinstance(node, (ast.Name, ast.Attribute)) and name:
                        users[name].add((file.path, within))
        return users

    def _importers(self) -> dict[str, set[tuple[str, str]]]:
        """Return the names that importing the package looks up, and where: also in functions that are called by then."""
        called: dict[str, list[tuple[Parsed, str, ast.AST]]] = defaultdict(list)
        waiting: list[tuple[Parsed, str, ast.AST]] = []
        for file in self.files:
            for name, node in file.definitions:
                inner, _, last = name.rpartition(".")
                runs = inner.rpartition(".")[2] if last in {"__init__", "__new__", "__call__"} else last
                if isinstance(node, Function):
                    called[runs] += [(file, name.partition(".")[0], each) for each in node.body]
            for statement in file.tree.body:
                within = getattr(statement, "name", "")
                waiting += [(file, within, each) for each in (statement, *import_time(statement))]
        names: dict[str, set[tuple[str, str]]] = defaultdict(set)
        while waiting:
            file, within, used = waiting.pop()
            if isinstance(used, (ast.Name, ast.Attribute)):
                name = used.id if isinstance(used, ast.Name) else used.attr
                names[name].add((file.path, within))
                # `text.split()` calls no function of ours.
                bodies = called.pop(name, []) if isinstance(used, ast.Name) else []
                self.running |= {name} if bodies else set()
                waiting += [(f, top, each) for f, top, body in bodies for each in ast.walk(body)]
        return names

    def imported_from(self, file: Parsed, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module an import names."""
        if not node.level:
            return node.module or ""
        here = self.modules[file.path].split(".")
        up = node.level - file.path.endswith("__init__.py")
        return ".".join([*here[: len(here) - up], *filter(None, [node.module])])

    def with_helpers(self, target: Target) -> list[Target]:
        """Return a top definition and the private ones that only it, or what goes with it, uses."""
        private = {
            (file.path, name): Target(file, name, node)
            for file in self.files
            for name, node in file.definitions
            if name.startswith("_") and "." not in name and not name.startswith("__")
        }
        going = {(target.file.path, target.name): target}
        while more := {
            place: helper
            for place, helper in private.items()
            if place not in going and self.users[helper.name] and self.users[helper.name] <= {*going, place}
        }:
            going |= more
        return list(going.values())

    def without(self, targets: Sequence[Target]) -> tuple[Edit, ...]:
        """Return the edits that take definitions and modules out; `Refused` if the package would not import."""
        cuts: dict[str, list[Cut]] = defaultdict(list)
        modules = {self.modules[target.file.path] for target in targets if target.node is None}
        gone = {
            (self.modules[target.file.path], name)
            for target in targets
            for name in ([target.name] if target.node else [name for name, _ in target.file.definitions])
            if "." not in name
        }
        while sum(self._imports(file, gone, modules, cuts) for file in self.files):
            cuts.clear()
        for target in targets:
            if target.node:
                cuts[target.file.path].append(_removal(target.file, target.node))
        whole = {target.file.path for target in targets if target.node is None}
        going = {(target.file.path, target.name) for target in targets}
        for _, name in gone:
            if any(place not in going and place[0] not in whole for place in self.importers[name]):
                raise Refused("used while the package is imported")
        changed = [file for file in self.files if cuts[file.path] or file.path in whole]
        return tuple(Edit(f.path, None if f.path in whole else _cut(f, cuts[f.path]), f.text) for f in changed)

    def _imports(self, file: Parsed, gone: set[tuple[str, str]], modules: set[str], cuts: dict[str, list[Cut]]) -> bool:
        """Cut what is gone out of a file's imports and `__all__`; say whether more names are gone by that."""
        here, before = self.modules[file.path], len(gone)
        for node in import_time(file.tree):
            if isinstance(node, ast.Import) and any(alias.name in modules for alias in node.names):
                raise Refused("module is imported whole")
            if isinstance(node, ast.ImportFrom):
                source = self.imported_from(file, node)
                lost = source in modules
                dead = {
                    i
                    for i, a in enumerate(node.names)
                    if lost or (source, a.name) in gone or f"{source}.{a.name}" in modules
                }
                if node.names[0].name == "*":
                    gone |= {(here, name) for module, name in gone if module == source}
                gone |= {(here, node.names[i].asname or node.names[i].name) for i in dead}
                if dead:
                    cuts[file.path] += (
                        fewer(file, node.names, dead) if len(dead) < len(node.names) else [_removal(file, node)]
                    )
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and file.source(node).startswith("__all__"):
                elements = getattr(node.value, "elts", [])
                dead = {i for i, e in enumerate(elements) if (here, getattr(e, "value", None)) in gone}
                cuts[file.path] += fewer(file, elements, dead) if dead else []
        return len(gone) > before


def _cut(file: Parsed, cuts: Sequence[Cut]) -> str:
    text = file.cut(set(cuts))
    try:
        parse(text)
    except SyntaxError:
        raise Refused("what is left does not parse") from None
    return text


def _removal(file: Parsed, node: ast.stmt) -> Cut:
    """Return the cut of a statement in whatever block it is."""
    blocks = [getattr(each, name, []) for each in ast.walk(file.tree) for name in ("body", "orelse", "finalbody")]
    cut = file.without(node, next(block for block in blocks if isinstance(block, list) and node in block))
    if cut is None:
        raise Refused("it shares its line")
    return cut


def stub(file: Parsed, node: Function) -> Cut | None:
    """Return the cut that leaves a function's signature and docstring; None if there is nothing else or it shares a line."""
    documented = ast.get_docstring(node, clean=False) is not None
    rest = node.body[1:] if documented else node.body
    if not rest or not file.whole_lines(rest[0]) or file.source(rest[0]).startswith("raise NotImplementedError"):
        return None
    first = (node.body[0].end_lineno or 0) + 1 if documented else file.first_line(rest[0])
    line = file.indent(rest[0].lineno).decode() + "raise NotImplementedError" + file.line_end(rest[-1].end_lineno or 0)
    return Cut(file.starts[first - 1], file.starts[node.end_lineno or 0], line)


def _edits(package: Package, level: str, target: Target) -> tuple[list[Target], tuple[Edit, ...]]:
    file, node = target.file, target.node
    if level in {"body", "class_bodies"}:
        if target.name.removesuffix(".__init__") in package.running:
            raise Refused("called while the package is imported")
        functions = (
            [each for each in getattr(node, "body", []) if isinstance(each, Function)]
            if level == "class_bodies"
            else [node]
        )
        cuts = [cut for each in functions if isinstance(each, Function) and (cut := stub(file, each))]
        if not cuts:
            raise Refused("there is no body to take out")
        text = _cut(file, cuts)
        if shape(parse(text)) == file.shape:
            raise Refused("there is no body to take out")
        return [target], (Edit(file.path, text, file.text),)
    targets = package.with_helpers(target) if level == "helpers" else [target]
    if level == "helpers" and len(targets) == 1:
        raise Refused("there are no helpers")
    return targets, package.without(targets)


def _targets(
    package: Package, covered: Mapping[str, set[int]] | None, left_out: Counter[str]
) -> Iterator[tuple[str, Target]]:
    for file in package.files:
        run = None if covered is None else covered.get(file.path, set())
        everything: list[tuple[str, Definition | None]] = [*file.definitions]
        if not file.path.endswith(("__init__.py", "__main__.py", "setup.py")) and len(package.files) > 1:
            everything.append(("", None))
        for name, node in everything:
            lines = (node.end_lineno or 0) - node.lineno + 1 if node else len(file.lines)
            first = node.body[0].lineno if node else 1
            if run is not None and run.isdisjoint(range(first, first + lines)):
                left_out["definition is run by no test"] += 1
                continue
            for level in _levels(node, name):
                if SHORTEST <= lines <= LONGEST[level]:
                    yield level, Target(file, name, node)


def _levels(node: Definition | None, name: str) -> tuple[str, ...]:
    if node is None:
        return ("module",)
    whole = ("helpers",) if "." not in name and not name.startswith("_") else ()
    return ("class_bodies", "class", *whole) if isinstance(node, ast.ClassDef) else ("body", "function", *whole)


def candidates(
    tree: Path, sources: Sequence[str], rng: random.Random, covered: Mapping[str, set[int]] | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """Yield deletions of what tests run, all levels mixed; what is left out is counted by reason."""
    left_out = Counter() if left_out is None else left_out
    package = Package(tree, sources, left_out)
    drawn = [
        (rng.random() ** (1 / WEIGHTS[level]), level, target) for level, target in _targets(package, covered, left_out)
    ]
    for _, level, target in sorted(drawn, key=lambda each: -each[0]):
        try:
            gone, edits = _edits(package, level, target)
        except Refused as reason:
            left_out[f"{level}: {reason}"] += 1
            continue
        yield Candidate("deletion", (level,), edits, solution_spans(edits), _about(gone, level))


def _about(gone: Sequence[Target], level: str) -> dict[str, Any]:
    target = gone[0]
    about = target.file.about(target.name, target.node) if target.node else {"name": "", "path": target.file.path}
    public = [name for name, _ in target.file.definitions if not name.startswith("_") and "." not in name]
    return {**about, "level": LEVELS.index(level) + 1, "names": [each.name for each in gone] if target.node else public}
