"""Rows with a text column: JSONL, plain or compressed, and Parquet; on this machine, or in a dataset of the hub."""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from etude.data.document import TOO_LARGE, USUAL_RATIO, Drop, OpenSource, Part, Raw, local, printable
from etude.data.filters.licence import all_of
from etude.errors import UserError, one_line
from etude.files import digest_of
from etude.models.fetch import fetch_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

    Row = tuple[int, dict[str, Any], int, str]  # number, columns, bytes, and what is wrong with it, if anything
    Rows = Callable[[], Iterator[Row]]

CHUNK = 32_000_000  # bytes of one part
ROWS_AT_ONCE = 64
BLOCK = 1 << 16


def identify_tables(settings: SourceSettings) -> dict[str, str]:
    """Return the dataset with its revision; or a digest of the files, by size and time of change."""
    if settings.dataset:
        return {"dataset": "@".join(_dataset(settings))}
    root, files = _located(settings)
    stats = [(printable(os.path.relpath(file, root)), file.stat()) for file in files]
    return {"files": digest_of([[name, about.st_size, about.st_mtime_ns] for name, about in stats])}


def open_tables(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch the files of a dataset, and share the rows of all files out in parts."""
    if settings.dataset:
        name, revision = _dataset(settings)
        reporter.say(f"fetching {name} from the hub …")
        # For the hub `**/` is one folder or more, not none.
        wanted = [settings.files, settings.files.replace("**/", "")]
        root = fetch_files("dataset", name, revision, cache / "hub", allow_patterns=wanted)
        files = sorted(path for path in root.glob(settings.files) if path.is_file())
        location, commit = f"dataset {name}", root.name
        if not files:
            raise UserError(f"source {settings.name!r}: {name} has no files that match {settings.files!r}; set `files`")
    else:
        root, files = _located(settings)
        location, commit = f"parquet {settings.parquet}" if settings.parquet else f"jsonl {settings.jsonl}", None
    return OpenSource(location, commit, _parts(files, root, settings, most_bytes))


def _located(settings: SourceSettings) -> tuple[Path, list[Path]]:
    """Return the files that a name or pattern stands for, in path order, and the innermost folder around them."""
    pattern = str(local(settings.jsonl or settings.parquet or ""))
    names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207 - may be absolute
    files = sorted(Path(name).absolute() for name in names if Path(name).is_file())
    if not files:
        raise UserError(f"source {settings.name!r}: no file is or matches {pattern!r} (looked in {Path.cwd()})")
    return Path(os.path.commonpath([file.parent for file in files])), files


def _dataset(settings: SourceSettings) -> tuple[str, str]:
    """Return the dataset's name and its revision, which must be given: the default branch moves."""
    name, _, revision = str(settings.dataset).partition("@")
    if not revision:
        raise UserError(f"source {settings.name!r}: {name} changes with time; say which one: {name}@COMMIT")
    return name, revision


def _parts(files: list[Path], root: Path, settings: SourceSettings, most_bytes: int) -> list[Part]:
    """Return the parts of each file: row groups, all of a compressed file, or ranges of bytes."""
    parts = []
    for file in files:
        size, lines = file.stat().st_size, partial(jsonl_rows, file, most_bytes)
        if settings.parquet or file.suffix == ".parquet":
            pieces = [*_row_groups(file, settings)]
        elif file.suffix == ".gz":
            pieces = [(USUAL_RATIO * size, partial(lines, 0, inf))]
        else:
            starts = range(0, size, CHUNK)
            pieces = [(min(CHUNK, size - start), partial(lines, start, start + CHUNK)) for start in starts]
        read = partial(_read, settings, most_bytes, printable(str(file.relative_to(root))))
        parts += [Part(about, partial(read, rows)) for about, rows in pieces]
    return parts


def _read(settings: SourceSettings, most_bytes: int, file: str, rows: Rows) -> Iterator[Raw | Drop]:
    """Yield each row; what is lost with the rest of a damaged piece is one drop."""
    try:
        for number, columns, size, fault in rows():
            name = f"{file}#{number}"
            repository = _words(columns, settings.repository_column) or name
            text = columns.get(settings.text)
            content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
            if fault or not isinstance(content, bytes):
                yield Drop(repository, name, "read", fault or "no text", size)
            elif len(content) > most_bytes:
                yield Drop(repository, name, "read", TOO_LARGE, size)
            elif settings.repository_column and settings.repository_column not in columns:
                yield Drop(repository, name, "read", f"no column {settings.repository_column!r}", size)
            else:
                yield Raw(repository, name, content, "row", _words(columns, settings.licence_column) or None)
    except (OSError, EOFError, zlib.error, ValueError, ArrowException):
        yield Drop(file, file, "read", "file is damaged", 0)


def _words(columns: dict[str, Any], name: str | None) -> str:
    """Return what a column says; of a list everything, because all licences hold."""
    value = columns.get(name) if name else None
    values = [one for one in (value if isinstance(value, list) else [value]) if one is not None]
    texts = (one if isinstance(one, bytes) else str(one).encode(errors="backslashreplace") for one in values)
    return all_of(text.decode(errors="backslashreplace") for text in texts)


def jsonl_rows(path: Path, most_bytes: int, start: int, end: float) -> Iterator[Row]:
    """Yield the lines of a JSONL file that begin in a range of bytes; a line's number is the byte it begins at."""
    longest = 4 * most_bytes + BLOCK  # a text within the limit makes no longer line
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        at = file.seek(max(start - 1, 0))  # in a line that began before, if only in its newline
        while at < end and (line := file.readline(longest)):
            size, piece, mine = len(line), line, at >= start
            while not piece.endswith(b"\n") and (mine or at + size < end) and (piece := file.readline(BLOCK)):
                size += len(piece)
            if mine:
                columns, fault = _parsed(line) if size == len(line) else ({}, "line too long")
                yield at, columns, size, fault
            at += size


def _parsed(line: bytes) -> tuple[dict[str, Any], str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "invalid JSON" if line.strip() else "empty line"
    return (row, "") if isinstance(row, dict) else ({}, "not a JSON object")


def _row_groups(path: Path, settings: SourceSettings) -> Iterator[tuple[int, Rows]]:
    """Yield the size of each row group of a Parquet file, and what reads it."""
    named = (settings.text, settings.repository_column, settings.licence_column)
    columns = [name for name in dict.fromkeys(named) if name]
    try:
        with ParquetFile(path) as file:
            schema, about = file.schema_arrow, file.metadata
        if missing := [name for name in columns if name not in schema.names]:
            raise UserError(f"{path} has no column {missing[0]!r}; it has {', '.join(schema.names)}")
        schema.empty_table().column(settings.text).cast("large_binary")
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} is no Parquet file with texts in {settings.text!r}: {one_line(error)}") from None
    first = 0
    for index in range(about.num_row_groups):
        group = about.row_group(index)
        yield group.total_byte_size, partial(_group_rows, path, columns, index, first)
        first += group.num_rows


def _group_rows(path: Path, columns: list[str], group: int, number: int) -> Iterator[Row]:
    with ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:  # else all of the group is in memory
        for batch in file.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False):
            texts = batch.column(columns[0]).cast("large_binary").to_pylist()  # nobody has checked that they are UTF-8
            for text, row in zip(texts, batch.select(columns[1:]).to_pylist(), strict=True):
                yield number, {**row, columns[0]: text}, len(text or b""), ""
                number += 1
