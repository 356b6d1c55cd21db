"""Rows with a text column: JSONL, plain or compressed, and Parquet."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etude.data.document import Drop, LicenceFile, Raw
from etude.data.sources.opened import CHUNK, OpenSource, digest_of_stats, over, runs_of
from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.data.document import Part
    from etude.data.settings import SourceSettings

    Row = tuple[dict[str, Any] | str, int]  # the columns, or why they cannot be had; bytes of the line

USUAL_RATIO = 4  # text to compressed text
ROWS_AT_ONCE = 64
BLOCK = 1 << 16
DAMAGED = "file is damaged"


@dataclass(frozen=True)
class TablePart(ABC):
    """Some rows of a file: from one byte to another, or of some row groups."""

    settings: SourceSettings
    most_bytes: int
    path: str
    name: str  # of the file, in the names of its rows
    first_row: int
    size: int

    def licence_files(self) -> list[LicenceFile]:
        """Return none: rows lie in no folder."""
        return []

    def stated_licence(self) -> str | None:
        """Return None: each row may have its own."""
        return None

    def read(self) -> Iterator[Raw | Drop]:
        """Yield each row; what is lost with the rest of a damaged file is one drop."""
        for number, (row, size) in enumerate(self.rows(), self.first_row):
            yield self._outcome(f"{self.name}#{number}", row, size)

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield each row of the part."""

    def _outcome(self, at: str, row: dict[str, Any] | str, size: int) -> Raw | Drop:
        columns = row if isinstance(row, dict) else {}
        text = columns.get(self.settings.text)
        repository = _plain(columns.get(self.settings.repository_column or "") or at)
        fault = row if isinstance(row, str) else self._fault(text)
        if fault or text is None:
            return Drop(repository, at, "read", fault, size)
        licence = columns.get(self.settings.licence_column or "") or None
        stated = " AND ".join(map(_plain, licence)) if isinstance(licence, list) else licence and _plain(licence)
        return Raw(repository, at, text, "row", stated)

    def _fault(self, text: Any) -> str:
        if not isinstance(text, str | bytes):
            return "no text"
        try:
            length = len(text.encode() if isinstance(text, str) else text)
        except UnicodeEncodeError:
            return "half a surrogate pair"
        return over(self.most_bytes) if length > self.most_bytes else ""


