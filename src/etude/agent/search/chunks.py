"""A file cut into pieces that can be found: a function, a method, the rest of a class, a block of text.

Python is cut by its lines, not by `ast`: a hostile, broken or older file is cut as well as any other, and nothing of it reaches the
host's parser. Where files are formatted as usual the borders are those that `ast` gives (a test says so).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

MOST_LINES = 60  # of a chunk
BLOCK = 20  # lines after which a blank line ends a block
_DEFINITION = re.compile(r"([ \t]*)(?:async[ \t]+)?(def|class)[ \t]+(\w+)")
_GOES_ON = re.compile(r"\s*(?:#|[)\]}]|$)")  # a line that ends no definition, however little it is indented
_HEADING = re.compile(r"[ \t]*#")  # unless it is a comment after a blank line: that is about what follows
_WORD = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
NAME_WEIGHT = 3


@dataclass(eq=False)
class Chunk:
    """One piece. Lines count from 1. `vector` is there once it was embedded."""

    path: str
    first: int
    last: int
    name: str
    text: str
    words: dict[str, int]
    vector: np.ndarray | None = None


def words(text: str) -> Iterator[str]:
    """Yield the words of a text: identifiers whole and in their parts (snake, camel), plural s taken off, all in small letters."""
    for word in _WORD.findall(text):
        parts = _PART.findall(word)
        yield from (_singular(part.lower()) for part in parts)
        if len(parts) > 1:
            yield word.lower()


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def chunks(path: str, text: str) -> list[Chunk]:
    """Cut a file."""
    lines = text.replace("\r\n", "\n").split("\n")
    owners = _owners(lines) if path.endswith((".py", ".pyi", ".pyx")) else [""] * len(lines)
    made, first = [], 0
    for name, run in groupby(owners):
        end = first + len(list(run))
        made += [(start, stop, name) for start, stop in _pieces(lines, first, end, whole=bool(name))]
        first = end
    return [
        _chunk(path, start, stop, name, lines) for start, stop, name in made if any(map(str.strip, lines[start:stop]))
    ]


def _chunk(path: str, start: int, stop: int, name: str, lines: list[str]) -> Chunk:
    while not lines[stop - 1].strip():
        stop -= 1
    while not lines[start].strip():
        start += 1
    text = "\n".join(lines[start:stop])
    count = Counter(words(text))
    for word in words(f"{path} {name}"):
        count[word] += NAME_WEIGHT
    return Chunk(path, start + 1, stop, name, text, dict(count))


def _owners(lines: list[str]) -> list[str]:
    """Return of each line the innermost class, method or function outside of functions that it belongs to."""
    owners: list[str] = []
    open_: list[tuple[int, str, str]] = []  # indent, kind, name
    for number, line in enumerate(lines):
        if not _GOES_ON.match(line) or (number and not lines[number - 1].strip() and _HEADING.match(line)):
            indent = len(line) - len(line.lstrip())
            while open_ and indent <= open_[-1][0]:
                open_.pop()
            match = _DEFINITION.match(line)
            if match and not (open_ and open_[-1][1] == "def"):
                name = f"{open_[-1][2]}.{match[3]}" if open_ else match[3]
                open_.append((indent, match[2], name))
                above = number - 1
                while above >= 0 and lines[above].startswith(f"{match[1]}@"):  # its decorators
                    owners[above], above = name, above - 1
        owners.append(open_[-1][2] if open_ else "")
    return owners


def _pieces(lines: list[str], first: int, end: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Cut a run of lines: at a blank line once it is long enough, unless it is one thing; in any case before it is too long."""
    start = first
    for at in range(first, end):
        long = at - start
        if long >= MOST_LINES or (not whole and long >= BLOCK and not lines[at].strip()):
            yield start, at
            start = at
    if start < end:
        yield start, end
