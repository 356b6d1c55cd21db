"""Weights as bytes: whole, or as their difference from another version. What comes back is equal bit for bit.

A step of RL moves most weights by less than bf16 can show: at a learning rate of 2e-6 one in fifty changes, by one unit in the last
place. So a tensor's bits are read as integers and subtracted, and only places and differences of what changed are kept. A float32
tensor changes everywhere, but in its low bytes: there all differences are kept. Either way the lowest bytes of all numbers come
first, then the next and so on, since the high ones are nearly all zero and compress to nothing. Differences and not XOR, because one
unit up or down is then one of two numbers, whatever it carries over: a tenth smaller.

    magic | length of the header | header, JSON | pieces, one a tensor | XXH3 of all before

The header has a digest of every tensor as it must be in the end: it proves that the right base was changed in the right way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xxhash
import zstandard

if TYPE_CHECKING:
    from collections.abc import Mapping

Weights = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview
How = Literal[
    "same", "few", "all", "whole"
]  # nothing changed; places and differences; all differences; the value itself

MAGIC = b"etude-w1"
BEGIN = len(MAGIC) + 8  # of the header
DIGEST = 16
FEW = 1 / 8  # share of changed numbers up to which their places are named
LEVEL = 1  # of zstd: higher ones are several times slower and no smaller here
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Broken(Exception):  # noqa: N818 - the store takes another way
    """These bytes are damaged, or do not belong to these weights."""


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor."""

    name: str
    dtype: str
    shape: list[int]
    how: How
    size: int  # bytes of its piece
    digest: str  # of its bytes in the end


@dataclass(frozen=True)
class Packet:
    """One version, read and checked, not yet applied."""

    version: int
    base: int | None  # None: whole
    step: int
    ties: dict[str, str]  # other names of tensors
    entries: list[Entry]
    pieces: memoryview


def untie(weights: Mapping[str, torch.Tensor]) -> tuple[Weights, dict[str, str]]:
    """Return every tensor once, and which names stand for another's."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and (known := first.setdefault(place, name)) != name:
            ties[name] = known
    return {name: tensor.detach() for name, tensor in weights.items() if name not in ties}, ties


def tied(weights: Weights, ties: Mapping[str, str]) -> Weights:
    """Return tensors under all their names."""
    return weights | {name: weights[other] for name, other in ties.items()}


def copied(tensor: torch.Tensor, over: torch.Tensor | None = None) -> torch.Tensor:
    """Return a contiguous copy on the same device, in the memory of `over` if given.

    On a CPU by numpy: torch copies on all cores and waits for the last of them, which a busy machine makes seconds of.
    """
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format) if over is None else over
    if tensor.device.type == "cpu":
        np.copyto(_bits(copy).numpy(), _bits(tensor).numpy())
    else:
        copy.copy_(tensor)
    return copy


def fits(weights: Weights, base: Weights) -> bool:
    """Whether both have the same tensors of the same shapes and types, so that a difference exists."""
    ours, theirs = ({name: (each.dtype, each.shape) for name, each in both.items()} for both in (weights, base))
    return ours == theirs


def pack(
    weights: Weights, ties: dict[str, str], version: int, step: int, base: tuple[int, Weights] | None
) -> list[Bytes]:
    """Return a version in chunks, to be written one after the other. `base`: another version, on the same device; None: whole."""
    entries, pieces = [], []
    for name, tensor in weights.items():
        how, piece = _encode(tensor, base[1][name]) if base else ("whole", _raw(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, dtype, list(tensor.shape), how, len(piece), _digest(tensor)))
        pieces.append(piece)
    about = {"version": version, "base": base[0] if base else None, "step": step, "ties": ties}
    header = json.dumps({**about, "entries": [vars(each) for each in entries]}).encode()
    chunks = [MAGIC, len(header).to_bytes(8, "little"), header, *pieces]
    seal = xxhash.xxh3_128()
    for chunk in chunks:
        seal.update(chunk)
    return [*chunks, seal.digest()]


def unpack(data: bytes) -> Packet:
    """Check the bytes of a version and take them apart."""
    view = memoryview(data)
    if len(view) < BEGIN + DIGEST or view[: len(MAGIC)] != MAGIC:
        raise Broken("is no file of weights, or cut short")
    if xxhash.xxh3_128_digest(view[:-DIGEST]) != view[-DIGEST:]:
        raise Broken("does not have its checksum: it is cut short, or bytes of it changed")
    end = BEGIN + int.from_bytes(view[len(MAGIC) : BEGIN], "little")
    about = json.loads(bytes(view[BEGIN:end]))
    return Packet(**{**about, "entries": [Entry(**each) for each in about["entries"]]}, pieces=view[end:-DIGEST])


def apply(packet: Packet, base: Weights) -> Weights:
    """Return a version, each tensor once. Differences are made in `base` itself, contiguous and on the CPU; lost if this raises."""
    weights: Weights = {}
    begin = 0
    for entry in packet.entries:
        piece = packet.pieces[begin : begin + entry.size]
        begin += entry.size
        weights[entry.name] = _decode(entry, piece, base.get(entry.name))
        if _digest(weights[entry.name]) != entry.digest:
            raise Broken(
                f"gives another {entry.name} than it was made from: it was not applied to version {packet.base}"
            )
    return weights


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as integers, flat; in the same memory if it is contiguous."""
    flat = tensor.contiguous().view(-1)
    return flat.view(INTEGERS[min(flat.element_size(), 8)])


