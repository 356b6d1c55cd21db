"""Where in a TOML text a key stands, so that an error can name its line.

tomllib says what a file means, not where. This finds the line of a key by walking the table headers and assignments; for
a key inside an inline table or an array it gives the line of the assignment that holds it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BARE = r"[A-Za-z0-9_-]+"
_QUOTED = r'"(?:[^"\\]|\\.)*"|\'[^\']*\''
_KEY = rf"(?:{_BARE}|{_QUOTED})"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=(.*)")


def key_line(text: str, path: Sequence[str | int]) -> int | None:
    """Return the line (from 1) of the key at `path`, or of the closest key around it; None if there is none."""
    wanted = [str(part) for part in path]
    best: tuple[int, int] | None = None  # how much of the path is matched, line
    table: list[str] = []
    counts: dict[tuple[str, ...], int] = {}
    for number, line, in_value in _lines(text):
        if in_value:
            continue
        header = HEADER.match(line)
        assignment = ASSIGNMENT.match(line)
        if header:
            table = _header_path(header, counts)
            here = table[:-1] if table[:-1] == wanted else table  # the array itself is meant, not an entry of it
        elif assignment:
            here = table + _parts(assignment[1])
        else:
            continue
        shared = len(here) if here == wanted[: len(here)] else 0
        if shared and (best is None or shared > best[0]):
            best = (shared, number)
    return best[1] if best else None


def _header_path(header: re.Match[str], counts: dict[tuple[str, ...], int]) -> list[str]:
    """Return the path of a table header; the entries of an array of tables are counted from 0."""
    names: list[str] = []
    parts = _parts(header[2])
    for index, part in enumerate(parts):
        names.append(part)
        if header[1] == "[[" and index == len(parts) - 1:
            counts[tuple(names)] = counts.get(tuple(names), -1) + 1
        if tuple(names) in counts:
            names.append(str(counts[tuple(names)]))
    return names


def _parts(dotted: str) -> list[str]:
    return [part[1:-1] if part[0] in "\"'" else part for part in re.findall(_KEY, dotted)]


def _lines(text: str) -> list[tuple[int, str, bool]]:
    """Return (number, line, whether it is inside a value that began on an earlier line)."""
    lines = []
    depth, fence = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        lines.append((number, line, bool(depth or fence)))
        header = not (depth or fence) and HEADER.match(line)
        if not header:
            depth, fence = _open_after(line, depth, fence)
    return lines


def _open_after(line: str, depth: int, fence: str) -> tuple[int, str]:
    """Return the bracket depth and the multi-line quote still open after a line."""
    position = 0
    while position < len(line):
        rest = line[position:]
        if fence:
            end = rest.find(fence)
            if end < 0:
                return depth, fence
            position, fence = position + end + 3, ""
        elif rest.startswith(('"""', "'''")):
            fence, position = rest[:3], position + 3
        elif (quoted := re.match(_QUOTED, rest)) is not None:
            position += quoted.end()
        elif rest[0] == "#":
            return depth, fence
        else:
            depth += (rest[0] in "[{") - (rest[0] in "]}")
            position += 1
    return depth, fence
