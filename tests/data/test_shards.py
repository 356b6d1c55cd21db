from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.packing import pack
from etude.data.shards import Shard, dtype_for, write_shard
from etude.errors import UserError
from etude.files import sha256_file
from tests.lineage.refusals import one_line

WINDOWS = st.lists(st.lists(st.integers(0, 319), max_size=30), max_size=12)
PARTS = ("tokens", "rows", "pieces", "documents")


def write(folder: Path, window: list[list[int]], capacity: int = 8, vocabulary: int = 320) -> dict[str, Any]:
    packed = pack([len(document) for document in window], capacity)
    numbers = range(100, 100 + len(window))
    return write_shard(folder, "s", packed, lambda index: np.array(window[index], dtype=np.int64), numbers, vocabulary)


@settings(max_examples=50)
@given(WINDOWS, st.integers(1, 12), st.sampled_from([320, 100_000]))
def test_what_is_written_is_read(window: list[list[int]], capacity: int, vocabulary: int) -> None:
    packed = pack([len(document) for document in window], capacity)
    with tempfile.TemporaryDirectory() as folder:
        said = write(Path(folder), window, capacity, vocabulary)
        shard = Shard.open(Path(folder), "s")
        assert (said["rows"], said["tokens"]) == (len(packed), sum(map(len, window))) == (len(shard), len(shard.tokens))
        assert shard.tokens.dtype == dtype_for(vocabulary)
        assert shard.documents.tolist() == (packed.documents + 100).tolist()
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


def test_documents_are_asked_for_row_by_row(tmp_path: Path) -> None:
    packed = pack([3, 11, 2], 8)
    asked: list[int] = []

    def document(index: int) -> np.ndarray:
        asked.append(index)
        return np.full([3, 11, 2][index], index)

    write_shard(tmp_path, "s", packed, document, range(3), 320)
    assert asked == packed.documents.tolist()


def test_a_window_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    def document(index: int) -> np.ndarray:
        if index == 1:
            raise OSError(28, "no space left")
        return np.zeros(8)

    with pytest.raises(OSError, match="no space"):
        write_shard(tmp_path, "s", pack([8, 8], 8), document, range(2), 320)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [-1, 320, 70_000])
def test_a_token_outside_of_the_vocabulary_is_a_mistake(tmp_path: Path, token: int) -> None:
    with pytest.raises(AssertionError, match="outside of the vocabulary"):
        write(tmp_path, [[1, 2], [3, token]])
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_became_shorter_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="changed length"):
        write_shard(tmp_path, "s", pack([4, 5], 10), lambda index: np.ones(4, dtype=np.int64), range(2), 320)


def test_the_smallest_type_that_holds_every_token() -> None:
    assert [dtype_for(size) for size in (300, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def _change(change: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, change(np.load(path)))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    *[(part, lambda path: path.unlink(), "is missing") for part in PARTS],
    *[(part, lambda path: path.write_bytes(path.read_bytes()[:-3]), "is damaged") for part in PARTS],
    *[(part, lambda path: path.write_bytes(path.read_bytes() + b"x"), r"\d+ bytes, not \d+") for part in PARTS],
    *[(part, lambda path: path.write_bytes(path.read_bytes()[:40]), "is damaged") for part in PARTS],
    *[(part, lambda path: path.write_bytes(b""), "is damaged") for part in PARTS],
    *[(part, lambda path: path.write_bytes(b"not an array"), "is damaged") for part in PARTS],
    *[(part, _change(lambda values: values.astype(float)), "expected type") for part in PARTS],
    *[(part, _change(lambda values: values[:, None]), "expected type") for part in PARTS],
    *[(part, lambda path: shutil.copy(path.with_name("other.npz"), path), "expected type") for part in PARTS],
    ("rows", _change(lambda rows: rows[::-1]), "do not rise"),
    ("rows", _change(lambda rows: rows[:-1]), "do not rise"),
    ("rows", _change(lambda rows: rows[1:]), "do not rise"),
    ("rows", _change(lambda rows: rows[:0]), "do not rise"),
    ("rows", _change(lambda rows: np.insert(rows, 1, rows[1])), "do not rise"),
    ("pieces", _change(lambda pieces: pieces + 1), "do not rise"),
    ("pieces", _change(lambda pieces: np.delete(pieces, 1)), "begins inside a piece"),
    ("documents", _change(lambda documents: documents[1:]), "3 entries for 4 pieces"),
]


@pytest.mark.parametrize(("part", "damage", "said"), DAMAGE)
def test_damage_is_named(tmp_path: Path, part: str, damage: Callable[[Path], object], said: str) -> None:
    write(tmp_path, [[1, 2, 3], [4] * 11, [5, 6]])
    np.savez(tmp_path / "other.npz", np.arange(3))
    damage(tmp_path / f"s.{part}.npy")
    with pytest.raises(UserError, match=said) as raised:
        Shard.open(tmp_path, "s")
    assert f"s.{part}.npy" in str(raised.value)
    assert str(raised.value).endswith("delete the corpus's folder and build it again")
    assert "\n" not in str(raised.value)


def test_tokens_cut_to_fewer_are_seen_by_the_offsets(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [4] * 11])
    _change(lambda tokens: tokens[:-1])(tmp_path / "s.tokens.npy")
    with pytest.raises(UserError, match=one_line("s.rows.npy", "to the 13 tokens")):
        Shard.open(tmp_path, "s")