def _raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; in the same memory if it is contiguous and on the CPU."""
    return memoryview(_bits(tensor).cpu().view(torch.uint8).numpy())


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(_raw(tensor))


def _encode(new: torch.Tensor, old: torch.Tensor) -> tuple[How, Bytes]:
    """Return how a tensor changed. It is compared where it lies; on a CPU by numpy, which is several times faster there than torch."""
    on_cpu = new.device.type == "cpu"
    library: Any = np if on_cpu else torch
    after, before = (bits.numpy() if on_cpu else bits for bits in (_bits(new), _bits(old)))
    changed = after != before
    count = int(library.count_nonzero(changed))
    if count == 0:
        return "same", b""
    if count > FEW * len(after):
        return "all", _squeezed(_fold(_numpy(after - before)))
    (places,) = library.where(changed)
    differences = _numpy(after[places] - before[places])
    return "few", _squeezed(np.diff(_numpy(places), prepend=-1) - 1, _fold(differences))


def _decode(entry: Entry, piece: memoryview, base: torch.Tensor | None) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.how == "whole":
        whole = torch.empty(entry.shape, dtype=dtype)
        np.copyto(np.frombuffer(_raw(whole), np.uint8), np.frombuffer(piece, np.uint8))
        return whole
    if base is None or base.dtype != dtype or list(base.shape) != entry.shape:
        raise Broken(f"changes {entry.name}, which is not there or of another shape")
    bits = _bits(base).numpy()
    if entry.how != "same":
        data = memoryview(zstandard.decompress(piece))
        gaps = len(data) // (8 + bits.itemsize) * 8 if entry.how == "few" else 0  # bytes of them
        places = np.cumsum(_joined(data[:gaps], np.dtype(np.int64)) + 1) - 1 if gaps else slice(None)
        bits[places] += _unfold(_joined(data[gaps:], bits.dtype))
    return base


def _numpy(numbers: Any) -> Array:
    array: Array = numbers.cpu().numpy() if isinstance(numbers, torch.Tensor) else numbers
    return array


def _fold(difference: Array) -> Array:
    """Return 0, −1, 1, −2, 2 … as 0, 1, 2, 3, 4 …: what is small has zeros in front, whatever its sign."""
    return (difference << 1) ^ (difference >> (8 * difference.itemsize - 1))


def _unfold(folded: Array) -> Array:
    return ((folded >> 1) & np.iinfo(folded.dtype).max) ^ -(folded & 1)


def _squeezed(*arrays: Array) -> bytes:
    """Return arrays compressed; of each the lowest bytes of all numbers, then the next ones, and so on."""
    planes = [numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.reshape(-1) for numbers in arrays]
    return zstandard.compress(np.concatenate(planes).data, LEVEL)


def _joined(planes: memoryview, dtype: np.dtype[Any]) -> Array:
    """Return the numbers that were taken apart."""
    split = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    joined = np.empty(split.shape[::-1], np.uint8)
    for place, plane in enumerate(split):
        joined[:, place] = plane
    return joined.view(dtype).reshape(-1)
