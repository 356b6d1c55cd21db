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

LEVELS = {  # from the easiest to the hardest: how often it is drawn, and the most lines it may take
    "body": (1.0, 120), "function": (1.0, 120), "class_bodies": (3.0, 300), "helpers": (3.0, 200), "class": (3.0, 300),
    "module": (4.0, 500),
}  # fmt: skip
SHORTEST = 4  # lines of a function


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
    last_left = max((i for i in range(len(parts)) if i not in gone), default=None)
    if last_left is None:
        return [Cut(spans[0][0], spans[-1][1])]
    cuts = [Cut(spans[i][0], spans[i + 1][0]) for i in sorted(gone) if i < last_left]
    return [*cuts, Cut(spans[last_left][1], spans[-1][1])] if last_left < len(parts) - 1 else cuts


class Package:
    """The source files of a package, and who imports what from whom."""

    def __init__(self, tree: Path, sources: Sequence[str], left_out: Counter[str]) -> None:
        self.files = read_sources(tree, sources, left_out)
        roots = [source.rpartition("/")[0] for source in sources]
        self.modules = {file.path: self._dotted(file.path, roots) for file in self.files}
        self.users: dict[str, set[tuple[str, str]]] = defaultdict(set)  # of a name: path and top definition, no imports
        for file in self.files:
            for statement in file.tree.body:
                for name in _names(ast.walk(statement)):
                    self.users[name].add((file.path, getattr(statement, "name", "")))
        self.running: set[str] = set()  # functions that importing the package may call
        self.importers = self._importers()

    @staticmethod
    def _dotted(path: str, roots: Sequence[str]) -> str:
        root = max((root for root in roots if not root or path.startswith(f"{root}/")), key=len, default="")
        return path[len(root) :].strip("/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

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
            for name in _names([used]):
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
        tops = [Target(file, name, node) for file in self.files for name, node in file.definitions if "." not in name]
        private = [each for each in tops if each.name.startswith("_") and not each.name.startswith("__")]
        places = {(each.file.path, each.name): each for each in private if self.users[each.name]}
        going, before = {(target.file.path, target.name): target}, 0
        while len(going) > before:
            before = len(going)
            going |= {p: each for p, each in places.items() if self.users[each.name] <= {*going, p}}
        return list(going.values())

    def without(self, targets: Sequence[Target]) -> tuple[Edit, ...]:
        """Return the edits that take definitions and modules out; `Refused` if the package would not import."""
        cuts: dict[str, list[Cut]] = defaultdict(list)
        whole = {target.file.path for target in targets if target.node is None}
        modules = {self.modules[path] for path in whole}
        going = {(target.file.path, target.name) for target in targets}
        going |= {(t.file.path, name) for t in targets if not t.node for name, _ in t.file.definitions}
        gone = {(self.modules[path], name) for path, name in going if name and "." not in name}
        while sum(self._imports(file, gone, modules, cuts) for file in self.files):
            cuts.clear()
        for target in targets:
            if target.node:
                cuts[target.file.path].append(_removal(target.file, target.node))
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
                source, names = self.imported_from(file, node), [alias.name for alias in node.names]
                lost = [source in modules or (source, n) in gone or f"{source}.{n}" in modules for n in names]
                if names[0] == "*":
                    gone |= {(here, name) for module, name in gone if module == source}
                gone |= {(here, a.asname or a.name) for a, dead in zip(node.names, lost, strict=True) if dead}
                if all(lost):
                    cuts[file.path].append(_removal(file, node))
                elif any(lost):
                    cuts[file.path] += fewer(file, node.names, {i for i, dead in enumerate(lost) if dead})
            elif isinstance(node, (ast.Assign, ast.AugAssign)) and file.source(node).startswith("__all__"):
                elements = getattr(node.value, "elts", [])
                dead = {i for i, e in enumerate(elements) if (here, getattr(e, "value", None)) in gone}
                cuts[file.path] += fewer(file, elements, dead) if dead else []
        return len(gone) > before


def _names(nodes: Iterator[ast.AST] | list[ast.AST]) -> Iterator[str]:
    """Yield the names and attributes among some nodes."""
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


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


def _stub(file: Parsed, node: Function) -> Cut | None:
    """Return the cut that leaves a function's signature and docstring; None if there is nothing else or it shares a line."""
    documented = ast.get_docstring(node, clean=False) is not None
    rest = node.body[1:] if documented else node.body
    if not rest or not file.whole_lines(rest[0]) or file.source(rest[0]).startswith("raise NotImplementedError"):
        return None
    first = (node.body[0].end_lineno or 0) + 1 if documented else file.first_line(rest[0])
    line = file.indent(rest[0].lineno) + "raise NotImplementedError" + file.line_end(rest[-1].end_lineno or 0)
    return Cut(file.starts[first - 1], file.starts[node.end_lineno or 0], line)


def _edits(package: Package, level: str, target: Target) -> tuple[list[Target], tuple[Edit, ...]]:
    file, node = target.file, target.node
    if level in {"body", "class_bodies"}:
        if target.name.removesuffix(".__init__") in package.running:
            raise Refused("called while the package is imported")
        inside = getattr(node, "body", []) if level == "class_bodies" else [node]
        cuts = [cut for each in inside if isinstance(each, Function) and (cut := _stub(file, each))]
        text = _cut(file, cuts)
        if not cuts or shape(parse(text)) == file.shape:
            raise Refused("there is no body to take out")
        return [target], (Edit(file.path, text, file.text),)
    targets = package.with_helpers(target) if level == "helpers" else [target]
    if level == "helpers" and len(targets) == 1:
        raise Refused("there are no helpers")
    return targets, package.without(targets)


def _targets(package: Package, covered: Mapping[str, set[int]], left_out: Counter[str]) -> Iterator[tuple[str, Target]]:
    for file in package.files:
        everything: list[tuple[str, Definition | None]] = [*file.definitions]
        if not file.path.endswith(("__init__.py", "__main__.py", "setup.py")) and len(package.files) > 1:
            everything.append(("", None))
        for name, node in everything:
            lines = (node.end_lineno or 0) - node.lineno + 1 if node else len(file.lines)
            first = node.body[0].lineno if node else 1
            if covered.get(file.path, set()).isdisjoint(range(first, first + lines)):
                left_out["definition is run by no test"] += 1
                continue
            for level in _levels(node, name):
                if SHORTEST <= lines <= LEVELS[level][1]:
                    yield level, Target(file, name, node)


def _levels(node: Definition | None, name: str) -> tuple[str, ...]:
    if node is None:
        return ("module",)
    whole = ("helpers",) if "." not in name and not name.startswith("_") else ()
    return ("class_bodies", "class", *whole) if isinstance(node, ast.ClassDef) else ("body", "function", *whole)


def candidates(
    tree: Path, sources: Sequence[str], rng: random.Random, covered: Mapping[str, set[int]], left_out: Counter[str]
) -> Iterator[Candidate]:
    """Yield deletions of what tests run, all levels mixed; what is left out is counted by reason."""
    package = Package(tree, sources, left_out)
    drawn = [(rng.random() ** (1 / LEVELS[level][0]), level, t) for level, t in _targets(package, covered, left_out)]
    for _, level, target in sorted(drawn, key=lambda each: -each[0]):
        try:
            gone, edits = _edits(package, level, target)
        except Refused as reason:
            left_out[f"{level}: {reason}"] += 1
            continue
        file, name, node = gone[0]
        about = file.about(name, node) if node else {"name": "", "path": file.path}
        public = [name for name, _ in file.definitions if not name.startswith("_") and "." not in name]
        about |= {"level": [*LEVELS].index(level) + 1, "names": [each.name for each in gone] if node else public}
        yield Candidate("deletion", (level,), edits, solution_spans(edits), about)
