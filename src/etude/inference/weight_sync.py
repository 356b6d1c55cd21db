"""Weights on the move: a folder where the trainer leaves every version and any number of engines fetch them.

    WEIGHTS/00000020.anchor             version 20, whole
    WEIGHTS/00000021-00000020.delta     what makes version 21 of version 20
    WEIGHTS/00000021-00000020.delta.1   the same, of the tensors that rank 1 publishes

Every version has a delta, and every `anchor_every`-th an anchor besides: who follows reads deltas only, who joins late begins at an
anchor. Of several ranks each publishes a share of the tensors, which divides the time and what is kept to compare with. A version is
there when rank 0's file is, which is written last and names the others. A file appears whole or not at all and never changes; the
publisher asks nothing of its readers and they lock nothing, so neither ever waits for the other. Where a file is damaged or gone, a
reader takes another way: from what it holds, or from any anchor. If no way is left to the newest version, it leaves a note, and the
next one comes with an anchor.

What comes back is equal bit for bit. A step of RL moves most weights by less than bf16 can show: at a learning rate of 2e-6 one in
fifty changes, by one unit in the last place. So a tensor's bits are read as integers and subtracted, and only places and differences
of what changed are kept. A float32 tensor changes everywhere, but in its low bytes: there all differences are kept. Either way the
lowest bytes of all numbers come first, then the next and so on, since the high ones are nearly all zero and compress to nothing.
Differences and not XOR, because one unit up or down is then one of two numbers, whatever it carries over: a tenth smaller.

    magic | length of the header | header, JSON | pieces, one a tensor | XXH3 of all before

The header has version, base (null: whole), step, ties (names that stand for another's tensor), parts (name, size and checksum of the
other ranks' files, whose own headers have none) and entries: of every tensor, once, name, dtype, shape, how it is kept ("same", "few":
places and differences, "all": all differences, "whole"), the size of its piece and a digest of its bytes as they must be in the end,
which proves that the right base was changed in the right way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xxhash
import zstandard

from etude.errors import UserError
from etude.files import remove_parts, whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from etude.inference.local import LocalPolicy
    from etude.inference.model_runner import Staged
    from etude.training.distributed import World

Weights = dict[str, "torch.Tensor"]
Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview

NAME = re.compile(r"(\d{8,})(?:\.anchor|-(\d{8,})\.delta)(\.\d+)?")
WANTED = "anchor.wanted"
MAGIC = b"etude-w1"
BEGIN = len(MAGIC) + 8  # of the header
DIGEST = 16
FEW = 1 / 8  # share of changed numbers up to which their places are named
LEVEL = 1  # of zstd: higher ones are several times slower and no smaller here
INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


class Broken(Exception):  # noqa: N818 - the store takes another way
    """These bytes are damaged, or do not belong to these weights."""


class BrokenStore(UserError):  # noqa: N818 - as its base
    """A version cannot be had from this folder: it is gone, or no way to it is whole."""


@dataclass(frozen=True)
class Published:
    """What publishing a version cost."""

    version: int
    kind: Literal["anchor", "delta"]  # what a reader of the version before needs
    bytes: int  # of that
    full_bytes: int  # of all weights, each once
    seconds: float  # in all, an anchor beside the delta included
    anchored: bool  # whether an anchor was written


@dataclass(frozen=True)
class Held:
    """A version in main memory. A tensor that the model has under several names is here under the first."""

    version: int
    tensors: Weights
    bytes: int = 0  # read to get it
    passed_over: tuple[str, ...] = ()  # damaged or missing files on the way, and why


class File(NamedTuple):
    """A file of the folder, as its name says."""

    path: Path
    version: int
    base: int | None  # None: an anchor
    size: int  # bytes, with those of the other ranks' parts


class Written(NamedTuple):
    """A file that a rank wrote."""

    name: str
    size: int
    checksum: str


class WeightStore:
    """One folder. The publisher has one of these, each reader its own."""

    def __init__(self, folder: Path, anchor_every: int) -> None:
        self.folder, self._anchor_every = folder, anchor_every
        self._last: tuple[int, Weights] | None = None  # what the next delta is made from, on the device of the weights
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> int | None:
        """Return the newest version, or None."""
        return max((file.version for file in self._files()), default=None)

    def publish(
        self, weights: Mapping[str, torch.Tensor], version: int, step: int, world: World | None = None
    ) -> Published:
        """Give readers a new version. If this raises, as on a full disk, the versions before are as good as they were.

        `world`: the ranks that publish together, each its own share of the weights; all must take part. A publisher that begins
        publishes whole: what another one before it kept to compare with is gone.
        """
        from etude.training.distributed import World

        begun, world = time.perf_counter(), world or World()
        once, ties = untie(weights)
        alike = all(world.gather(self._last is not None and _shapes(once) == _shapes(self._last[1])))
        base = self._last if alike else None
        anchored = world.tell(self._begin(version, alike=alike) if world.leads else None)
        bases = [base, None] if base and anchored else [base]
        encoded = [(base and base[0], *encode(once, base)) for base in bases]  # by all ranks at the same time
        write = partial(self._write, {"version": version, "step": step, "ties": ties}, encoded)
        shares = world.gather([] if world.leads or not once else write(f".{world.rank}", []))
        broken = [each for each in shares if isinstance(each, OSError)]
        shares[0] = world.tell(write("", shares[1:]) if world.leads and not broken else [])
        for share in shares:
            if isinstance(share, OSError):
                raise share
        if anchored and world.leads:
            (self.folder / WANTED).unlink(missing_ok=True)
        over = base[1] if base else {}
        self._last = (version, {name: copied(tensor, over.get(name)) for name, tensor in once.items()})
        size, full = sum(share[0].size for share in shares if share), sum(tensor.nbytes for tensor in once.values())
        full, seconds = int(world.sum(full)), time.perf_counter() - begun
        return Published(version, "delta" if base else "anchor", size, full, seconds, anchored)

    def _begin(self, version: int, *, alike: bool) -> bool:
        """Refuse a version that is there, remove what a killed publisher left, and return whether an anchor is due."""
        if (newest := self.newest()) is not None and version <= newest:
            raise ValueError(f"version {version} in {self.folder} after {newest}: no number is used twice")
        if self._last is None:
            remove_parts(self.folder)
            for path in self.folder.iterdir():  # parts of a version that never came to be
                name = NAME.fullmatch(path.name)
                if name and name[3] and not path.with_name(path.name.removesuffix(name[3])).exists():
                    path.unlink()
        return not alike or self._anchor_is_due(version)

    def _write(
        self, about: Mapping[str, Any], encoded: Sequence[tuple[int | None, Any, Any]], ending: str, others: Sequence[list[Written]]
    ) -> list[Written] | OSError:  # fmt: skip
        """Write a rank's files of a version; return what could not be, so that it can be raised on all ranks."""
        written = []
        try:
            for place, (base, entries, pieces) in enumerate(encoded):
                parts = [share[place] for share in others if share]
                chunks = sealed({**about, "base": base, "parts": parts, "entries": entries}, pieces)
                kind = ".anchor" if base is None else f"-{base:08d}.delta"
                name = f"{about['version']:08d}{kind}{ending}"
                with whole_file(self.folder / name) as beside, beside.open("wb") as file:
                    file.writelines(chunks)
                written.append(Written(name, sum(map(len, chunks)), bytes(chunks[-1]).hex()))
        except OSError as error:
            return error
        return written

    def pull(self, version: int, held: Held | None = None) -> Held:
        """Return a version by the way that reads the fewest bytes; `held` may be of any version, and is not changed."""
        if held and held.version == version:
            return held
        files, passed_over = self._files(), list[str]()
        for way in ways(files, version, held.version if held else None):
            try:
                return Held(version, _walk(way, held), sum(file.size for file in way), tuple(passed_over))
            except Broken as why:
                passed_over.append(str(why))
        if passed_over and version == files[-1].version:
            with contextlib.suppress(OSError):  # a reader that may not write here waits for the next regular anchor
                (self.folder / WANTED).touch()
        why_not = "; ".join(passed_over) or "it is not there, or no longer"
        raise BrokenStore(f"no way to version {version} of the weights in {self.folder}: {why_not}; take a later one")

    def prune(self, keep: int) -> int:
        """Remove what the newest `keep` versions do not need; return how many files. The anchor before theirs stays: one may break."""
        files = self._files()
        kept = sorted({file.version for file in files})[-keep:]
        anchors = [file.version for file in files if file.base is None and file.version <= kept[0]][-2:]
        named = {name: NAME.fullmatch(name) for name in sorted(path.name for path in self.folder.iterdir())}
        old = [name for name, about in named.items() if about and anchors and int(about[1]) < anchors[0]]
        for name in old:
            (self.folder / name).unlink(missing_ok=True)
        return len(old)

    def _anchor_is_due(self, version: int) -> bool:
        anchors = [file.version for file in self._files() if file.base is None]
        return not anchors or version - anchors[-1] >= self._anchor_every or (self.folder / WANTED).exists()

    def _files(self) -> list[File]:
        """Return what is there, oldest first; of files that are pruned while we look, any may be missing."""
        versions, sizes = list[tuple[str, int, int | None]](), Counter[str]()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if name := NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        main = entry.name.removesuffix(name[3] or "")
                        sizes[main] += entry.stat().st_size
                        if main == entry.name:
                            versions.append((main, int(name[1]), int(name[2]) if name[2] else None))
        files = [File(self.folder / main, version, base, sizes[main]) for main, version, base in versions]
        return sorted(files, key=lambda file: file.version)


