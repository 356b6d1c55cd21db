"""Files as the toolbox sees them, inside the sandbox: read, decoded, walked, written. Standard library only; see toolbox.py."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

# fmt: off
PASSED_FOLDERS = frozenset({  # unless they are named: others' code, built things, history
    ".git", ".hg", ".svn", ".tox", ".nox", ".eggs", ".venv", "venv", "node_modules", "site-packages", "__pycache__", ".mypy_cache",
    ".pytest_cache", ".ruff_cache",
})
# fmt: on
MOST_BYTES = 8 << 20  # of a file that is read or edited
MOST_SEARCHED = 2 << 20  # of a file that grep looks into: longer ones are data
LINE = 500  # characters shown of a line that was found; a line that was read shows four times as much


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
    """Return the beginning of a long line, and how much more there is."""
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
        return "passed folder" if entry.name in PASSED_FOLDERS else "folder"
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
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
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