def _plain(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class JsonlPart(TablePart):
    """The lines from one place in a file to another, both behind a newline; of a compressed file, all."""

    start: int = 0
    end: int | None = None

    def rows(self) -> Iterator[Row]:
        """Yield the columns of each line, or what is wrong with it."""
        try:
            with gzip.open(self.path) if self.path.endswith(".gz") else Path(self.path).open("rb") as file:
                for line, size in self._lines(file):
                    yield parsed(line), size
        except (OSError, EOFError, zlib.error):
            yield DAMAGED, 0

    def _lines(self, file: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[bytes | None, int]]:
        """Yield each line and its length; None for one that is longer than any text within the limit can make it."""
        longest = 4 * self.most_bytes + BLOCK
        at = file.seek(self.start)
        while (self.end is None or at < self.end) and (line := file.readline(longest)):
            size, piece = len(line), line
            while not piece.endswith(b"\n") and (piece := file.readline(BLOCK)):
                size += len(piece)
            at += size
            yield line if size == len(line) else None, size


def parsed(line: bytes | None) -> dict[str, Any] | str:
    """Return the columns of a line, or what is wrong with it."""
    if line is None or not line.strip():
        return "line too long" if line is None else "empty line"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "invalid JSON"
    return row if isinstance(row, dict) else "not a JSON object"


@dataclass(frozen=True)
class ParquetPart(TablePart):
    """Some row groups."""

    groups: tuple[int, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Yield the columns of each row; texts as bytes, because nobody has checked that they are UTF-8."""
        import pyarrow
        from pyarrow.parquet import ParquetFile

        wanted = _columns(self.settings)
        try:
            with ParquetFile(self.path) as file:
                for group in self.groups:
                    for batch in file.iter_batches(ROWS_AT_ONCE, [group], wanted, use_threads=False):
                        texts = batch.column(self.settings.text).cast(pyarrow.binary()).to_pylist()
                        for row, text in zip(batch.select(wanted[1:]).to_pylist(), texts, strict=True):
                            yield {**row, self.settings.text: text}, len(text or b"")
        except (OSError, ValueError, pyarrow.ArrowException):
            yield DAMAGED, 0


def _columns(settings: SourceSettings) -> list[str]:
    return [
        name for name in dict.fromkeys([settings.text, settings.repository_column, settings.licence_column]) if name
    ]


def identify_tables(settings: SourceSettings) -> str:
    """Return a digest of the files, by size and time of change."""
    root, files = _located(settings)
    return digest_of_stats(root, [file.resolve() for file in files])


def open_tables(settings: SourceSettings, most_bytes: int) -> OpenSource:
    """Share the rows of all files out in parts."""
    root, files = _located(settings)
    location = f"parquet {settings.parquet}" if settings.parquet else f"jsonl {settings.jsonl}"
    return OpenSource(location, None, table_parts(files, root, settings, most_bytes))


def _located(settings: SourceSettings) -> tuple[Path, list[Path]]:
    """Return the files that a name or pattern stands for, in path order, and the innermost folder around them."""
    pattern = str(Path(settings.jsonl or settings.parquet or "").expanduser())
    names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207 - may be absolute
    files = sorted(Path(name).absolute() for name in names if Path(name).is_file())
    if not files:
        raise UserError(f"source {settings.name!r}: no file is or matches {pattern!r} (looked in {Path.cwd()})")
    return Path(os.path.commonpath([file.parent for file in files])), files


def table_parts(files: list[Path], root: Path, settings: SourceSettings, most_bytes: int) -> list[Part]:
    """Return the parts of each file: row groups, ranges of lines, or all of a compressed file."""
    parts: list[Part] = []
    for file in files:
        common = (settings, most_bytes, str(file), file.relative_to(root).as_posix())
        if settings.parquet or file.suffix == ".parquet":
            parts += [ParquetPart(*common, first, size, groups) for first, size, groups in _row_groups(file, settings)]
        elif file.suffix == ".gz":
            parts.append(JsonlPart(*common, 0, USUAL_RATIO * file.stat().st_size))
        else:
            parts += [JsonlPart(*common, row, end - start, start, end) for start, end, row in line_ranges(file)]
    return parts


def line_ranges(path: Path, chunk: int = CHUNK) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, number of the first line) of runs of whole lines of about `chunk` bytes, or of one long line."""
    start = read = row = 0
    with path.open("rb") as file:
        while block := file.read(chunk):
            cut = block.rfind(b"\n") + 1 if len(block) == chunk else len(block)
            if cut:
                yield start, read + cut, row
                start, row = read + cut, row + block.count(b"\n")
            read += len(block)
    if read > start:
        yield start, read, row


def _row_groups(file: Path, settings: SourceSettings) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (number of the first row, bytes, row groups) of runs of row groups."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as opened:
            schema, about = opened.schema_arrow, opened.metadata
        if missing := [name for name in _columns(settings) if name not in schema.names]:
            raise UserError(f"{file} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
        pyarrow.nulls(0, schema.field(settings.text).type).cast(pyarrow.binary())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file} cannot be read as Parquet with texts in {settings.text!r}: {one_line(error)}"
        ) from None
    groups = [about.row_group(index) for index in range(about.num_row_groups)]
    for run in runs_of([group.total_byte_size for group in groups], CHUNK):
        first = sum(group.num_rows for group in groups[: run[0]])
        yield first, sum(groups[index].total_byte_size for index in run), tuple(run)
