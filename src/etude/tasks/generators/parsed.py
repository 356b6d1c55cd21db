"""Python files as text with a syntax tree over it, changed by cutting spans and never by printing the tree.

A printed tree loses comments and quotes, and so shows where it was changed. Positions are bytes of the UTF-8 text, as in
`ast`; line ends stay as they are in the file, so a tree must be written back without translating them.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.syntax import parse_python
from etude.tasks.task import Edit, Span

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LONG = 2000  # lines from which on a difference need not be the shortest: difflib is quadratic
LARGEST_FILE = 300_000  # bytes; longer ones are data or generated
TEST_FOLDERS = frozenset({"test", "tests", "testing"})
OTHER_TESTS = re.compile(  # of languages other than Python
    r"(.*/)?(t|spec|__tests__)/.+\.[a-z]+|(.*/)?([^/]*(_test\.go|[._-](test|spec)\.[cm]?[jt]sx?|[-_](test|spec)s?\.(rs|[ch]|rb)|\.t)|[^/]*Tests?\.java"
    r"|tests?\.([ch]|rs|go|rb|[cm]?[jt]s))"
)


class Cut(NamedTuple):
    """Bytes [first, last) of a text give way to another text."""

    first: int
    last: int
    text: str = ""


def overlap(one: Cut, other: Cut) -> bool:
    """Whether two cuts cannot be made both; an insertion at the edge of another cut counts, for the order would matter."""
    return one.first <= other.last and other.first <= one.last


def cut_text(text: str, cuts: Iterable[Cut]) -> str:
    """Return a text with cuts made that do not overlap."""
    content = text.encode()
    for first, last, new in sorted(cuts, reverse=True):
        content = content[:first] + new.encode() + content[last:]
    return content.decode()


def is_test_path(path: str) -> bool:
    """Whether a file holds tests or what tests need."""
    *folders, name = path.split("/")
    named = name.startswith("test_") or name.endswith(("_test.py", "_tests.py"))
    other = not name.endswith(".py") and OTHER_TESTS.fullmatch(path) is not None
    return named or other or name in {"conftest.py", "tests.py", "test.py"} or not TEST_FOLDERS.isdisjoint(folders)


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether a path is one of some files and folders, or in one of the folders."""
    return any(place in {".", path} or path.startswith(f"{place}/") for place in places)


def parse(text: str) -> ast.Module:
    """Parse and compile a text, so that a `return` outside a function is refused too; SyntaxError if it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = parse_python(text)
        compile(text, "<task>", "exec", dont_inherit=True)
    return tree


def shape(tree: ast.AST) -> str:
    """Return what a tree means: equal for texts that differ in layout, quotes and comments only."""
    return ast.dump(tree, annotate_fields=False)


class Parsed:
    """A file of a tree. `lines` keep their ends (a form feed is none); `starts`: the bytes they begin at, and the end of the text."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.content = path, text, text.encode()
        self.lines = self.content.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; SyntaxError if the text is not Python."""
        return parse(self.text)

    @cached_property
    def shape(self) -> str:
        return shape(self.tree)

    @cached_property
    def definitions(self) -> list[tuple[str, Definition]]:
        """Functions and classes with their qualified names, those inside functions left out."""
        return list(_definitions(self.tree, ""))

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends; parentheses around an expression are outside."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: Any) -> str:
        first, last = self.span(node)
        return self.content[first:last].decode()

    def replaced(self, node: Any, text: str) -> Cut:
        return Cut(*self.span(node), text)

    def first_line(self, node: ast.stmt) -> int:
        """Return the first line of a statement, its decorators and the comments directly above it included."""
        line: int = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        indent = self.indent(line)
        while line > 1 and self.lines[line - 2].lstrip().startswith(b"#") and self.indent(line - 1) == indent:
            line -= 1
        return line

    def indent(self, line: int) -> str:
        """Return the white space a line begins with."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip(b" \t\f"))].decode()

    def whole_lines(self, node: ast.stmt) -> bool:
        """Whether a statement shares its lines with no other: no semicolon, nothing before it."""
        first, last = self.span(node)
        before = self.content[self.starts[node.lineno - 1] : first]
        after = self.content[last : self.starts[node.end_lineno or 0]].strip()
        return not before.strip(b" \t\f") and (not after or after.startswith(b"#"))

    def without(self, node: ast.stmt, block: Sequence[ast.stmt]) -> Cut | None:
        """Return the cut that removes a statement from its block; None if it shares its lines.

        Comments above it go too, and the blank lines after a definition: no gap shows where it was.
        """
        if not self.whole_lines(node):
            return None
        first, line = self.starts[self.first_line(node) - 1], node.end_lineno or 0
        if len(block) == 1:
            return Cut(first, self.starts[line], self.indent(node.lineno) + "pass" + self.line_end(line))
        while isinstance(node, Definition) and line < len(self.lines) and not self.lines[line].strip():
            line += 1
        return Cut(first, self.starts[line])

    def line_end(self, line: int) -> str:
        text = self.lines[line - 1]
        return text[len(text.rstrip(b"\r\n")) :].decode()

    def cut(self, cuts: Iterable[Cut]) -> str:
        return cut_text(self.text, cuts)

    def around(self, first: int, last: int) -> list[tuple[str, int, int]]:
        """Return the definitions around some lines, the outermost first: name, first and last line."""
        spans = [(name, self.first_line(node), node.end_lineno or 0) for name, node in self.definitions]
        return [each for each in spans if each[1] <= first and last <= each[2]]

    def name_at(self, line: int) -> str:
        """Return the qualified name of the innermost definition around a line, or nothing."""
        return next((name for name, *_ in reversed(self.around(line, line))), "")

    def about(self, name: str, node: Definition) -> dict[str, Any]:
        """Return what prompts may say of a definition."""
        signature = f"class {node.name}"
        if not isinstance(node, ast.ClassDef):
            signature = f"def {node.name}({ast.unparse(node.args)})"
        doc = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
        return {"name": name, "path": self.path, "signature": signature, "docstring": " ".join(doc.split())}


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _definitions(child, prefix)


