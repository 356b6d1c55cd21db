"""Where tensors lie in safetensors and GGUF files, and how their bytes become float32; neither torch nor a model is needed.

A file is mapped for one read and let go again, so that walking through a terabyte takes the memory of one matrix.
GGUF headers are parsed here because gguf's own reader makes an array of every word: seconds, where this takes a tenth.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from etude.errors import UserError, one_line
from etude.files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# How the bytes of each kind are mapped. GGUF's quantised kinds are not here: they are bytes, and gguf knows their blocks.
MAPPED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, struct.error)


@dataclass(frozen=True)
class Tensor:
    """A tensor on the disk, not yet read."""

    file: Path
    offset: int
    kind: str  # safetensors' name of the type, or GGUF's of the quantisation
    shape: tuple[int, ...]

    def mapped(self) -> NDArray[Any]:
        """Map the tensor as it is stored; the mapping ends with the array."""
        if self.kind in MAPPED:
            return np.memmap(self.file, MAPPED[self.kind], "r", self.offset, self.shape)
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

        if self.kind not in GGMLQuantizationType.__members__:
            raise UserError(f"{self.file}: numbers of type {self.kind} cannot be read; audit the unquantised weights")
        stored = quant_shape_to_byte_shape(self.shape, GGMLQuantizationType[self.kind])
        return np.memmap(self.file, "u1", "r", self.offset, stored)


def decoded(kind: str, stored: NDArray[Any]) -> NDArray[Any]:
    """Return stored values of a kind as float32 (integers as they are): exact, except for float64."""
    if kind == "BF16":
        return np.left_shift(stored.astype(np.uint32), np.uint32(16)).view(np.float32)
    if kind.startswith("F8"):
        return np.take(_small_floats(kind), stored)
    if kind in MAPPED:
        return np.asarray(stored, np.float32 if kind.startswith("F") else None)
    from gguf import GGMLQuantizationType, dequantize

    try:
        return np.asarray(dequantize(np.ascontiguousarray(stored), GGMLQuantizationType[kind]), np.float32)
    except NotImplementedError:
        raise UserError(f"GGUF quantisation {kind} cannot be read; use a file of another one, such as Q8_0") from None


@functools.cache
def _small_floats(kind: str) -> NDArray[np.float32]:
    """Return the values of all 256 codes of an 8-bit float."""
    codes = np.arange(256)
    if kind == "F8_E5M2":  # the upper half of a float16
        return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if kind == "F8_E8M0":  # a power of two
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * np.exp2(exponent - 7.0))
    return np.where(codes & 127 == 127, np.nan, np.where(codes < 128, size, -size)).astype(np.float32)


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model: all shards of a folder, all parts of a split one of which one is named, or one file."""
    if path.is_dir():
        return _folder_files(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a model folder, a .safetensors or a .gguf")
    if split := SPLIT_GGUF.fullmatch(path.name):
        files = sorted(path.parent.glob(f"{split[1]}-*-of-{split[2]}.gguf"))
        if len(files) != int(split[2]):
            raise UserError(f"{path} is one of {int(split[2])} parts and {len(files)} are here; fetch the others")
        return files
    if path.suffix == ".safetensors" and (path.parent / INDEX).is_file():
        return _folder_files(path.parent)
    if path.suffix not in {".safetensors", ".gguf"}:
        raise UserError(f"{path} is neither a folder nor .safetensors nor .gguf; convert it to safetensors first")
    return [path]


def _folder_files(folder: Path) -> list[Path]:
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter; merge it into its base first")
    if (index := folder / INDEX).is_file():
        try:
            files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        except DAMAGED as error:
            raise UserError(f"{index} is damaged ({one_line(error)}); fetch it again") from None
        if outside := [file for file in files if file.parent != folder]:
            raise UserError(f"{index} names {outside[0]}, which is not a file beside it; put all shards beside it")
        if (
            single := folder / SINGLE
        ).is_file() and single not in files:  # programs differ in which of the two they load
            raise UserError(f"{single} is not among the shards of {INDEX}; which is the model? remove one of them")
        if missing := [file.name for file in files if not file.is_file()]:
            raise UserError(
                f"{folder}: {len(missing)} of {len(files)} shards are missing, such as {missing[0]}; fetch them"
            )
        return files
    # Other safetensors beside model*.safetensors are drafts, adapters or optimisers.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors; convert the weights first, or name the .gguf file itself")
    return files


def read_headers(files: list[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a model's files by name, and a GGUF's metadata."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}
    for file in files:
        kind = file.suffix.removeprefix(".")
        try:
            with file.open("rb") as opened:
                found, said = _gguf(opened, file) if kind == "gguf" else _safetensors(opened, file)
        except DAMAGED as error:
            raise UserError(f"{file} is not a whole {kind} file ({one_line(error)}); fetch it again") from None
        if twice := tensors.keys() & found.keys():
            name = min(twice)
            raise UserError(f"{name} is in {tensors[name].file.name} and in {file}; name the file that is the model")
        tensors, meta = tensors | found, said | meta
    return tensors, meta


def _safetensors(opened: BinaryIO, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read eight bytes of length and a JSON header; offsets count from there."""
    (length,) = struct.unpack("<Q", opened.read(8))
    size = file.stat().st_size
    header = json.loads(opened.read(min(length, size)))
    header.pop("__metadata__", None)
    start = opened.tell()
    if start + max((entry["data_offsets"][1] for entry in header.values()), default=0) > size:
        raise ValueError("its end is missing")
    return {
        name: Tensor(file, start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }, {}


def _gguf(opened: BinaryIO, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read metadata (name, type, value), then tensors (name, sizes from the last, type, offset from the aligned end)."""
    from gguf import GGMLQuantizationType

    size = file.stat().st_size

    def numbers(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", opened.read(min(struct.calcsize(f"<{form}"), size)))

    def text() -> str:
        (length,) = numbers("Q")
        (content,) = numbers(f"{length}s")
        return str(content, "utf-8")

    def value(kind: int) -> Any:
        if kind == GGUF_ARRAY:
            item, count = numbers("IQ")
            return (
                list(numbers(f"{count}{GGUF_SCALARS[item]}"))
                if item in GGUF_SCALARS
                else [value(item) for _ in range(count)]
            )
        return text() if kind == GGUF_STRING else numbers(GGUF_SCALARS[kind])[0]

    magic, _version, tensors, entries = numbers("4sIQQ")
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    meta = {text(): value(numbers("I")[0]) for _ in range(entries)}
    listed = [(text(), numbers(f"{numbers('I')[0]}Q"), *numbers("IQ")) for _ in range(tensors)]
    alignment = meta.get("general.alignment", 32)
    start = -(-opened.tell() // alignment) * alignment
    found = {
        name: Tensor(file, start + offset, GGMLQuantizationType(kind).name, tuple(reversed(sizes)))
        for name, sizes, kind, offset in listed
    }
    for last in sorted(found.values(), key=lambda tensor: tensor.offset)[-1:]:
        last.mapped()  # fails where the file ends too soon
    return found, meta