def ways(files: Sequence[File], version: int, held: int | None) -> list[list[File]]:
    """Return the files to read to get to a version, from the one held or from any anchor, fewest bytes first."""
    anchors = {file.version: file for file in files if file.base is None}
    deltas = {file.version: file for file in files if file.base is not None and file.base < file.version}
    ways: list[list[File]] = []
    way: list[File] = []
    at: int | None = version
    while at is not None:
        if at == held:
            ways.append(way)
        if at in anchors:
            ways.append([anchors[at], *way])
        step = deltas.get(at)
        at, way = (step.base, [step, *way]) if step else (None, way)
    return sorted(ways, key=lambda way: sum(file.size for file in way))


def _walk(way: Sequence[File], held: Held | None) -> Weights:
    """Return the weights at the end of a way."""
    weights: Weights = {}
    if held and way[0].base is not None:
        weights = {name: copied(each) for name, each in held.tensors.items()}
    for file in way:
        changed: Weights = {}
        parts, path = [Written(file.path.name, 0, "")], file.path
        while parts:
            path = file.path.with_name(parts[0].name)
            try:
                header, pieces = unpack(path.read_bytes(), parts.pop(0).checksum)
                if (header["version"], header["base"]) != (file.version, file.base):
                    raise Broken(f"holds version {header['version']}, made from {header['base']}")
                changed |= apply(header, pieces, weights)
            except (OSError, Broken) as error:
                raise Broken(f"{path.name} {getattr(error, 'strerror', None) or error}") from None
            parts += [Written(*each) for each in header.get("parts", ())]
        weights = changed
    return weights


