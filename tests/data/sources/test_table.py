from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import tracemalloc
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from etude.data.document import Drop, Raw
from etude.data.sources.table import CHUNK, jsonl_rows
from etude.errors import UserError
from tests.data.sources.reading import MOST, entries, identity, opened, reasons, texts
from tests.lineage.refusals import one_line


def line(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


LINES = st.lists(st.binary(max_size=12) | st.just(b'{"text": "x"}') | st.just(b""), max_size=12)


@given(LINES.map(b"\n".join), st.integers(1, 40))
def test_ranges_share_out_every_line_once(content: bytes, chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        rows = [row for start in range(0, len(content), chunk) for row in jsonl_rows(path, MOST, start, start + chunk)]
        lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
        assert [size for _, _, size, _ in rows] == [len(line) for line in lines]
        assert [number for number, *_ in rows] == [sum(map(len, lines[:at])) for at in range(len(lines))]
        assert rows == list(jsonl_rows(path, MOST, 0, inf))
        packed = Path(folder) / "rows.jsonl.gz"
        packed.write_bytes(gzip.compress(content))
        assert rows == list(jsonl_rows(packed, MOST, 0, inf))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_row_is_a_document_or_a_drop_with_its_reason(tmp_path: Path, suffix: str) -> None:
    rows = {
        line(text="first", repo="r1", licence="MIT"): None,
        b"\xef\xbb\xbf" + line(text="b\u00e9", other=[1, {}], repo=7, licence=["MIT", "Apache-2.0"]): None,
        line(text="x" * MOST, repo="r"): None,
        line(text="lost"): "no column 'repo'",
        line(text="x" * (MOST + 1)): "over max_bytes",
        line(text="é" * (MOST // 2 + 1)): "over max_bytes",
        b'{"text": \n': "invalid JSON",
        b"[1]\n": "not a JSON object",
        b'"text"\n': "not a JSON object",
        line(other="x"): "no text",
        line(text=None): "no text",
        line(text=["x"]): "no text",
        b'{"text": "\xff"}\n': "invalid JSON",
        b"\n": "empty line",
        b" \r\n": "empty line",
        b"[" * 60_000 + b"\n": "invalid JSON",
        b'{"text": 1' + b"0" * 5000 + b"}\n": "invalid JSON",
        b'{"text": "' + b"x" * (4 * MOST + 70_000) + b'"}\n': "line too long",
        b'{"text": "\\ud800", "": "x", "repo": 0}\n': None,  # half a surrogate pair; the decoder judges that
        b'{"text": "last", "repo": "\\ud800"}': None,
    }
    path = tmp_path / f"rows.jsonl{suffix}"
    content = b"".join(rows)
    path.write_bytes(gzip.compress(content) if suffix else content)
    source = opened(jsonl=str(path), repository_column="repo", licence_column="licence")
    assert (source.location, source.revision) == (f"jsonl {path}", None)
    begins = accumulate(map(len, rows), initial=0)
    names = [f"{path.name}#{at}" for at in begins][:-1]
    assert reasons(source.parts) == {name: why for name, why in zip(names, rows.values(), strict=True) if why}
    kept = [entry for entry in entries(source.parts) if isinstance(entry, Raw)]
    assert kept == [
        Raw("r1", names[0], b"first", "row", "MIT"),
        Raw("7", names[1], "bé".encode(), "row", "MIT AND Apache-2.0"),
        Raw("r", names[2], b"x" * MOST, "row"),
        Raw("0", names[-2], b"\xed\xa0\x80", "row"),
        Raw(r"\ud800", names[-1], b"last", "row"),
    ]
    assert [part.licences() for part in source.parts] == [{}]


def test_the_longest_line_that_can_hold_a_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    longest = 4 * MOST + 65_536
    fits = line(text="x", pad="")
    fits = line(text="x", pad="y" * (longest - len(fits)))
    path.write_bytes(fits + fits.replace(b"yy", b"yyy", 1) + fits)
    assert len(fits) == longest
    assert reasons(opened(jsonl=str(path)).parts) == {f"rows.jsonl#{longest}": "line too long"}
    assert texts(opened(jsonl=str(path)).parts) == {"rows.jsonl#0": b"x", f"rows.jsonl#{2 * longest + 1}": b"x"}


def test_a_huge_line_takes_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb", 1) as file:
        file.write(line(text="first"))
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + line(text="last"))
    [part] = opened(jsonl=str(tmp_path / "rows.jsonl.gz")).parts
    tracemalloc.start()
    read = list(part.read())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    name = f"rows.jsonl.gz#{len(line(text='first'))}"
    assert read[1] == Drop(name, name, "read", "line too long", 50_000_001)
    assert len(read) == 3
    assert peak < 2_000_000


def test_a_truncated_gz_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(line(text=f"row {at} {at * 7919}") for at in range(2000)))
    path.write_bytes(whole[: len(whole) // 2])
    parts = opened(jsonl=str(path)).parts
    kept = texts(parts)
    assert list(reasons(parts).values()) == ["file is damaged"]
    assert 100 < len(kept) < 1900
    assert list(kept.values()) == [f"row {at} {at * 7919}".encode() for at in range(len(kept))]


def test_patterns_name_rows_by_file_and_row(tmp_path: Path) -> None:
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rows.jsonl").write_bytes(line(text=folder) * 2)
    (tmp_path / "b" / "other.txt").write_bytes(b"x")
    assert texts(opened(jsonl=f"{tmp_path}/**/*.jsonl").parts) == {
        "a/rows.jsonl#0": b"a", "a/rows.jsonl#14": b"a", "b/c/rows.jsonl#0": b"b/c", "b/c/rows.jsonl#16": b"b/c",
    }  # fmt: skip
    (tmp_path / "[a]").write_bytes(line(text="odd name"))
    assert texts(opened(jsonl=f"{tmp_path}/[a]").parts) == {"[a]#0": b"odd name"}


def write_parquet(path: Path, rows: dict[str, Any], group: int = 3, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(rows), path, row_group_size=group, **options)
    return path


def test_parquet_rows_are_numbered_through_all_row_groups(tmp_path: Path) -> None:
    values = [f"text {at}" for at in range(200)]
    path = write_parquet(tmp_path / "rows.parquet", {"id": list(range(200)), "body": values}, group=90)
    parts = opened(parquet=str(path), text="body").parts
    assert texts(parts) == {f"rows.parquet#{at}": value.encode() for at, value in enumerate(values)}
    assert len(parts) == 3


def test_parquet_columns_of_every_kind(tmp_path: Path) -> None:
    rows = {
        "text": pyarrow.array([b"one", b"\xff", None, b"x" * 1001], pyarrow.binary()).view(pyarrow.string()),
        "repo": pyarrow.array(["r", None, "r", "r"]).dictionary_encode(),
        "licences": [["MIT", "ISC"], [], None, ["MIT"]],
    }
    path = write_parquet(tmp_path / "rows.parquet", rows)
    parts = opened(parquet=str(path), repository_column="repo", licence_column="licences").parts
    assert entries(parts) == [
        Raw("r", "rows.parquet#0", b"one", "row", "MIT AND ISC"),
        Raw("rows.parquet#1", "rows.parquet#1", b"\xff", "row"),
        Drop("r", "rows.parquet#2", "read", "no text", 0),
        Drop("r", "rows.parquet#3", "read", "over max_bytes", 1001),
    ]
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.string_view()):
        path = write_parquet(tmp_path / "kinds.parquet", {"text": pyarrow.array(["a", "b"]).cast(kind)})
        assert list(texts(opened(parquet=str(path)).parts).values()) == [b"a", b"b"]


def test_a_damaged_parquet_file_is_refused_or_keeps_what_came_before(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "rows.parquet", {"text": [f"{at}" * 50 for at in range(300)]}, 100, compression="gzip"
    )
    content = path.read_bytes()
    group = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start, size = group.dictionary_page_offset, group.total_compressed_size
    path.write_bytes(content[:start] + b"\xff" * size + content[start + size :])
    read = entries(opened(parquet=str(path)).parts)
    assert [entry.path for entry in read] == [
        *(f"rows.parquet#{at}" for at in range(100)),
        "rows.parquet",
        *(f"rows.parquet#{at}" for at in range(200, 300)),
    ]
    assert [entry for entry in read if isinstance(entry, Drop)] == [read[100]]
    assert reasons(opened(parquet=str(path)).parts) == {"rows.parquet": "file is damaged"}
    for broken in (content[:-50], b"", b"PAR1" + content[4:-4] + b"xxxx"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=one_line(path, "is no Parquet file")):
            opened(parquet=str(path))


@pytest.mark.parametrize("columns", [{"text": "body"}, {"repository_column": "body"}, {"licence_column": "body"}])
def test_a_missing_column_is_refused_with_those_there_are(tmp_path: Path, columns: dict[str, Any]) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"text": ["x"], "id": [1]})
    with pytest.raises(UserError, match=one_line(path, "no column 'body'", "text, id")):
        opened(parquet=str(path), **columns)


def test_a_column_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"text": [1, 2]})
    with pytest.raises(UserError, match=one_line(path, "'text'", "int64")):
        opened(parquet=str(path))


