from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from etude.errors import UserError
from etude.lineage.weight_files import INDEX, SINGLE, read_header
from etude.models.load import digest_files, weight_files
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.progress import Reporter

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4)
KINDS = st.sampled_from(["float32", "float16", "int64", "uint8", "bool"])
METADATA = st.none() | st.dictionaries(st.text("ab", min_size=1), st.text("Ü\n", max_size=3), min_size=1)


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """A place to write one file to, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / SINGLE


def whole_bytes(shapes: list[list[int]], kind: str, metadata: dict[str, str] | None) -> bytes:
    tensors = {f"layer.{index}": np.ones(shape, dtype=kind) for index, shape in enumerate(shapes)}
    return bytes(save(tensors, metadata))


def readable(file: Path) -> bool:
    """Return what the library that reads such files says."""
    try:
        with safe_open(file, "numpy") as opened:
            return opened.keys() is not None
    except SafetensorError:
        return False


@settings(deadline=None)
@given(SHAPES, KINDS, METADATA, st.data())
def test_a_file_cut_off_at_any_byte_is_refused_and_a_whole_one_is_not(
    file: Path, shapes: list[list[int]], kind: str, metadata: dict[str, str] | None, data: st.DataObject
) -> None:
    whole = whole_bytes(shapes, kind, metadata)
    file.write_bytes(whole)
    assert readable(file)
    read_header(file)
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert not readable(file)
    with pytest.raises(UserError, match=one_line(file, "fetch it again")):
        read_header(file)


def test_every_single_cut_of_a_file_is_refused(file: Path) -> None:
    whole = whole_bytes([[3], [2, 2]], "float32", {"format": "pt"})
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match=one_line(file)):
            read_header(file)


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.binary(min_size=1, max_size=20))
def test_bytes_after_the_end_are_refused(file: Path, shapes: list[list[int]], extra: bytes) -> None:
    whole = whole_bytes(shapes, "float32", None)
    file.write_bytes(whole + extra)
    words = f"{len(whole) + len(extra):,} bytes", f"promises {len(whole):,};"
    with pytest.raises(UserError, match=one_line(file, "has bytes after its end", *words)):
        read_header(file)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=64))
def test_garbage_is_refused(file: Path, garbage: bytes) -> None:
    file.write_bytes(garbage)
    if not readable(file):
        with pytest.raises(UserError, match=one_line(file)):
            read_header(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data_offsets", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def with_header(header: Any, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xff",
        [],
        "text",
        None,
        {"a": None},
        {"a": {}},
        {"a": {"data_offsets": 3}},
        {"a": {"data_offsets": [0]}},
        {"a": {"data_offsets": [0, -1]}},
        pytest.param({"a": {"data_offsets": [0, "x"]}}),
        pytest.param({"a": {"data_offsets": [0, None]}}),
        pytest.param({"a": {"data_offsets": [0, 1]}, "b": {"data_offsets": [0, []]}}),
    ],
)
def test_a_damaged_header_is_refused(file: Path, header: Any) -> None:
    file.write_bytes(with_header(header))
    assert not readable(file)
    with pytest.raises(UserError, match=one_line(file)):
        read_header(file)


def test_any_json_for_a_header_is_refused_in_one_line_or_is_whole(file: Path) -> None:
    @settings(deadline=None, max_examples=300, database=None, derandomize=True, report_multiple_bugs=False)
    @given(st.dictionaries(st.text("ab", max_size=2), st.fixed_dictionaries({"data_offsets": JSON}), max_size=3) | JSON)
    def search(header: Any) -> None:
        file.write_bytes(with_header(header))
        try:
            read_header(file)
        except UserError as refusal:
            assert "\n" not in str(refusal)  # noqa: PT017 - a header of no tensors is whole, any other is refused

    search()


@pytest.mark.parametrize("length", [0, 1 << 20, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused_without_reading_it(file: Path, length: int) -> None:
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(UserError, match=one_line(file, "no valid header")):
        read_header(file)


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, a test's own."""
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


def shard(model: Path, *files: str) -> dict[str, Any]:
    """Split the model's single file, tensors in turn, and return the index."""
    with safe_open(model / SINGLE, "numpy") as whole:
        tensors = {name: whole.get_tensor(name) for name in whole.keys()}  # noqa: SIM118 - it is no mapping
    places = {name: files[index % len(files)] for index, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, model / file)
    (model / SINGLE).unlink()
    index = {"metadata": {}, "weight_map": places}
    (model / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return index


def test_a_whole_model_has_its_weight_files(model: Path) -> None:
    assert weight_files(model) == [model / SINGLE]
    shard(model, "b-2.safetensors", "a-1.safetensors")
    (model / "not-mentioned.safetensors").write_bytes(b"")
    assert weight_files(model) == [model / "a-1.safetensors", model / "b-2.safetensors"]


def test_a_missing_shard_is_named(model: Path) -> None:
    shard(model, "a.safetensors", "b.safetensors", "c.safetensors")
    (model / "b.safetensors").unlink()
    with pytest.raises(UserError, match=one_line(model, "lacks b.safetensors", "1 of 3")):
        weight_files(model)


def test_a_shard_that_is_cut_off_is_named(model: Path) -> None:
    shard(model, "a.safetensors", "b.safetensors")
    content = (model / "b.safetensors").read_bytes()
    (model / "b.safetensors").write_bytes(content[:-1])
    promised = f"{len(content) - 1:,} bytes, its header promises {len(content):,}"
    with pytest.raises(UserError, match=one_line(model / "b.safetensors", "is cut off", promised)):
        weight_files(model)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": ["a.safetensors"]}',
        '{"weight_map": {"a": {}}}',
        '{"weight_map": {"a": 1, "b": "a.safetensors"}}',
        pytest.param('{"weight_map": {"a": 1}}'),
        pytest.param('{"weight_map": {}}'),
    ],
)
def test_a_damaged_index_is_refused(model: Path, index: str) -> None:
    shard(model, "a.safetensors")
    (model / INDEX).write_text(index, encoding="utf-8")
    with pytest.raises(UserError, match=one_line(model / INDEX, "is damaged")):
        weight_files(model)


def test_an_index_that_leads_out_of_the_folder_is_refused(model: Path) -> None:
    index = shard(model, "a.safetensors")
    (model / "a.safetensors").rename(model.parent / "outside.safetensors")
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../outside.safetensors")
    (model / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(model / INDEX)):
        weight_files(model)


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / SINGLE).unlink()
    with pytest.raises(UserError, match=one_line(model, "no weights", SINGLE, INDEX)):
        weight_files(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=one_line(model, "*.bin", "safetensors")):
        weight_files(model)


def test_a_folder_without_a_config_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    for folder in (model, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=one_line(folder, "config.json is missing")):
            weight_files(folder)


def test_digests_are_of_the_bytes_under_paths_inside_the_folder(tmp_path: Path, quiet: Reporter) -> None:
    contents = {"a": b"", "sub/b": b"x" * 3_000_000}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    states: list[dict[str, Any]] = []
    quiet.listener = states.append
    found = digest_files((tmp_path / name for name in contents), tmp_path, quiet, "hashing")
    assert {name: (digest.sha256, digest.bytes) for name, digest in found.items()} == {
        name: (hashlib.sha256(content).hexdigest(), len(content)) for name, content in contents.items()
    }
    assert (states[-1]["done"], states[-1]["total"], states[-1]["label"]) == (3_000_000, 3_000_000, "hashing")
