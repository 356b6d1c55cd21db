"""The toolbox: what tools do inside the sandbox, with the rights of what runs there: read, find and change files.

Its source is handed to `python3 -I -S -c` inside (tools.py), so that nothing need be mounted or installed: one JSON request on stdin,
one JSON answer on stdout. So a path means what it means to a command, /tmp and /usr/lib included, and no link leads where a command
could not go. Standard library only, any Python from 3.8 on. Every answer is bounded: the sandbox would cut a longer one in the middle.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import itertools
import json
import os
import re
import signal
import stat
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Reply = tuple[str, dict[str, Any]]  # text for the policy, details for the trace

# Unless they are named: others' code, built things, history.
SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".svn", ".tox", ".nox", ".eggs", ".venv", "venv", "node_modules", "site-packages", "__pycache__", ".mypy_cache",
    ".pytest_cache", ".ruff_cache",
})  # fmt: skip
MOST_BYTES = 8 << 20  # of a file that is read or edited
MOST_SEARCHED = 2 << 20  # of a file that grep looks into: longer ones are data
LINE = 500  # characters shown of a line that was found; a line that was read shows four times as much


MOST_INDEXED = 400_000  # bytes of a file
PAGE = 170_000  # bytes of a page of the tree or of its texts, in base64


class Refused(Exception):  # noqa: N818 - an answer
    """What was asked for cannot be done: one line for the policy, and which kind of fault it is for the trace."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class Late(Exception):  # noqa: N818 - a state
    """The time for this request is used up. Raised by a timer wherever the program is, inside a regular expression, too."""


def shown(name: str) -> str:
    """Return a path that fits into one line of valid text: bytes that are none, and control characters, are escaped."""
    if name.isprintable():
        return name
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def clip(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}… {len(line) - most} characters left out …"


