"""What the tools do inside the sandbox, with the rights of what runs there: read, find and change files.

Runs there as `python3 -I -S`, with the sources of this file and its two neighbours as arguments, so that nothing need be mounted or
installed: one JSON request on stdin, one JSON answer on stdout. So a path means what it means to a command, /tmp and /usr/lib
included, and no link leads where a command could not go. Standard library only, any Python from 3.8 on. Every answer is bounded: the
sandbox would cut a longer one in the middle.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.toolbox_edit import edit, write
from etude.agent.toolbox_files import (
    LINE,
    Late,
    Refused,
    clip,
    content,
    decode,
    kind_of,
    lines_of,
    searchable,
    shown,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_INDEXED = 400_000  # bytes of a file
PAGE = 170_000  # bytes of a page of the tree or of its texts, in base64


def listed(rows: list[str], most: int, characters: int) -> tuple[str, int]:
    """Return as many rows as may be shown, and how many those are."""
    ends = itertools.accumulate(len(row) + 1 for row in rows[:most])
    count = sum(end <= characters for end in ends)
    return "\n".join(rows[:count]), count


def read(path: str, start: int, end: int, lines: int, characters: int) -> tuple[str, dict[str, Any]]:
    """Lines of a file with their numbers."""
    rows = lines_of(decode(content(path), path)[0])
    if not rows:
        return f"{shown(path)} is empty", {"path": path, "lines": 0}
    if start > len(rows):
        raise Refused(f"{shown(path)} has {len(rows)} lines: none at start={start}", "bad value")
    wanted = min(end or len(rows), len(rows))
    numbered = [f"{n:5}\t{clip(rows[n - 1], 4 * LINE)}" for n in range(start, min(wanted, start + lines) + 1)]
    text, count = listed(numbered, lines, characters)
    last = start + count - 1
    if last < wanted:
        text += f"\n… {wanted - last} lines left out; read on with start={last + 1} …"
    return text, {"path": path, "first": start, "last": last, "lines": len(rows), "cut": last < wanted}


def pattern_of(glob: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with *, **, ?, [] and {,}; without a slash it means a name in any folder."""
    expression, depth = "", 0
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    for piece in re.findall(r"\*\*/|\*\*|\[!?\]?[^\]]+\]|.", glob, re.DOTALL):
        if piece in known:
            expression += known[piece]
        elif len(piece) > 1:
            expression += "[" + re.sub(r"([\\\[])", r"\\\1", piece[1:]).replace("!", "^", piece[1] == "!")
        elif piece == "{" and "}" in glob:
            expression, depth = expression + "(?:", depth + 1
        elif piece == "}" and depth:
            expression, depth = expression + ")", depth - 1
        else:
            expression += "|" if piece == "," and depth else re.escape(piece)
    anywhere = "" if "/" in glob else "(?:.*/)?"
    try:
        return re.compile(f"(?s:{anywhere}{expression}{')' * depth})\\Z")
    except re.error as error:
        raise Refused(f"the pattern {shown(glob)} cannot be read: {error}", "bad value") from None


def grep(pattern: str, path: str, glob: str, most: int, characters: int) -> tuple[str, dict[str, Any]]:
    """Lines that a regular expression is found in."""
    try:
        regex, wanted = re.compile(pattern), pattern_of(glob or "*")
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"the regular expression cannot be read: {error}", "bad value") from None
    skipped: Counter[str] = Counter()
    rows: list[str] = []
    files, matches, place, late = set(), 0, "", False
    try:
        for file in walk(path, skipped):
            text = searchable(file, skipped) if wanted.match(file) else None
            for number, line in enumerate(lines_of(text or ""), 1):
                place = f"{shown(file)}:{number}"
                if regex.search(line):
                    matches += 1
                    files.add(file)
                    if len(rows) < most:
                        rows.append(f"{place}:{clip(line, LINE)}")
    except Late:
        late = True
    text, count = listed(rows, most, characters)
    told = [text] if text else [] if late else ["no matches"]
    told += [f"… {count} of {matches} matches shown; narrow the pattern, path or glob …"] if matches > count else []
    told += [f"… stopped at {place}: it took too long …"] if late else []
    reasons = ", ".join(f"{n} {why}" for why, n in sorted(skipped.items()) if why not in {"passed folder", "link"})
    told += [f"(files not searched: {reasons})"] if reasons else []
    details = {"matches": matches, "paths": sorted(files)[:100], "cut": matches > count, "late": late}
    return "\n".join(told), {**details, "skipped": dict(skipped)}


