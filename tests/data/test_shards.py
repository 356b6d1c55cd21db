from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.packing import Shard, dtype_for, pack, write_shard
from etude.errors import UserError
from etude.files import sha256_file
from tests.lineage.refusals import one_line

WINDOWS = st.lists(st.lists(st.integers(0, 319), max_size=30), max_size=12)
PARTS = ("tokens", "rows", "pieces", "documents")


def write(folder: Path, window: list[list[int]], capacity: int = 8, vocabulary: int = 320) -> dict[str, Any]:
    packed = pack([len(document) for document in window], capacity)
    numbers = range(100, 100 + len(window))
    return write_shard(folder, "s", packed, [np.array(each, dtype=np.int64) for each in window], numbers, vocabulary)


@settings(max_examples=50)
@given(WINDOWS, st.integers(1, 12), st.sampled_from([320, 100_000]))
def test_what_is_written_is_read(window: list[list[int]], capacity: int, vocabulary: int) -> None:
    packed = pack([len(document) for document in window], capacity)
    with tempfile.TemporaryDirectory() as folder:
        said = write(Path(folder), window, capacity, vocabulary)
        shard = Shard.open(Path(folder), "s")
        assert (said["rows"], said["tokens"]) == (len(packed), sum(map(len, window))) == (len(shard), len(shard.tokens))
        assert shard.tokens.dtype == dtype_for(vocabulary)
        assert np.load(Path(folder, "s.documents.npy")).tolist() == (packed.documents + 100).tolist()
        for index in range(len(packed)):
            row = shard.row(index)
            pieces = [window[document][start : start + length] for document, start, length in packed.row(index)]
            assert np.split(row.tokens, row.starts[1:])[0].tolist() == pieces[0]
            assert [part.tolist() for part in np.split(row.tokens, row.starts[1:])] == pieces
            assert row.starts[0] == 0
            assert shard.size(index) == len(row.tokens)


def test_the_files_are_those_numpy_would_write(tmp_path: Path) -> None:
    said = write(tmp_path, [[1, 2, 3], [4] * 11, [5, 6]])  # rows: 4 × 8, then 1 2 3 | 4 4 4 | 5 6
    expected = {
        "tokens": np.array([4] * 8 + [1, 2, 3, 4, 4, 4, 5, 6], dtype="<u2"),
        "rows": np.array([0, 8, 16], dtype="<i8"),
        "pieces": np.array([0, 8, 11, 14, 16], dtype="<i8"),
        "documents": np.array([101, 100, 101, 102], dtype="<i8"),
    }
    for part, values in expected.items():
        plain = io.BytesIO()
        np.save(plain, values)
        assert (tmp_path / f"s.{part}.npy").read_bytes() == plain.getvalue()
    assert said["files"] == {f"s.{part}.npy": sha256_file(tmp_path / f"s.{part}.npy") for part in PARTS}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(said["files"])


def test_equal_windows_give_equal_bytes(tmp_path: Path) -> None:
    window = [list(range(length)) for length in (3, 17, 9, 1, 0, 30)]
    assert write(tmp_path / "a", window) == write(tmp_path / "b", window)


class Full(list[np.ndarray]):
    """A window of which the second document cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise OSError(28, "no space left")
        return np.zeros(8)


def test_a_window_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"):
        write_shard(tmp_path, "s", pack([8, 8], 8), Full(), range(2), 320)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [-1, 320, 70_000])
def test_a_token_outside_of_the_vocabulary_is_a_mistake(tmp_path: Path, token: int) -> None:
    with pytest.raises(AssertionError, match="outside of the vocabulary"):
        write(tmp_path, [[1, 2], [3, token]])
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_became_shorter_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="changed length"):
        write_shard(tmp_path, "s", pack([4, 5], 10), [np.ones(4, dtype=np.int64)] * 2, range(2), 320)


def test_the_smallest_type_that_holds_every_token() -> None:
    assert [dtype_for(size) for size in (300, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: path.unlink(),
    lambda path: path.write_bytes(path.read_bytes()[:-3]),
    lambda path: path.write_bytes(path.read_bytes()[:40]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"not an array"),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", ["tokens", "rows", "pieces"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, part: str, damage: Callable[[Path], object]) -> None:
    write(tmp_path, [[1, 2, 3], [4] * 11, [5, 6]])
    damage(tmp_path / f"s.{part}.npy")
    again = "delete the corpus's folder and build it again"
    with pytest.raises(UserError, match=one_line(f"s.{part}.npy cannot be read", again)):
        Shard.open(tmp_path, "s")
