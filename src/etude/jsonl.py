"""Files of JSON lines that survive kill −9: how they are read and appended to, wherever Etude keeps one.

A line is written by one `write` call and ends with a newline, so after a kill at most the last line is torn. A reader
leaves it out; whoever appends next cuts it off first. Ledgers, traces and results of benchmarks are such files, each with
its own lines; what a whole line must hold is theirs to check.

`MetricsLog` is the one most stages use: each row has a `key`, and a row once written is never written again. This makes it
both the metrics a person reads and the place a restart continues from.
"""

from __future__ import annotations

import errno
import json
import os
import time
from typing import IO, TYPE_CHECKING, Any, Self

from etude.files import fsync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Row = dict[str, Any]


def read_lines(path: Path, *, missing_ok: bool = False) -> tuple[list[bytes], int]:
    """Return the whole lines of a file, and the bytes of a torn last line. Another process may be appending meanwhile."""
    content = b"" if missing_ok and not path.exists() else path.read_bytes()
    *lines, torn = content.split(b"\n")
    return lines, len(torn)


def append_line(path: Path, line: bytes, *, durable: bool = False) -> int:
    """Append a line, newline included; return the bytes of a torn line that were cut off. When it raises, nothing was written.

    `durable`: flushed before this returns, so that the line survives a power cut, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read() not in {b"", b"\n"}:
            size = file.truncate(path.read_bytes().rfind(b"\n") + 1)
        try:
            if file.write(line) != len(line):  # the disk was full in the middle of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    if durable and size == 0:
        fsync_folder(path.parent)
    return end - size


def _believed_rows(lines: list[bytes]) -> tuple[list[Row], int]:
    """Return the rows before the first line that is none (a power cut can leave those), and how many bytes they take."""
    rows: list[Row] = []
    size = 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
        size += len(line) + 1
    return rows, size


def read_rows(path: Path, prefix: str = "") -> list[Row]:
    """Return the rows whose keys start with `prefix`, for those who only look: another process may be writing."""
    rows, _ = _believed_rows(read_lines(path)[0])
    return [row for row in rows if str(row.get("key", "")).startswith(prefix)]


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by name, those inside others by the names on the way; not its step and time, nor infinite ones."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
            yield from () if name in {"step", "time"} else [(f"{prefix}{name}", float(value))]


class MetricsLog:
    """Rows by key, on disk as they come. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines, torn = read_lines(path, missing_ok=True)
        rows, size = _believed_rows(lines)
        self.torn_bytes = sum(len(line) + 1 for line in lines) + torn - size
        self._rows: dict[str, Row] = {row["key"]: row for row in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(size)

    def reload(self) -> None:
        """Take in what another process appended: ranks on other machines write a stage's rows themselves."""
        self._rows = {row["key"]: row for row in _believed_rows(read_lines(self.path)[0])[0]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def rows(self, prefix: str = "") -> Iterator[Row]:
        """Yield the rows whose keys start with `prefix`, oldest first."""
        return (row for key, row in self._rows.items() if key.startswith(prefix))

    def total(self, field: str) -> float:
        return float(sum(row.get(field, 0) for row in self._rows.values()))

    def put(self, key: str, **values: Any) -> Row:
        """Append one row. A key is written once."""
        assert key not in self._rows, f"{key} was written before"
        row = {"key": key, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._rows[key] = row
        return row

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
