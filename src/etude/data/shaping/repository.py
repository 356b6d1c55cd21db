"""The files of a repository as documents long enough to learn how files depend on each other.

Orders: `path`, as a person sees the tree; or `imports`: a file after those it imports, so that a model has read a function
before it sees it used (DeepSeek-Coder 2024). Only Python's imports are followed; all else keeps path order. Cycles are cut
at the file that comes first by path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.data.document import Document

IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)


def header(path: str) -> str:
    """Return the line that names a file inside a joined document."""
    return f"### {path}\n"


def in_order(files: Sequence[Document], order: str) -> list[Document]:
    """Return the files of a repository in the stated order."""
    ordered = sorted(files, key=lambda file: file.path)
    if order == "path":
        return ordered
    modules = {name: index for index, file in enumerate(ordered) for name in module_names(file.path)}
    needs = [sorted(_imported(file, modules) - {index}) for index, file in enumerate(ordered)]
    return [ordered[index] for index in _after_needs(needs)]


def _after_needs(needs: Sequence[Sequence[int]]) -> list[int]:
    """Return all numbers, each after those it needs where that is possible; depth first, without recursion."""
    done: dict[int, None] = {}
    seen: set[int] = set()
    for start in range(len(needs)):
        stack = [start]
        while stack:
            here = stack[-1]
            seen.add(here)
            waiting = [other for other in needs[here] if other not in seen]
            if waiting:
                stack.append(waiting[0])
            else:
                done.setdefault(stack.pop())
    return list(done)


def module_names(path: str) -> list[str]:
    """Return the names a Python file can be imported by: with and without its leading folders (`src/a/b.py` is also a.b)."""
    if not path.endswith(".py"):
        return []
    parts = path.removesuffix(".py").split("/")
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return [".".join(parts[start:]) for start in range(min(2, len(parts)))]


def _imported(file: Document, modules: dict[str, int]) -> set[int]:
    found: set[int] = set()
    package = file.path.split("/")[:-1]
    for module, names, plain in IMPORT.findall(file.text) if file.path.endswith(".py") else []:
        dots = len(module) - len(module.lstrip("."))
        above = ".".join(package[: len(package) - dots + 1]) if dots else ""
        start = ".".join(part for part in (above, module.lstrip(".")) if part)
        wanted = [name.split(" as ")[0].strip() for name in (names or plain).split(",")]
        candidates = [start, *(f"{start}.{name}" for name in wanted)] if start else wanted
        found |= {modules[name] for name in candidates if name in modules}
    return found


def joined(files: Sequence[Document], most_chars: int) -> Iterator[list[Document]]:
    """Yield groups of neighbouring files that make documents of at most `most_chars`; a longer file stands alone."""
    group: list[Document] = []
    size = 0
    for file in files:
        length = len(header(file.path)) + len(file.text) + 1
        if group and size + length > most_chars:
            yield group
            group, size = [], 0
        group.append(file)
        size += length
    if group:
        yield group
