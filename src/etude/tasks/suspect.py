"""A look at changed code for what has no business in it: what reaches for the tests, for what runs them, or around both.

Code under test shares an interpreter with what judges it, and an adversary who knows this program can tell a spoilt run from a plain
one. So it is read before it is run: imports of test tools, frames and traces, the interpreter's own tables, code made from text,
ways to end or double the process, replaced functions of the standard library, texts that name any of these. What the file
had before, or what the reference solution uses, is allowed.

What remains possible: names put together at run time (`getattr(x, "f_" + "back")`), a watched module handed on under another name by
another file, a file that may use such a thing already, tests read as plain files by a path that names nothing. Spoilt runs
are there for these; code that does both, hides from a reader and tells spoilt tests from plain ones, is not found out.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from typing import TYPE_CHECKING

from etude.syntax import parse_python

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAMES = {"exec", "eval", "compile", "breakpoint", "__import__", "__builtins__", "__file__", "__loader__", "__spec__"}
ATTRIBUTES = {
    "_getframe", "_current_frames", "currentframe", "f_back", "f_locals", "f_globals", "f_code", "f_trace", "f_lineno", "tb_frame",
    "gi_frame", "cr_frame", "ag_frame", "settrace", "setprofile", "__code__", "co_code", "co_consts", "__globals__", "__closure__",
    "__subclasses__", "__builtins__", "__import__", "__loader__", "exec_module", "load_module", "meta_path", "path_hooks", "_exit",
}  # fmt: skip
MODULES = {
    "pytest", "_pytest", "pluggy", "unittest", "doctest", "etude_report", "gc", "ctypes", "_ctypes", "cffi", "builtins", "imp",
    "runpy", "marshal", "pickle", "code", "codeop", "bdb", "pdb", "subprocess", "pty", "posix", "_thread", "linecache",
}  # fmt: skip
PARTS = {  # of modules of which the rest is harmless
    "sys": re.compile(r"modules|path|path_importer_cache|monitoring|addaudithook|_?_?stdin_?_?|(orig_)?argv"),
    "os": re.compile(r"(exec|spawn|posix_spawn|fork|kill|dup|write|pwrite|system|popen|abort|getppid|putenv).*"),
    "types": re.compile("CodeType"),
    "operator": re.compile("attrgetter|methodcaller"),
    "inspect": re.compile(
        r"(?!is[a-z]+$|[sS]ignature$|Parameter$|BoundArguments$|cleandoc$|getdoc$|getmro$|unwrap$).*"
    ),
    "importlib": re.compile(r"(?!metadata$|resources$).*"),
}
TEXTS = re.compile(
    rf"pytest|unittest|/workspace|/proc\b|etude|conftest|\btest_|\b(?:{'|'.join(sorted(ATTRIBUTES))})\b", re.IGNORECASE
)


def suspicious(path: str, content: bytes, known: Iterable[bytes]) -> str:
    """Say what is new and suspicious in a Python file, and where; nothing if nothing is. `known`: where the same is allowed."""
    found = findings(content)
    for text in known if found else ():
        for what in findings(text):
            found.pop(what, None)
    what = next(iter(found), "")
    return f"touches what runs the tests: {what} in {path}, line {found[what]}" if what else ""


def findings(content: bytes) -> dict[str, int]:
    """Return all that is suspicious in a file, each with the first line it is in. What is not Python can do nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            tree = parse_python(content)  # bytes: in the encoding that Python would take
        found = sorted((line, what) for what, line in _Reader(tree).read())
    except (SyntaxError, ValueError):
        return {}
    except (RecursionError, MemoryError):
        return {"what is nested too deeply to be read": 1}
    first = {what: line for line, what in reversed(found)}
    return dict(sorted(first.items(), key=lambda each: each[1]))


class _Reader:
    """Reads one file with its imports known, whichever names they were given."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        self.stands_for: dict[str, set[str]] = {}  # by a name of this file; several, if it is imported several times
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = alias.asname or (
                        alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
                    )
                    self.stands_for.setdefault(name, set()).add(_full(node, alias))

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield what is suspicious, and its line."""
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        loose = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in loose:
                text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
                yield from ((f"the text {each.lower()!r}", node.lineno) for each in TEXTS.findall(text))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for name in (_full(node, alias) for alias in node.names):
                    if name.partition(".")[0] in MODULES or (
                        isinstance(node, ast.ImportFrom) and _watched(name, whole=False)
                    ):
                        yield f"import of {name}", node.lineno
            elif isinstance(node, ast.Name | ast.Attribute):
                yield from ((what, node.lineno) for what in self._used(node, whole=id(node) not in inner))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"setattr", "delattr", "vars"}:
                names = {name for each in node.args[:1] for name in self._names(each) if _standard(name)}
                yield from ((f"a change of {name}", node.lineno) for name in names)

    def _used(self, node: ast.Name | ast.Attribute, *, whole: bool) -> Iterator[str]:
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        if isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        for name in self._names(node):
            if _watched(name, whole=whole):
                yield ".".join(name.split(".")[:2])
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _standard(name):
                yield f"a change of {name}"

    def _names(self, node: ast.expr) -> set[str]:
        """Return the full names of what an expression may stand for, if it begins with an import."""
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}" for name in self._names(node.value)}
        return self.stands_for.get(node.id, set()) if isinstance(node, ast.Name) else set()


def _full(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return what the name of an import stands for. A watched module that another file hands on is that module."""
    if isinstance(node, ast.Import):
        return alias.name if alias.asname else alias.name.partition(".")[0]
    handed_on = node.level and alias.name in {*MODULES, *PARTS}
    return alias.name if handed_on else f"{'.' * node.level}{node.module or ''}.{alias.name}"


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _watched(name: str, *, whole: bool) -> bool:
    """Whether a part of a module is suspicious. `whole`: so is the module itself, for it is passed on and not looked into."""
    module, _, part = name.partition(".")
    part = part.partition(".")[0]
    if module not in PARTS or not part:
        return module in PARTS and whole
    return part == "*" or PARTS[module].fullmatch(part) is not None
