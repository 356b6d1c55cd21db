"""Changing files, inside the sandbox: one exact piece replaced, or all of it. Standard library only; see toolbox.py."""

from __future__ import annotations

import bisect
import json
import os
import re
import sys
from typing import Any

from etude.agent.toolbox_files import LINE, Refused, clip, content, decode, lines_of, put, shown


def syntax(path: str, data: bytes) -> tuple[str, bool | None]:
    """Return what to tell of a file's syntax, and whether it is right; nothing for a kind that is not checked."""
    line = 0
    try:
        if path.endswith(".py"):
            import ast
            import warnings

            warnings.simplefilter("ignore")
            ast.parse(data)
        elif path.endswith(".json"):
            json.loads(data)
        elif path.endswith(".toml") and sys.version_info >= (3, 11):
            import tomllib

            tomllib.loads(data.decode())
        else:
            return "", None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = re.search(r"at line (\d+)", str(error))  # TOML's says it only so
        line = getattr(error, "lineno", None) or (int(at[1]) if at else 0)
        rows = data.decode("utf-8", "replace").splitlines()
        here = f" at line {line}: {clip(rows[line - 1].strip(), 200)}" if 0 < line <= len(rows) else ""
        return f"; syntax error{here} ({getattr(error, 'msg', None) or error})", False
    return "; syntax ok", True


def nearest(old: str, lines: list[str]) -> str:
    """Return the lines of a file that are most like the text that was not found in it, numbered."""
    import difflib

    wanted = old.strip("\n").split("\n")
    anchor = max(range(len(wanted)), key=lambda n: len(wanted[n].strip()))
    matcher = difflib.SequenceMatcher(None, "", wanted[anchor].strip()[:LINE], autojunk=False)
    best, ratio = -1, 0.4
    for number, line in enumerate(lines[:50_000]):
        matcher.set_seq1(line.strip()[:LINE])
        if matcher.real_quick_ratio() > ratio and matcher.quick_ratio() > ratio and matcher.ratio() > ratio:
            best, ratio = number, matcher.ratio()
    if best < 0:
        return "; no line is like it"
    first = max(0, best - min(anchor, 5))
    window = range(first, min(len(lines), first + min(len(wanted), 12)))
    return "; nearest:\n" + "\n".join(f"{n + 1:5}\t{clip(lines[n], LINE)}" for n in window)


def shared(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))  # noqa: B905 - Python 3.8


def replace(text: str, old: str, new: str, path: str) -> tuple[str, int]:
    """Return a text with its one `old` replaced, and the line where. Ends of lines are matched whichever they are, and kept."""
    plain, old, new = (each.replace("\r\n", "\n") for each in (text, old, new))
    places = [match.start() for match in re.finditer(f"(?={re.escape(old)})", plain)]
    if not places:
        raise Refused(f"old is not in {shown(path)}{nearest(old, lines_of(text))}", "not found")
    lines = [plain.count("\n", 0, place) + 1 for place in places[:10]]
    if len(places) > 1:
        known = ", ".join(map(str, lines)) + (", …" if len(places) > 10 else "")
        raise Refused(
            f"old is {len(places)} times in {shown(path)}, at lines {known}; add lines around it", "not unique"
        )
    same = shared(old, new)
    tail = shared(old[same:][::-1], new[same:][::-1])
    ends = [match.start() - n for n, match in enumerate(re.finditer("\r\n", text))]  # where they are in `plain`
    first, last = (place + bisect.bisect_left(ends, place) for place in (places[0] + same, places[0] + len(old) - tail))
    newline = "\r\n" if 2 * len(ends) > plain.count("\n") else "\n"
    middle = new[same : len(new) - tail].replace("\n", newline)
    return text[:first] + middle + text[last:], lines[0]


def edit(path: str, old: str, new: str) -> tuple[str, dict[str, Any]]:
    """Replace one piece of a file."""
    text, encoding = decode(content(path), path)
    changed, line = replace(text, old, new, path)
    try:
        data = changed.encode(encoding, "surrogatepass" if encoding.startswith("utf-16") else "strict")
    except UnicodeEncodeError:
        raise Refused(f"new has characters that {shown(path)}, in {encoding}, cannot hold", "bad value") from None
    told, fine = syntax(path, data)
    put(path, data)
    return f"edited {shown(path)} at line {line}{told}", {"path": path, "line": line, "syntax": fine}


def write(path: str, text: str) -> tuple[str, dict[str, Any]]:
    """Write a file."""
    data, did = text.encode("utf-8", "replace"), "replaced" if os.path.lexists(path) else "wrote"
    told, fine = syntax(path, data)
    put(path, data)
    return f"{did} {shown(path)} ({len(lines_of(text))} lines){told}", {
        "path": path,
        "new": did == "wrote",
        "syntax": fine,
    }