@dataclass(frozen=True)
class Swap:
    """New weights have come to a policy."""

    version: int
    bytes: int  # read from the store
    seconds: float  # from the request for them to sampling from them
    paused: float  # of these, seconds that requests had to wait


class Receiver:
    """Takes versions of a store over into an engine.

    They are read, checked and brought to the device while tokens are written; what remains for the pause between two steps is to
    copy them over the old ones.
    """

    def __init__(self, policy: LocalPolicy, store: WeightStore, say: Callable[[str], None] = lambda _: None) -> None:
        self.policy, self.store, self.say = policy, store, say
        self.last = Swap(policy.statistics()["version"], 0, 0.0, 0.0)
        self._held: Held | None = None
        self._staged: tuple[Held, Staged, float] | None = None

    @property
    def version(self) -> int:
        return self.last.version

    async def stage(self, version: int) -> None:
        """Bring a version to the device. BrokenStore: it cannot be had; nothing was changed.

        An engine that was started again took the newest version by itself: who asks for one before that has nothing to wait for.
        """
        if version <= self.version:
            return
        began = time.perf_counter()
        held = await asyncio.to_thread(self.store.pull, version, self._held)
        for why in held.passed_over:
            self.say(f"passed over: {why}")
        self._staged = held, await asyncio.to_thread(self.policy.stage, held.tensors), began

    async def commit(self) -> Swap:
        """Sample from what was staged; return what the last change of weights cost."""
        if self._staged:
            (held, staged, began), self._staged = self._staged, None
            paused = await self.policy.update(staged, held.version)
            self._held = held
            self.last = Swap(held.version, held.bytes, time.perf_counter() - began, paused)
        return self.last

    async def update(self, version: int) -> Swap:
        await self.stage(version)
        return await self.commit()


# ---- a version as bytes


def untie(weights: Mapping[str, torch.Tensor]) -> tuple[Weights, dict[str, str]]:
    """Return every tensor once, and which names stand for another's."""
    first: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and (known := first.setdefault(place, name)) != name:
            ties[name] = known
    return {name: tensor.detach() for name, tensor in weights.items() if name not in ties}, ties


