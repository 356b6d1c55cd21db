"""Weights on the move: a folder where the trainer leaves every version and any number of engines fetch them.

    WEIGHTS/00000020.anchor             version 20, whole
    WEIGHTS/00000021-00000020.delta     what makes version 21 of version 20

Every version has a delta, and every `anchor_every`-th an anchor besides: who follows reads deltas only, who joins late begins at an
anchor. A file appears whole or not at all and never changes; the publisher asks nothing of its readers and they lock nothing, so
neither ever waits for the other. Where a file is damaged or gone, a reader takes another way: from what it holds, or from any
anchor. If no way is left to the newest version, it leaves a note, and the next one comes with an anchor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from etude.errors import UserError
from etude.files import remove_parts, whole_file
from etude.inference.weight_delta import Broken, apply, copied, fits, pack, tied, unpack, untie

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from etude.inference.local import LocalPolicy
    from etude.inference.model_runner import Staged
    from etude.inference.weight_delta import Bytes, Weights

NAME = re.compile(r"(\d{8,})(?:\.anchor|-(\d{8,})\.delta)")
WANTED = "anchor.wanted"


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
    """A version in main memory."""

    version: int
    tensors: dict[str, Tensor]
    bytes: int = 0  # read to get it
    passed_over: tuple[str, ...] = ()  # damaged or missing files on the way, and why


class File(NamedTuple):
    """A file of the folder, as its name says."""

    path: Path
    version: int
    base: int | None  # None: an anchor
    size: int


class WeightStore:
    """One folder. The publisher has one of these, each reader its own."""

    def __init__(self, folder: Path, anchor_every: int) -> None:
        self.folder, self._anchor_every = folder, anchor_every
        self._last: tuple[int, Weights] | None = None  # what the next delta is made from, on the device of the weights
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> int | None:
        """Return the newest version, or None."""
        return max((file.version for file in self._files()), default=None)

    def publish(self, weights: Mapping[str, Tensor], version: int, step: int) -> Published:
        """Give readers a new version. If this raises, as on a full disk, the versions before are as good as they were.

        A publisher that begins publishes whole: what another one before it kept to compare with is gone.
        """
        begun = time.perf_counter()
        if (newest := self.newest()) is not None and version <= newest:
            raise ValueError(f"version {version} in {self.folder} after {newest}: no number is used twice")
        if self._last is None:
            remove_parts(self.folder)  # what a killed one left
        once, ties = untie(weights)
        base = self._last if self._last and fits(once, self._last[1]) else None
        size = self._write(version, base and base[0], pack(once, ties, version, step, base))
        over = base[1] if base else {}
        self._last = (version, {name: copied(tensor, over.get(name)) for name, tensor in once.items()})
        anchored = base is None or self._anchor_is_due(version)
        if base and anchored:
            self._write(version, None, pack(once, ties, version, step, None))
        if anchored:
            (self.folder / WANTED).unlink(missing_ok=True)
        full, seconds = sum(tensor.nbytes for tensor in once.values()), time.perf_counter() - begun
        return Published(version, "delta" if base else "anchor", size, full, seconds, anchored)

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
        old = [file for file in files if anchors and file.version < anchors[0]]
        for file in old:
            file.path.unlink(missing_ok=True)
        return len(old)

    def _anchor_is_due(self, version: int) -> bool:
        anchors = [file.version for file in self._files() if file.base is None]
        return not anchors or version - anchors[-1] >= self._anchor_every or (self.folder / WANTED).exists()

    def _write(self, version: int, base: int | None, chunks: list[Bytes]) -> int:
        name = f"{version:08d}.anchor" if base is None else f"{version:08d}-{base:08d}.delta"
        with whole_file(self.folder / name) as beside, beside.open("wb") as file:
            file.writelines(chunks)
        return sum(map(len, chunks))

    def _files(self) -> list[File]:
        """Return what is there, oldest first; of files that are pruned while we look, any may be missing."""
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if name := NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        base = int(name[2]) if name[2] else None
                        files.append(File(self.folder / entry.name, int(name[1]), base, entry.stat().st_size))
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
    """Return the weights at the end of a way, under all their names."""
    weights: Weights = {}
    if held and way[0].base is not None:
        once, ties = untie(held.tensors)
        weights = tied({name: copied(each) for name, each in once.items()}, ties)
    for file in way:
        try:
            packet = unpack(file.path.read_bytes())
            if (packet.version, packet.base) != (file.version, file.base):
                raise Broken(f"holds version {packet.version}, made from {packet.base}")
            weights = apply(packet, weights)
        except (OSError, Broken) as error:
            raise Broken(f"{file.path.name} {getattr(error, 'strerror', None) or error}") from None
    return tied(weights, packet.ties)


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
        """Bring a version to the device. BrokenStore: it cannot be had; nothing was changed."""
        if version == self.version:
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