@pytest.mark.parametrize("use", [opened, identity])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_that_are_not_there_are_refused(tmp_path: Path, use: Any, kind: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for pattern in ("nothing.jsonl", "*.jsonl"):
        with pytest.raises(UserError, match=one_line("'some'", tmp_path / pattern)):
            use(**{kind: str(tmp_path / pattern)})


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=one_line("'some' holds no files", tmp_path)):
        opened(jsonl=str(tmp_path / "rows.jsonl"))


def test_the_identity_changes_when_a_file_does(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/*.jsonl"
    seen = set()
    for name, content in (("a", b"x"), ("a", b"xy"), ("b", b"x")):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        seen.add(identity(jsonl=pattern)["files"])
    assert len(seen) == 3
    assert identity(jsonl=pattern)["files"] in seen


def test_links_to_files_are_read_under_their_own_names(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(gzip.compress(line(text="x")))
    (tmp_path / "rows.jsonl.gz").symlink_to(blob)
    pattern = str(tmp_path / "*.gz")
    assert texts(opened(jsonl=pattern).parts) == {"rows.jsonl.gz#0": b"x"}
    before = identity(jsonl=pattern)
    blob.write_bytes(gzip.compress(line(text="other")))
    assert identity(jsonl=pattern) != before


def test_columns_of_bytes_and_numbers_say_what_they_say(tmp_path: Path) -> None:
    rows = {
        "text": ["a", "b", "c"],
        "repo": pyarrow.array([b"r", b"\xff", None]),
        "licence": pyarrow.array([b"MIT", None, b""]),
        "number": [0, 0, 1],
        "licences": [["MIT OR GPL-3.0-only", "ISC"], ["MIT OR ISC"], [None]],
    }
    path = str(write_parquet(tmp_path / "rows.parquet", rows))
    named = entries(opened(parquet=path, repository_column="repo", licence_column="licence").parts)
    assert [(raw.repository, raw.licence) for raw in named if isinstance(raw, Raw)] == [
        ("r", "MIT"), (r"\xff", None), ("rows.parquet#2", None),
    ]  # fmt: skip
    numbered = entries(opened(parquet=path, repository_column="number", licence_column="licences").parts)
    assert [(raw.repository, raw.licence) for raw in numbered if isinstance(raw, Raw)] == [
        ("0", "(MIT OR GPL-3.0-only) AND ISC"), ("0", "MIT OR ISC"), ("1", None),
    ]  # fmt: skip


def test_lines_from_windows_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a", "": "x"}\r\n{"text": "b"}\r\n')
    read = entries(opened(jsonl=str(path)).parts)
    assert read == [Raw(name, name, text, "row") for name, text in (("rows.jsonl#0", b"a"), ("rows.jsonl#27", b"b"))]


def test_a_line_longer_than_a_part_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, last = line(text="first"), line(text="last")
    path.write_bytes(first + b"x" * (2 * CHUNK) + b"\n" + last)
    parts = opened(jsonl=str(path)).parts
    assert len(parts) == 3
    end = len(first) + 2 * CHUNK + 1
    assert [(entry.path, type(entry)) for part in parts for entry in part.read()] == [
        ("rows.jsonl#0", Raw), (f"rows.jsonl#{len(first)}", Drop), (f"rows.jsonl#{end}", Raw),
    ]  # fmt: skip


def test_a_large_row_group_takes_little_memory(tmp_path: Path) -> None:
    rows = {"text": [f"{at} " * 20_000 for at in range(1000)]}
    pages: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_batch_size": 4}
    path = write_parquet(tmp_path / "rows.parquet", rows, 1000, **pages)
    assert path.stat().st_size > 70_000_000
    [part] = opened(parquet=str(path), most_bytes=1_000_000).parts
    before = pyarrow.total_allocated_bytes()
    assert max(pyarrow.total_allocated_bytes() - before for _ in part.read()) < 20_000_000


def test_names_of_files_are_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(line(text="x"))
    assert list(texts(opened(jsonl=str(tmp_path / "*.jsonl")).parts)) == [r"caf\xe9.jsonl#0"]
    assert len(identity(jsonl=str(tmp_path / "*.jsonl"))["files"]) == 64
