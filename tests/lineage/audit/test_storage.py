"""Headers against the libraries' own readers, numbers against torch, and every way a file can be broken."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from etude.errors import UserError
from etude.lineage.audit.read_weights import decoded, read_headers, weight_files


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every type of metadata and tensors of three kinds."""
    file = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_key_value("n.u8", 200, GGUFValueType.UINT8)
    writer.add_key_value("n.i8", -100, GGUFValueType.INT8)
    writer.add_key_value("n.u16", 60000, GGUFValueType.UINT16)
    writer.add_key_value("n.i16", -30000, GGUFValueType.INT16)
    writer.add_key_value("n.u32", 2**32 - 1, GGUFValueType.UINT32)
    writer.add_key_value("n.i32", -(2**31), GGUFValueType.INT32)
    writer.add_key_value("n.u64", 2**64 - 1, GGUFValueType.UINT64)
    writer.add_key_value("n.i64", -(2**63), GGUFValueType.INT64)
    writer.add_key_value("n.f32", 0.5, GGUFValueType.FLOAT32)
    writer.add_key_value("n.f64", 1e300, GGUFValueType.FLOAT64)
    writer.add_bool("n.yes", val=True)
    writer.add_array("a.words", ["", "ÿ", "three words here"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_custom_alignment(64)
    for name, values in (("one", np.arange(5)), ("two", np.ones((3, 4))), ("three", np.zeros((2, 3, 32)))):
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_gguf_headers_are_read_as_ggufs_own_reader_reads_them(gguf_file: Path) -> None:
    tensors, meta = read_headers([gguf_file])
    theirs = GGUFReader(gguf_file)
    said = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert meta == said
    assert len(meta) == 15
    assert list(tensors) == [tensor.name for tensor in theirs.tensors] == ["one", "two", "three"]
    for tensor in theirs.tensors:
        ours = tensors[tensor.name]
        assert (ours.offset, ours.kind) == (tensor.data_offset, tensor.tensor_type.name)
        assert np.array_equal(ours.mapped(), tensor.data)


@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_gguf_cut_anywhere_is_refused_in_one_line(gguf_file: Path, kept: float) -> None:
    whole = gguf_file.read_bytes()
    cut = gguf_file.with_name("cut.gguf")
    cut.write_bytes(whole[: int(kept * (len(whole) - 64))])  # the last bytes may be padding
    with pytest.raises(UserError, match="not a whole gguf file"):
        read_headers([cut])


@given(place=st.integers(8, 400), value=st.integers(0, 255))
def test_a_changed_byte_in_a_gguf_header_raises_nothing_else(gguf_file: Path, place: int, value: int) -> None:
    changed = bytearray(gguf_file.read_bytes())
    changed[place] = value
    other = gguf_file.with_name("changed.gguf")
    other.write_bytes(changed)
    with contextlib.suppress(UserError):  # a letter of a word may change unnoticed; a length must not break the reader
        read_headers([other])


@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_safetensors_cut_anywhere_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, kept: float
) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.ones(2)}, file)
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(UserError, match=r"not a whole safetensors file|is cut off"):
        read_headers([file])


@pytest.mark.parametrize("header", [b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"\xff\xff"])
def test_a_header_that_is_something_else_is_refused(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        read_headers([file])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("F8_E8M0", torch.float8_e8m0fnu)],
)
def test_all_codes_of_small_floats_mean_what_torch_means(kind: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(decoded(kind, codes.numpy()), codes.view(dtype).float().numpy(), equal_nan=True)


def test_all_codes_of_bfloat16_mean_what_torch_means() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(decoded("BF16", codes), expected, equal_nan=True)


def test_types_nobody_can_read_are_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(UserError, match="type F4 cannot be read"):
        read_headers([file])[0]["a"].mapped()
    with pytest.raises(UserError, match="Q8_1 cannot be read; use a file of another one"):
        decoded(GGMLQuantizationType.Q8_1.name, np.zeros((1, 36), np.uint8))


def test_which_files_are_the_model(tmp_path: Path) -> None:
    def refused(said: str, path: Path = tmp_path) -> None:
        with pytest.raises(UserError, match=said):
            weight_files(path)

    refused("does not exist", tmp_path / "none")
    refused("holds no safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    refused("neither a folder nor", tmp_path / "pytorch_model.bin")
    for name in ("mtp.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]  # drafting heads are not the model
    (tmp_path / "adapter_config.json").touch()
    refused("holds an adapter; merge it")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    refused("holds an adapter; merge it")
    (tmp_path / "adapter_config.json").unlink()
    index.write_text("{}")
    refused("is damaged")
    index.write_text(
        json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "model.safetensors", "c": "x-1.safetensors"}})
    )
    refused(r"lacks x-1\.safetensors \(1 of 2 weight files\)")
    (tmp_path / "x-1.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors", "x-1.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "x-1.safetensors"}}))
    refused("model.safetensors is not among the shards")  # which transformers would load, and others not
    for outside in ("../x-1.safetensors", str(tmp_path.parent / "x-1.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        refused("not a file beside it")


def test_a_tensor_that_two_files_hold_is_not_chosen_from(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model_2.safetensors"):
        save_file({"a.weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(UserError, match=r"a\.weight is in model\.safetensors and in .*model_2\.safetensors"):
        read_headers(weight_files(tmp_path))