def plain_text(content: bytes) -> str | None:
    """Return a file's text with its line ends, or None if it is binary, too long, or begins with a byte-order mark."""
    if len(content) > LARGEST_FILE or content.startswith(b"\xef\xbb\xbf") or b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def paths_below(tree: Path, places: Sequence[str]) -> list[str]:
    """Return the files at or below some places of a tree, relative to it, in order."""
    files: set[Path] = set()
    for at in (tree / place for place in places):
        files |= {at} if at.is_file() else {path for path in at.rglob("*") if path.is_file() and not path.is_symlink()}
    return sorted(path.relative_to(tree).as_posix() for path in files)


def read_texts(tree: Path, paths: Iterable[str], left_out: Counter[str]) -> dict[str, str]:
    """Return the plain text files among some; the others are counted."""
    texts = {path: plain_text((tree / path).read_bytes()) for path in paths}
    left_out.update("file is long or not plain UTF-8" for text in texts.values() if text is None)
    return {path: text for path, text in texts.items() if text is not None}


def read_sources(tree: Path, sources: Sequence[str], left_out: Counter[str]) -> list[Parsed]:
    """Return the Python files of a package that are not tests; what cannot be used is counted by reason."""
    paths = [path for path in paths_below(tree, sources) if path.endswith(".py") and not is_test_path(path)]
    files = []
    for path, text in read_texts(tree, paths, left_out).items():
        file = Parsed(path, text)
        try:
            _ = file.tree
        except (SyntaxError, RecursionError):
            left_out["file is not Python of this version"] += 1
            continue
        files.append(file)
    return files


def differing(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Return the runs of lines that differ: old[i:j] gave way to new[k:m].

    Equal lines at both ends are skipped first, which is most of a long file.
    """
    least, head, tail = min(len(old), len(new)), 0, 0
    while head < least and old[head] == new[head]:
        head += 1
    while tail < least - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    inner = old[head : len(old) - tail], new[head : len(new) - tail]
    matcher = difflib.SequenceMatcher(None, *inner, autojunk=len(inner[1]) > LONG)
    return [(head + i, head + j, head + k, head + m) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def changed_lines(before: str, after: str) -> list[tuple[int, int]]:
    """Return the runs of lines of `after`, 1-based and inclusive, that differ; a removal is the line that follows it."""
    new = after.split("\n")
    runs = differing(before.split("\n"), new)
    return [(min(first + 1, len(new)), max(first + 1, last)) for _, _, first, last in runs]


def changed_line_numbers(before: str, after: str) -> set[int]:
    return {line for first, last in changed_lines(before, after) for line in range(first, last + 1)}


def solution_spans(edits: Iterable[Edit]) -> tuple[Span, ...]:
    """Return where the solution is in the solved tree, each run of lines with the definition it is in."""
    spans = []
    for edit in edits:
        if edit.fixed is None:
            continue
        file = Parsed(edit.path, edit.fixed)
        for first, last in changed_lines(edit.broken or "", edit.fixed):
            name = file.name_at(first) or file.name_at(last) if edit.path.endswith(".py") else ""
            spans.append(Span(edit.path, first, min(last, edit.fixed.count("\n") + 1), name))
    return tuple(spans)