def content(path: str, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; never waits for a FIFO, never reads a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Refused(f"{shown(path)} is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}", "not a file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Refused(f"{shown(path)} is larger than {most} bytes; look at parts of it with a command", "too large")
    return data


def decode(data: bytes, path: str) -> tuple[str, str]:
    """Return a file's text and its encoding, such that encoding the text gives the same bytes. Marks at the beginning stay in it."""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark) and len(data) % 2 == 0:
            return data.decode(encoding, "surrogatepass"), encoding
    if b"\0" in data:
        raise Refused(f"{shown(path)} is a binary file of {len(data)} bytes", "binary")
    declared = re.match(rb"(?:[^\n]*\n)?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", data)
    for encoding in [*([declared[1].decode("ascii", "replace")] if declared else []), "utf-8"]:
        try:
            if (text := data.decode(encoding)).encode(encoding) == data:
                return text, encoding
        except (LookupError, ValueError):
            pass
    return data.decode("latin-1"), "latin-1"


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without their ends; what follows the last end is a line if there is anything."""
    lines = text.lstrip("\ufeff").replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def kind_of(entry: os.DirEntry[str]) -> str:
    """Return whether something found in a folder is a file, a folder to enter, or why it is passed over."""
    if entry.is_symlink():
        return "link"
    if entry.is_dir():
        return "passed folder" if entry.name in SKIPPED_FOLDERS else "folder"
    return "file" if entry.is_file() else "not a file"


def walk(root: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the regular files below a folder, or the file itself; what is passed over is counted by reason.

    Not os.walk, which takes a frame a level: a tree may be thousands deep.
    """
    if not stat.S_ISDIR(Path(root).stat().st_mode):
        yield root
        return
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            skipped["unreadable"] += 1
            continue
        path = {entry: entry.name if folder == "." else entry.path for entry in entries}
        kinds = {entry: kind_of(entry) for entry in entries}
        skipped.update(kind for kind in kinds.values() if kind not in {"file", "folder"})
        yield from (path[entry] for entry in entries if kinds[entry] == "file")
        folders += [path[entry] for entry in reversed(entries) if kinds[entry] == "folder"]


def searchable(path: str, skipped: Counter[str], most: int = MOST_SEARCHED) -> str | None:
    """Return the text of a file that may be searched; none, and a count, for one that may not."""
    try:
        data = content(path, most)
    except (OSError, Refused) as error:
        skipped[error.kind if isinstance(error, Refused) else "unreadable"] += 1
        return None
    if b"\0" in data[:8192]:
        skipped["binary"] += 1
        return None
    return data.decode("utf-8", "replace")


def put(path: str, data: bytes) -> None:
    """Write a file whole or not at all: a full disk must not cost the old content. A link stays, and so do permissions."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise Refused(f"{shown(path)} is not a regular file", "not a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".toolbox-{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def listed(rows: list[str], most: int, characters: int) -> tuple[str, int]:
    """Return as many rows as may be shown, and how many those are."""
    ends = itertools.accumulate(len(row) + 1 for row in rows[:most])
    count = sum(end <= characters for end in ends)
    return "\n".join(rows[:count]), count


def read(path: str, start: int, end: int, lines: int, characters: int) -> Reply:
    """Return lines of a file with their numbers."""
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


def grep(pattern: str, path: str, glob: str, most: int, characters: int) -> Reply:
    """Return the lines that a regular expression is found in."""
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
    reasons = ", ".join(f"{n} {why}" for why, n in sorted(skipped.items()) if why not in {"passed folder", "link"})
    notes = [
        text or ("" if late else "no matches"),
        f"… {count} of {matches} matches shown; narrow the pattern, path or glob …" if matches > count else "",
        f"… stopped at {place}: it took too long …" if late else "",
        f"(files not searched: {reasons})" if reasons else "",
    ]
    details = {"matches": matches, "paths": sorted(files)[:100], "cut": matches > count, "late": late}
    return "\n".join(filter(None, notes)), {**details, "skipped": dict(skipped)}


def glob(pattern: str, most: int, characters: int) -> Reply:
    """Return the files whose paths a pattern fits."""
    pattern = pattern[2:] if pattern.startswith("./") else pattern
    wanted, late = pattern_of(pattern), False
    skipped: Counter[str] = Counter()
    root = re.match(r"(?:[^*?[{/]*/)*", pattern)[0].rstrip("/") or ("/" if pattern.startswith("/") else ".")  # type: ignore[index]
    rows: list[str] = []
    try:
        rows.extend(shown(file) for file in walk(root, skipped) if wanted.match(file))
    except Late:
        late = True
    text, count = listed(rows, most, characters)
    text = text or "no files match"
    text += f"\n… {count} of {len(rows)} files shown …" if count < len(rows) else ""
    text += "\n… stopped: it took too long …" if late else ""
    return text, {"matches": len(rows), "cut": count < len(rows), "late": late, "skipped": dict(skipped)}


def _listed_entry(entry: os.DirEntry[str]) -> str:
    name, kind = shown(entry.name), kind_of(entry)
    if kind == "link":
        return f"{name} -> {shown(os.readlink(entry.path))}"  # noqa: PTH115 - Python 3.8
    if entry.is_dir():
        return f"{name}/"
    return f"{name}  {entry.stat().st_size} bytes" if kind == "file" else f"{name}  ({kind})"


def list_folder(path: str, most: int, characters: int) -> Reply:
    rows = [_listed_entry(entry) for entry in sorted(os.scandir(path), key=lambda entry: entry.name)]
    text, count = listed(rows, most, characters)
    more = f"\n… {len(rows) - count} more …" if count < len(rows) else ""
    return (text + more) or f"{shown(path)} is empty", {"path": path, "entries": len(rows), "cut": count < len(rows)}


def syntax(path: str, data: bytes) -> tuple[str, bool | None]:
    """Return what to say of a file's syntax, and whether it is valid; nothing for a kind that is not checked."""
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


def replace(text: str, old: str, new: str, path: str) -> tuple[str, int]:
    """Return a text with its one `old` replaced, and the line where. Ends of lines are matched whichever they are, and kept."""
    plain, old, new = (each.replace("\r\n", "\n") for each in (text, old, new))
    places = [match.start() for match in re.finditer(f"(?={re.escape(old)})", plain)]
    if not places:
        raise Refused(f"old is not in {shown(path)}{nearest(old, lines_of(text))}", "not found")
    lines = [plain.count("\n", 0, place) + 1 for place in places[:10]]
    if len(places) > 1:
        where = f"{shown(path)}, at lines {', '.join(map(str, lines))}{', …' if len(places) > 10 else ''}"
        raise Refused(f"old is {len(places)} times in {where}; add lines around it", "not unique")
    same = len(os.path.commonprefix([old, new]))  # noqa: RUF071 - of characters
    tail = len(os.path.commonprefix([old[same:][::-1], new[same:][::-1]]))  # noqa: RUF071 - of characters
    ends = [match.start() - n for n, match in enumerate(re.finditer("\r\n", text))]  # where they are in `plain`
    first, last = (place + bisect.bisect_left(ends, place) for place in (places[0] + same, places[0] + len(old) - tail))
    newline = "\r\n" if 2 * len(ends) > plain.count("\n") else "\n"
    middle = new[same : len(new) - tail].replace("\n", newline)
    return text[:first] + middle + text[last:], lines[0]


def edit(path: str, old: str, new: str) -> Reply:
    text, encoding = decode(content(path), path)
    changed, line = replace(text, old, new, path)
    try:
        data = changed.encode(encoding, "surrogatepass" if encoding.startswith("utf-16") else "strict")
    except UnicodeEncodeError:
        raise Refused(f"new has characters that {shown(path)}, in {encoding}, cannot hold", "bad value") from None
    note, valid = syntax(path, data)
    put(path, data)
    return f"edited {shown(path)} at line {line}{note}", {"path": path, "line": line, "syntax": valid}


def write(path: str, text: str) -> Reply:
    data, did = text.encode("utf-8", "replace"), "replaced" if os.path.lexists(path) else "wrote"
    note, valid = syntax(path, data)
    put(path, data)
    details = {"path": path, "new": did == "wrote", "syntax": valid}
    return f"{did} {shown(path)} ({len(lines_of(text))} lines){note}", details


def tree(after: int, suffixes: list[str], most: int) -> Reply:
    """Return one page of the files that can be indexed: paths and digests of contents, from number `after` on."""
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


def fetch(paths: list[str]) -> Reply:
    """Return texts of files, as many as fit: null for one that cannot be had (any more), or that does not compress like text."""
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


def _stop(*_: object) -> None:
    raise Late


OPERATIONS: dict[str, Callable[..., Reply]] = {
    "read": read, "grep": grep, "glob": glob, "list": list_folder, "edit": edit, "write": write, "tree": tree, "fetch": fetch,
}  # fmt: skip


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    seconds, do = request.pop("seconds"), request.pop("do")
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        text, details = OPERATIONS[do](**request)
        answer = {"text": text, "details": details}
    except (Refused, ValueError) as error:  # a ValueError is a path with a NUL in it
        answer = {"text": str(error), "refused": getattr(error, "kind", "bad value")}
    except OSError as error:
        kind = "missing" if isinstance(error, FileNotFoundError) else "system"
        answer = {"text": f"{shown(os.fsdecode(error.filename or '.'))}: {error.strerror}", "refused": kind}
    except Late:
        answer = {"text": f"stopped: it took longer than {seconds} seconds", "refused": "late"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