def copied(tensor: torch.Tensor, over: torch.Tensor | None = None) -> torch.Tensor:
    """Return a contiguous copy on the same device, in the memory of `over` if given.

    On a CPU by numpy: torch copies on all cores and waits for the last of them, which a busy machine makes seconds of.
    """
    import torch

    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format) if over is None else over
    if tensor.device.type == "cpu":
        np.copyto(_bits(copy).numpy(), _bits(tensor).numpy())
    else:
        copy.copy_(tensor)
    return copy


def _shapes(weights: Weights) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def encode(weights: Weights, base: tuple[int, Weights] | None) -> tuple[list[dict[str, Any]], list[Bytes]]:
    """Return what the header says of each tensor, and the pieces. `base`: another version, on the same device; None: whole."""
    entries, pieces = [], []
    for name, tensor in weights.items():
        how, piece = _encode(tensor, base[1][name]) if base else ("whole", _raw(tensor))
        entries.append({
            "name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "how": how,
            "size": len(piece), "digest": _digest(tensor),
        })  # fmt: skip
        pieces.append(piece)
    return entries, pieces


def sealed(about: Mapping[str, Any], pieces: Sequence[Bytes]) -> list[Bytes]:
    """Return a file in chunks, to be written one after the other; the last is its checksum."""
    header = json.dumps(about).encode()
    chunks = [MAGIC, len(header).to_bytes(8, "little"), header, *pieces]
    seal = xxhash.xxh3_128()
    for chunk in chunks:
        seal.update(chunk)
    return [*chunks, seal.digest()]


def unpack(data: bytes, checksum: str = "") -> tuple[dict[str, Any], memoryview]:
    """Check the bytes of a file; return its header and the pieces. `checksum`: what it must have, where that is known."""
    view = memoryview(data)
    if len(view) < BEGIN + DIGEST or view[: len(MAGIC)] != MAGIC:
        raise Broken("is no file of weights, or cut short")
    if xxhash.xxh3_128_digest(view[:-DIGEST]) != view[-DIGEST:]:
        raise Broken("does not have its checksum: it is cut short, or bytes of it changed")
    if checksum and view[-DIGEST:].hex() != checksum:
        raise Broken("is another file than the version names")
    end = BEGIN + int.from_bytes(view[len(MAGIC) : BEGIN], "little")
    return json.loads(bytes(view[BEGIN:end])), view[end:-DIGEST]


def apply(header: dict[str, Any], pieces: memoryview, base: Weights) -> Weights:
    """Return a version, each tensor once. Differences are made in `base` itself, contiguous and on the CPU; lost if this raises."""
    weights: Weights = {}
    for entry in header["entries"]:
        name, piece, pieces = entry["name"], pieces[: entry["size"]], pieces[entry["size"] :]
        weights[name] = _decode(entry, piece, base.get(name))
        if _digest(weights[name]) != entry["digest"]:
            raise Broken(f"gives another {name} than it was made from: it was not applied to version {header['base']}")
    return weights


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as integers, flat; in the same memory if it is contiguous."""
    import torch

    flat = tensor.contiguous().view(-1)
    return flat.view(getattr(torch, INTEGERS[min(flat.element_size(), 8)]))


def _raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; in the same memory if it is contiguous and on the CPU."""
    import torch

    return memoryview(_bits(tensor).cpu().view(torch.uint8).numpy())


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(_raw(tensor))


def _encode(new: torch.Tensor, old: torch.Tensor) -> tuple[str, Bytes]:
    """Return how a tensor changed. It is compared where it lies; on a CPU by numpy, which is several times faster there than torch."""
    import torch

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


def _decode(entry: dict[str, Any], piece: memoryview, base: torch.Tensor | None) -> torch.Tensor:
    import torch

    dtype, shape, how = getattr(torch, entry["dtype"]), entry["shape"], entry["how"]
    if how == "whole":
        whole = torch.empty(shape, dtype=dtype)
        np.copyto(np.frombuffer(_raw(whole), np.uint8), np.frombuffer(piece, np.uint8))
        return whole
    if base is None or base.dtype != dtype or list(base.shape) != shape:
        raise Broken(f"changes {entry['name']}, which is not there or of another shape")
    bits = _bits(base).numpy()
    if how != "same":
        data = memoryview(zstandard.decompress(piece))
        gaps = len(data) // (8 + bits.itemsize) * 8 if how == "few" else 0  # bytes of them
        places = np.cumsum(_joined(data[:gaps], np.dtype(np.int64)) + 1) - 1 if gaps else slice(None)
        bits[places] += _unfold(_joined(data[gaps:], bits.dtype))
    return base


def _numpy(numbers: Any) -> Array:
    array: Array = numbers if isinstance(numbers, np.ndarray) else numbers.cpu().numpy()
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