def glob(pattern: str, most: int, characters: int) -> tuple[str, dict[str, Any]]:
    """Files whose paths a pattern fits."""
    pattern = pattern[2:] if pattern.startswith("./") else pattern
    wanted, skipped, late = pattern_of(pattern), Counter[str](), False
    root = re.match(r"(?:[^*?[{/]*/)*", pattern)[0].rstrip("/") or ("/" if pattern.startswith("/") else ".")  # type: ignore[index]
    rows: list[str] = []
    try:
        rows.extend(shown(file) for file in walk(root, skipped) if wanted.match(file))
    except Late:
        late = True
    text, count = listed(rows, most, characters)
    told = [text or "no files match"] + ([f"… {count} of {len(rows)} files shown …"] if count < len(rows) else [])
    told += ["… stopped: it took too long …"] if late else []
    return "\n".join(told), {"matches": len(rows), "cut": count < len(rows), "late": late, "skipped": dict(skipped)}


def list_folder(path: str, most: int, characters: int) -> tuple[str, dict[str, Any]]:
    """What is in a folder."""
    rows: list[str] = []
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        name, kind = shown(entry.name), kind_of(entry)
        if kind == "link":
            rows.append(f"{name} -> {shown(str(Path(entry.path).readlink()))}")
        else:
            rows.append(
                name
                + ("/" if entry.is_dir() else f"  {entry.stat().st_size} bytes" if kind == "file" else f"  ({kind})")
            )
    text, count = listed(rows, most, characters)
    more = f"\n… {len(rows) - count} more …" if count < len(rows) else ""
    return (text + more) or f"{shown(path)} is empty", {"path": path, "entries": len(rows), "cut": count < len(rows)}


def tree(after: int, suffixes: list[str], most: int) -> tuple[str, dict[str, Any]]:
    """One page of the files that can be indexed: paths and digests of contents, from number `after` on."""
    skipped: Counter[str] = Counter()
    rows: list[list[str]] = []
    room, number, more = PAGE // 2, 0, False
    for path in walk(".", skipped):
        if not path.lower().endswith(tuple(suffixes)):
            continue
        number += 1
        if number > most or room < 0:
            skipped["over the bound"] += number > most
            more = number <= most
            break
        text = searchable(path, skipped, MOST_INDEXED) if number > after else None
        if text is not None:
            rows.append([path, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()])
            room -= len(json.dumps(path)) + 40
    packed = base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()
    return packed, {"next": number - 1 if more else None, "skipped": dict(skipped)}


def fetch(paths: list[str]) -> tuple[str, dict[str, Any]]:
    """Texts of files, as many as fit: null for one that cannot be had (any more), or that does not compress like text."""
    rows: list[str | None] = []
    room = PAGE
    for path in paths:
        text = searchable(path, Counter(), MOST_INDEXED)
        packed = None if text is None else base64.b64encode(zlib.compress(text.encode())).decode()
        packed = None if packed is None or len(packed) > PAGE else packed
        room -= len(packed or "") + 8
        if room < 0 and rows:
            break
        rows.append(packed)
    return "", {"texts": rows}


def late(*_: object) -> None:
    """Stop whatever runs."""
    raise Late


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    seconds, do = request.pop("seconds"), request.pop("do")
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    operations: list[Callable[..., tuple[str, dict[str, Any]]]] = [read, grep, glob, edit, write, tree, fetch]
    try:
        text, details = {"list": list_folder, **{each.__name__: each for each in operations}}[do](**request)
        answer = {"text": text, "details": details}
    except (Refused, ValueError) as error:  # a ValueError is a path with a NUL in it
        answer = {"text": str(error), "refused": getattr(error, "kind", "bad value")}
    except OSError as error:
        kind = "missing" if isinstance(error, FileNotFoundError) else "system"
        answer = {"text": f"{shown(os.fsdecode(error.filename or '.'))}: {error.strerror}", "refused": kind}
    except Late:
        answer = {"text": f"stopped: it took longer than {seconds} seconds", "refused": "late"}
    json.dump(answer, sys.stdout)
