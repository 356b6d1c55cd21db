"""An append-only log of JSON lines that survives kill −9.

A line is written by one `write` call and ends with a newline, so after a kill at most the last line is torn. Opening the
log for appending cuts a torn line off and says so by `torn_bytes`. Each row has a `key`; a row once written is never
written again. This makes the log both the metrics a person reads and the place a restart continues from.
"""

from __future__ import annotations

import json
import os
import time
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Row = dict[str, Any]


def _whole_rows(content: bytes) -> tuple[list[Row], int]:
    """Return the rows before the first torn or foreign line, and how many bytes they take."""
    rows: list[Row] = []
    good = 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
        good += len(line)
    return rows, good


def read_rows(path: Path, prefix: str = "") -> list[Row]:
    """Return the rows whose keys start with `prefix`, for those who only look: another process may be writing."""
    rows, _ = _whole_rows(path.read_bytes())
    return [row for row in rows if str(row.get("key", "")).startswith(prefix)]


class MetricsLog:
    """Rows by key, on disk as they come. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        rows, good = _whole_rows(content)
        self.torn_bytes = len(content) - good
        self._rows: dict[str, Row] = {row["key"]: row for row in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(good)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Row | None:
        """Return the row of a key, or None if it has not been written."""
        return self._rows.get(key)

    def rows(self, prefix: str = "") -> Iterator[Row]:
        """Yield the rows whose keys start with `prefix`, oldest first."""
        return (row for key, row in self._rows.items() if key.startswith(prefix))

    def total(self, field: str) -> float:
        """Return the sum of a field over all rows that have it."""
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
        """Flush to the disk and close."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
