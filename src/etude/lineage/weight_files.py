"""Which files hold a model's weights, and what their safetensors headers say; nothing is loaded.

A safetensors file is eight bytes of length, a JSON header and the numbers. The header says how long the file must be: one that was
cut off is found here in microseconds instead of by a loader's traceback, or, worse, by random weights in place of missing ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.errors import UserError
from etude.files import read_json

if TYPE_CHECKING:
    from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


class StoredTensor(NamedTuple):
    """An entry of a header; `begin` and `end` in bytes after the header."""

    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    """The bytes before the numbers, and the tensors in the order in which they lie."""

    start: bytes
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file; one whose length is not what its header promises is refused."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise UserError(f"{file} is not a whole safetensors file ({size:,} bytes, no valid header); fetch it again")
        start += stream.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(start[8:]).items() if name != "__metadata__"}
        in_order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        tensors = {name: _stored(entries[name]) for name in in_order}
        expected = len(start) + max((tensor.end for tensor in tensors.values()), default=0)
    except DAMAGED:
        raise UserError(f"{file} is not a whole safetensors file (damaged header); fetch it again") from None
    if size != expected:
        how = "is cut off" if size < expected else "has bytes after its end"
        raise UserError(f"{file} {how}: {size:,} bytes, its header promises {expected:,}; fetch it again")
    return Header(start, tensors)


def _stored(entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(begin, end, entry["dtype"], tuple(entry["shape"]))


def indexed_files(folder: Path) -> list[Path] | None:
    """Return the files that a folder's index names, all of them there; None without an index."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        return None
    try:
        files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except DAMAGED:
        files = []
    if not files:
        raise UserError(f"{index} is damaged: it must map tensor names to files; fetch it again")
    if outside := [file for file in files if file.parent != folder]:
        raise UserError(f"{index} names {outside[0]}, which is not a file beside it; put all shards beside it")
    if single.is_file() and single not in files:  # programs differ in which of the two they load
        raise UserError(f"{single} is not among the shards of {INDEX}; which is the model? remove one of them")
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder} lacks {missing[0]} ({len(missing)} of {len(files)} weight files); fetch them again")
    return files
