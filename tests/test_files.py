from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_digest_ignores_the_order_of_keys(value: dict[str, object]) -> None:
    assert files.digest_of(value) == files.digest_of(dict(reversed(value.items())))


def test_digest_of_a_value_is_the_sha256_of_its_canonical_text() -> None:
    assert files.digest_of({"b": [1, "é"], "a": None}) == hashlib.sha256('{"a":null,"b":[1,"é"]}'.encode()).hexdigest()


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "artefact"
    with pytest.raises(RuntimeError), files.whole_file(target) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    files.write_text(target, "whole")
    with pytest.raises(RuntimeError), files.whole_file(target) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_hash_of_a_file_and_progress_in_bytes(tmp_path: Path) -> None:
    content = os.urandom(3 * files.READ_BLOCK + 17)
    (tmp_path / "blob").write_bytes(content)
    heard: list[int] = []
    assert files.sha256_file(tmp_path / "blob", heard.append) == hashlib.sha256(content).hexdigest()
    assert sum(heard) == len(content)


def test_publishing_does_not_replace(tmp_path: Path) -> None:
    for name in ("work", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError, match="not empty"):
        files.publish_folder(tmp_path / "work", tmp_path / "final")
    assert (tmp_path / "final" / "file").read_text() == "final"


def test_link_is_a_link_where_it_can_be_and_a_copy_where_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("bytes")
    files.link_or_copy(source, tmp_path / "near" / "target")
    assert (tmp_path / "near" / "target").stat().st_ino == source.stat().st_ino
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    far = other / f"etude-test-{os.getpid()}"
    try:
        files.link_or_copy(source, far)
        assert far.read_text() == "bytes"
    finally:
        far.unlink(missing_ok=True)


def test_other_errors_of_linking_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        files.link_or_copy(tmp_path / "absent", tmp_path / "target")
    assert raised.value.errno == errno.ENOENT


def test_many_files_are_hashed_at_once_each_byte_told_once(tmp_path: Path) -> None:
    contents = {tmp_path / f"{number:02}": bytes([number]) * (number * 300_000) for number in range(12)}
    for path, content in contents.items():
        path.write_bytes(content)
    told: list[int] = []
    digests = files.sha256_files(reversed(contents), told.append)
    assert digests == {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    assert list(digests) == list(reversed(contents))
    assert sum(told) == sum(map(len, contents.values()))


def test_a_stop_while_files_are_hashed_ends_all_of_them(tmp_path: Path) -> None:
    told: list[int] = []
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(bytes(5 << 20))

    def stop(size: int) -> None:
        told.append(size)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.sha256_files(tmp_path.iterdir(), stop)
    assert len(told) == 1
    with pytest.raises(FileNotFoundError):
        files.sha256_files([tmp_path / "gone"])
