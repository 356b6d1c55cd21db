from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from etude.data.document import Drop, Raw
from etude.data.settings import SourceSettings
from etude.data.sources.table import JsonlPart, line_ranges
from etude.errors import UserError
from tests.data.sources.reading import MOST, entries, identity, opened, reasons, texts
from tests.lineage.refusals import one_line


def line(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


LINES = st.lists(st.binary(max_size=12) | st.just(b'{"text": "x"}') | st.just(b""), max_size=12)


@given(LINES.map(b"\n".join), st.integers(1, 40))
def test_ranges_share_out_every_line_once(content: bytes, chunk: int) -> None:
    settings = SourceSettings(name="some", jsonl="x")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        ranges = list(line_ranges(path, chunk))
        parts = [JsonlPart(settings, MOST, str(path), "rows", row, 0, start, end) for start, end, row in ranges]
        assert [[start, end] for start, end, _ in ranges] == [
            [start, end]
            for start, end in zip([0, *(end for _, end, _ in ranges)], [end for _, end, _ in ranges], strict=False)
        ]
        lines = content.split(b"\n")
        lines = lines if lines[-1] else lines[:-1]
        assert sum(end - start for start, end, _ in ranges) == len(content)
        assert [entry.path for entry in entries(parts)] == [f"rows#{number}" for number in range(len(lines))]
        whole = JsonlPart(settings, MOST, str(path), "rows", 0, 0)
        assert entries(parts) == entries([whole])
        (Path(folder) / "rows.jsonl.gz").write_bytes(gzip.compress(content))
        packed = JsonlPart(settings, MOST, f"{path}.gz", "rows", 0, 0)
        assert entries(parts) == entries([packed])
        assert all(end - start <= chunk + max(map(len, lines)) + 1 for start, end, _ in ranges)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_row_is_a_document_or_a_drop_with_its_reason(tmp_path: Path, suffix: str) -> None:
    rows = {
        line(text="first", repo="r1", licence="MIT"): None,
        b"\xef\xbb\xbf" + line(text="b\u00e9", other=[1, {}], repo=7, licence=["MIT", "Apache-2.0"]): None,
        line(text="x" * MOST): None,
        line(text="x" * (MOST + 1)): "over 1000 bytes",
        line(text="é" * (MOST // 2 + 1)): "over 1000 bytes",
        b'{"text": \n': "invalid JSON",
        b"[1]\n": "not a JSON object",
        b'"text"\n': "not a JSON object",
        line(other="x"): "no text",
        line(text=None): "no text",
        line(text=["x"]): "no text",
        b'{"text": "\xff"}\n': "not UTF-8",
        b'{"text": "\\ud800"}\n': "half a surrogate pair",
        b"\n": "empty line",
        b" \r\n": "empty line",
        b"[" * 60_000 + b"\n": "invalid JSON",
        b'{"text": 1' + b"0" * 5000 + b"}\n": "invalid JSON",
        b'{"text": "' + b"x" * (4 * MOST + 70_000) + b'"}\n': "line too long",
        b'{"text": "last", "repo": "\\ud800"}': None,
    }
    path = tmp_path / f"rows.jsonl{suffix}"
    content = b"".join(rows)
    path.write_bytes(gzip.compress(content) if suffix else content)
    source = opened(jsonl=str(path), repository_column="repo", licence_column="licence")
    assert (source.location, source.revision) == (f"jsonl {path}", None)
    name = path.name
    assert reasons(source.parts) == {f"{name}#{at}": why for at, why in enumerate(rows.values()) if why}
    kept = [entry for entry in entries(source.parts) if isinstance(entry, Raw)]
    assert kept == [
        Raw("r1", f"{name}#0", "first", "row", "MIT"),
        Raw("7", f"{name}#1", "bé", "row", "MIT AND Apache-2.0"),
        Raw(f"{name}#2", f"{name}#2", "x" * MOST, "row"),
        Raw(r"\ud800", f"{name}#18", "last", "row"),
    ]
    assert [part.licence_files() for part in source.parts] == [[]]


def test_the_longest_line_that_can_hold_a_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    longest = 4 * MOST + 65_536
    fits = line(text="x", pad="")
    fits = line(text="x", pad="y" * (longest - len(fits)))
    path.write_bytes(fits + fits.replace(b"yy", b"yyy", 1) + fits)
    assert len(fits) == longest
    assert reasons(opened(jsonl=str(path)).parts) == {"rows.jsonl#1": "line too long"}
    assert texts(opened(jsonl=str(path)).parts) == {"rows.jsonl#0": "x", "rows.jsonl#2": "x"}


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
    name = "rows.jsonl.gz#1"
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
    assert list(kept.values()) == [f"row {at} {at * 7919}" for at in range(len(kept))]


def test_patterns_name_rows_by_file_and_row(tmp_path: Path) -> None:
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "rows.jsonl").write_bytes(line(text=folder) * 2)
    (tmp_path / "b" / "other.txt").write_bytes(b"x")
    assert texts(opened(jsonl=f"{tmp_path}/**/*.jsonl").parts) == {
        "a/rows.jsonl#0": "a", "a/rows.jsonl#1": "a", "b/c/rows.jsonl#0": "b/c", "b/c/rows.jsonl#1": "b/c",
    }  # fmt: skip
    (tmp_path / "[a]").write_bytes(line(text="odd name"))
    assert texts(opened(jsonl=f"{tmp_path}/[a]").parts) == {"[a]#0": "odd name"}


def write_parquet(path: Path, rows: dict[str, Any], group: int = 3, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(rows), path, row_group_size=group, **options)
    return path


def test_parquet_rows_are_numbered_through_all_row_groups(tmp_path: Path) -> None:
    values = [f"text {at}" for at in range(200)]
    path = write_parquet(tmp_path / "rows.parquet", {"id": list(range(200)), "body": values}, group=90)
    parts = opened(parquet=str(path), text="body").parts
    assert texts(parts) == {f"rows.parquet#{at}": value.encode() for at, value in enumerate(values)}
    large = [f"{at:08}" * 125_000 for at in range(80)]  # 80 MB
    path = write_parquet(tmp_path / "large.parquet", {"text": large}, group=10)
    parts = opened(parquet=str(path), most_bytes=2_000_000).parts
    assert len(parts) == 3
    assert [entry.path for part in parts for entry in part.read()] == [f"large.parquet#{at}" for at in range(80)]


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
        Drop("r", "rows.parquet#3", "read", "over 1000 bytes", 1001),
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
    start = group.data_page_offset
    path.write_bytes(
        content[:start]
        + b"\xff" * (group.total_compressed_size - 10)
        + content[start + group.total_compressed_size - 10 :]
    )
    read = entries(opened(parquet=str(path)).parts)
    assert len([entry for entry in read if isinstance(entry, Raw)]) == 100
    assert [entry.reason for entry in read if isinstance(entry, Drop)] == ["file is damaged"]
    for broken in (content[:-50], b"", b"PAR1" + content[4:-4] + b"xxxx"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=one_line(path, "cannot be read as Parquet")):
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
    assert texts(opened(jsonl=pattern).parts) == {"rows.jsonl.gz#0": "x"}
    before = identity(jsonl=pattern)
    blob.write_bytes(gzip.compress(line(text="other")))
    assert identity(jsonl=pattern) != before
