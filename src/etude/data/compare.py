"""What can only be decided over the whole corpus: which documents are duplicates, and which repositories are held out.

Hashes, keys and signatures of all documents are gathered in files, not in memory: a hundred million documents fit into 2 GB.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from etude.data.document import Drop
from etude.data.filters.duplicates import EXACT, find_duplicates
from etude.data.heldout import choose_heldout
from etude.data.units import DOCUMENTS, HASHES, KEYS, SIGNATURES
from etude.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.data.samples import Samples
    from etude.data.settings import DataSettings
    from etude.data.units import UnitJob

KEPT = "kept.npy"  # in a unit's folder: which of its documents stay
TABLES_OPEN = 8  # units whose names are held in memory

Dropped = dict[str, Counter[str]]  # "step: reason" → documents and bytes


def drop_duplicates(units: Sequence[UnitJob], data: DataSettings, folder: Path, samples: Samples) -> list[Dropped]:
    """Say in each unit what stays; return for each unit what does not, by reason, and offer samples of it."""
    counts = [(unit.folder / HASHES).stat().st_size // 16 for unit in units]
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    hashes, keys, matrix = _gathered(units, begins, data, folder)
    found = find_duplicates(hashes, keys, matrix, data.duplicates.similarity)
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        with whole_file(unit.folder / KEPT) as beside, beside.open("wb") as file:
            np.save(file, found.kind[begin:end] == 0)
    names = _Names(units, begins)
    dropped: list[Dropped] = [{"documents": Counter(), "bytes": Counter()} for _ in units]
    for number in np.flatnonzero(found.kind):
        drop = names.drop(int(number), int(found.original[number]), int(found.kind[number]))
        here = dropped[names.unit(int(number))]
        here["documents"][f"{drop.step}: {drop.reason}"] += 1
        here["bytes"][f"{drop.step}: {drop.reason}"] += drop.size
        samples.offer(drop)
    for left in folder.glob("*.bin"):
        left.unlink()
    return dropped


def _gathered(units: Sequence[UnitJob], begins: Any, data: DataSettings, folder: Path) -> tuple[Any, Any, Any]:
    """Return hashes [documents, 2], keys [bands, documents] and signatures of all documents, memory-mapped."""
    settings = data.duplicates
    count, bands = int(begins[-1]), settings.bands if settings.near else 0
    if not count:
        return np.zeros((0, 2), np.uint64), np.zeros((0, 0), np.uint64), np.zeros((0, 0), np.uint32)
    hashes = np.memmap(folder / "hashes.bin", np.uint64, "w+", shape=(count, 2))
    keys = (
        np.memmap(folder / "keys.bin", np.uint64, "w+", shape=(bands, count))
        if bands
        else np.zeros((0, count), np.uint64)
    )
    matrix: Any = np.zeros((count, 0), np.uint32)
    if bands:
        matrix = np.memmap(folder / "signatures.bin", np.uint32, "w+", shape=(count, bands * settings.rows))
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        hashes[begin:end] = np.fromfile(unit.folder / HASHES, np.uint64).reshape(-1, 2)
        if bands:
            keys[:, begin:end] = np.fromfile(unit.folder / KEYS, np.uint64).reshape(-1, bands).T
            matrix[begin:end] = np.fromfile(unit.folder / SIGNATURES, np.uint32).reshape(-1, matrix.shape[1])
    return hashes, keys, matrix


class _Names:
    """The names of documents by number, read from their units as they are asked for."""

    def __init__(self, units: Sequence[UnitJob], begins: Any) -> None:
        self.units, self.begins = units, begins
        self._tables: dict[int, Any] = {}

    def unit(self, number: int) -> int:
        """Return the unit a document is in."""
        return int(np.searchsorted(self.begins, number, side="right")) - 1

    def _of(self, number: int) -> dict[str, Any]:
        unit = self.unit(number)
        if unit not in self._tables:
            if len(self._tables) >= TABLES_OPEN:
                self._tables.clear()
            columns = ["repository", "path", "bytes"]
            self._tables[unit] = pq.read_table(self.units[unit].folder / DOCUMENTS, columns=columns)
        return dict(self._tables[unit].slice(number - int(self.begins[unit]), 1).to_pylist()[0])

    def drop(self, number: int, original: int, kind: int) -> Drop:
        """Return the drop of a duplicate, naming what it is a duplicate of."""
        gone, stays = self._of(number), self._of(original)
        reason = "exact duplicate" if kind == EXACT else "near-duplicate"
        other = f"of {stays['repository']}/{stays['path']}"
        return Drop(gone["repository"], gone["path"], "duplicates", reason, gone["bytes"], other)


def loose(unit: UnitJob) -> bool:
    """Return whether each row of a unit is on its own, so that there are too many to list."""
    source = unit.source
    return bool(source.jsonl or source.parquet or source.dataset) and source.repository_column is None


@dataclass(frozen=True)
class Repositories:
    """Which repositories are held out, and what each source has of them."""

    heldout: frozenset[str]
    counts: dict[str, int]  # by source
    heldout_in: dict[str, list[str]]  # by source; not for loose rows, which are held out one by one


def hold_out(units: Sequence[UnitJob], data: DataSettings, seed: int) -> Repositories:
    """Choose whole repositories, domain by domain; one held out in a domain is held out in every source it occurs in."""
    sizes: dict[str, Counter[str]] = {}
    repositories: dict[str, set[str]] = {source.name: set() for source in data.source}
    rows: Counter[str] = Counter()
    for unit in units:
        kept = np.load(unit.folder / KEPT)
        if loose(unit):
            rows[unit.source.name] += int(kept.sum())
            continue
        table = pq.read_table(unit.folder / DOCUMENTS, columns=["repository", "bytes"])
        names, lengths = (table.column(name).to_pylist() for name in ("repository", "bytes"))
        for name, size, stays in zip(names, lengths, kept, strict=True):
            if stays:
                sizes.setdefault(unit.source.domain, Counter())[name] += size
                repositories[unit.source.name].add(name)
    chosen = {name for each in sizes.values() for name in choose_heldout(each, data.heldout, seed)}
    return Repositories(
        frozenset(chosen),
        {name: len(found) + rows[name] for name, found in repositories.items()},
        {name: sorted(found & chosen) for name, found in repositories.items()},
    )
