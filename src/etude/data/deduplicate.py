"""What can only be decided over the whole corpus: which documents are duplicates, and which repositories are held out.

Hashes, keys and signatures of all documents are gathered in files, not in memory: what is left are some 44 bytes a document, so
that forty million fit into 2 GB.

Which repositories are held out: whole ones, so that no neighbour of a held-out file was trained on.

A repository's place in the order is a hash of the seed and its name alone. So the choice is the same whatever order the
repositories come in, and one more or one fewer moves only those near the limit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from etude.data.document import Drop
from etude.data.filters.duplicates import EXACT, NEAR, find_duplicates
from etude.data.judge import DOCUMENTS, HASHES, KEYS, SIGNATURES
from etude.data.shards import empty_array, save_array
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.data.document import Samples
    from etude.data.judge import UnitJob
    from etude.data.settings import DataSettings

GROSS = 1.5  # times the wanted share: a repository that would lead beyond it is passed over


def choose_heldout(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> set[str]:
    """Return repositories with about `share` of the bytes of each domain; `sizes` are bytes by domain and repository.

    Never all of a domain. None if every one is too large for the share in some domain: better nothing to measure with than
    most of it lost to training, unasked. An empty repository has nothing to measure with and is not chosen.
    """
    whole = {domain: sum(each.values()) for domain, each in sizes.items()}
    taken = dict.fromkeys(sizes, 0)
    chosen = set()
    for name in sorted({name for each in sizes.values() for name in each}, key=lambda name: _place(name, seed)):
        here = {domain: each[name] for domain, each in sizes.items() if each.get(name)}
        wanted = any(taken[domain] < share * whole[domain] for domain in here)
        after = {domain: taken[domain] + size for domain, size in here.items()}
        if wanted and all(size <= GROSS * share * whole[at] and size < whole[at] for at, size in after.items()):
            chosen.add(name)
            taken |= after
    return chosen


def _place(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="surrogateescape")).digest()


KEPT = "kept.npy"  # in a unit's folder: which of its documents stay
REASONS = {EXACT: "exact duplicate", NEAR: "near-duplicate"}

DroppedBySource = dict[str, dict[str, Counter[str]]]  # source → documents and bytes → "step: reason" → how many


def drop_duplicates(units: Sequence[UnitJob], data: DataSettings, folder: Path, samples: Samples) -> DroppedBySource:
    """Say in each unit what stays; return for each source what does not, by reason, and offer samples of it."""
    counts = [(unit.folder / HASHES).stat().st_size // 16 for unit in units]
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    hashes, keys, matrix = _gathered(units, begins, data, folder)
    found = find_duplicates(hashes, keys, matrix, data.duplicates.similarity)
    dropped: DroppedBySource = {source.name: {"documents": Counter(), "bytes": Counter()} for source in data.source}
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        kinds = found.kind[begin:end]
        save_array(unit.folder / KEPT, kinds == 0)
        sizes = pq.read_table(unit.folder / DOCUMENTS, columns=["bytes"]).column("bytes").to_numpy()
        gone = dropped[unit.source.name]
        for kind, reason in REASONS.items():
            if count := int((kinds == kind).sum()):
                gone["documents"][f"duplicates: {reason}"] += count
                gone["bytes"][f"duplicates: {reason}"] += int(sizes[kinds == kind].sum())
    for kind, reason in REASONS.items():
        numbers = np.flatnonzero(found.kind == kind)
        for number in np.random.default_rng(kind).permutation(numbers)[: data.samples].tolist():
            gone_one, stays = (_named(units, begins, each) for each in (number, int(found.original[number])))
            of = f"of {stays['repository']}/{stays['path']}"
            samples.offer(Drop(gone_one["repository"], gone_one["path"], "duplicates", reason, gone_one["bytes"], of))
    for left in folder.glob("*.bin"):
        left.unlink()
    return dropped


def _named(units: Sequence[UnitJob], begins: Any, number: int) -> dict[str, Any]:
    """Return repository, path and bytes of a document by its number."""
    unit = int(np.searchsorted(begins, number, side="right")) - 1
    table = pq.read_table(units[unit].folder / DOCUMENTS, columns=["repository", "path", "bytes"])
    return dict(table.slice(number - int(begins[unit]), 1).to_pylist()[0])


def _gathered(units: Sequence[UnitJob], begins: Any, data: DataSettings, folder: Path) -> tuple[Any, Any, Any]:
    """Return hashes [documents, 2], keys [bands, documents] and signatures of all documents, in files."""
    settings = data.duplicates
    count, bands = int(begins[-1]), settings.bands if settings.near else 0
    hashes = empty_array(folder / "hashes.bin", (count, 2), np.uint64)
    keys = empty_array(folder / "keys.bin", (bands, count), np.uint64)
    matrix = empty_array(folder / "signatures.bin", (count, bands * settings.rows), np.uint32)
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        hashes[begin:end] = np.fromfile(unit.folder / HASHES, np.uint64).reshape(-1, 2)
        if bands:
            keys[:, begin:end] = np.fromfile(unit.folder / KEYS, np.uint64).reshape(-1, bands).T
            matrix[begin:end] = np.fromfile(unit.folder / SIGNATURES, np.uint32).reshape(-1, matrix.shape[1])
    return hashes, keys, matrix


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
        if unit.loose:
            rows[unit.source.name] += int(kept.sum())
            continue
        table = pq.read_table(unit.folder / DOCUMENTS, columns=["repository", "bytes"])
        names, lengths = (table.column(name).to_pylist() for name in ("repository", "bytes"))
        for name, size, stays in zip(names, lengths, kept, strict=True):
            if stays:
                sizes.setdefault(unit.source.domain, Counter())[name] += size
                repositories[unit.source.name].add(name)
    wishes = {wish: {name for source in data.source if source.hold_out == wish for name in repositories[source.name]}
              for wish in (False, "all")}  # fmt: skip
    if both := sorted(wishes[False] & wishes["all"]):
        raise UserError(
            f'{both[0]} is in a source with hold_out = false and in one with hold_out = "all"; take it out of one'
        )
    rest = {
        domain: Counter({k: v for k, v in each.items() if k not in wishes["all"]}) for domain, each in sizes.items()
    }
    chosen = choose_heldout(rest, data.heldout, seed) - wishes[False] | wishes["all"]
    counts = {name: len(found) + rows[name] for name, found in repositories.items()}
    return Repositories(frozenset(chosen), counts, {name: sorted(chosen & repositories[name]) for name in counts})
