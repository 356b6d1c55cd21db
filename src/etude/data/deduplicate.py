"""Exact and near-duplicates across the whole corpus: of two alike, the one that comes first in the recipe stays.

Near-duplicates are found by MinHash (Broder 1997): the share of equal entries in two signatures estimates the Jaccard
similarity of the documents' word n-grams. Documents with all hashes of one band equal are candidates; a candidate pair
counts if the estimate from the *whole* signature reaches the wanted similarity. Other tools drop every candidate, and all
of a chain A≈B≈C; here a document is dropped only if it is close to one that stays, which the drop then names.

Memory is bounded: hashes, band keys and signatures of all documents lie in files, and bands are worked through one by one, in
slices of their keys. What is left are some 44 bytes a document, so that forty million fit into 2 GB.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import xxhash
from rensa import RMinHash

from etude.data.document import Drop, Samples
from etude.data.filters.contamination import MULTIPLIER, ngram_runs, without_notice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from etude.data.filter_documents import UnitJob
    from etude.data.manifest import SourceEntry
    from etude.data.settings import DataSettings, DuplicateSettings

    Matrix = npt.NDArray[np.uint32]  # [documents, hashes]
    Keys = npt.NDArray[np.uint64]
    Indices = npt.NDArray[np.int64]

# In a unit's folder: its documents, flat files of [documents, 2], [documents, bands] and [documents, hashes], and which stay.
DOCUMENTS, HASHES, KEYS, SIGNATURES, KEPT = "documents.parquet", "hashes.bin", "keys.bin", "signatures.bin", "kept.npy"
SEED = 7  # of the permutations; part of the result
SIGNED = 4096  # documents signed at once: the library hands signatures over as Python numbers
SLICE = 8_000_000  # keys sorted at once: about 200 MB
CHECKED = 65_536  # candidate pairs compared at once: about 60 MB
EXACT, NEAR = 1, 2
REASONS = {EXACT: "exact duplicate", NEAR: "near-duplicate"}
ROUNDS = 20  # two or three are usual


def text_hash(text: str) -> tuple[int, int]:
    """Return 128 bits that are equal for equal texts, as two numbers."""
    return divmod(xxhash.xxh3_128_intdigest(text.encode()), 1 << 64)


def signatures(texts: Sequence[str], settings: DuplicateSettings) -> Matrix:
    """Return the MinHash signatures of texts, [documents, bands × rows]."""
    width = settings.bands * settings.rows
    parts = [np.zeros((0, width), np.uint32)]
    for start in range(0, len(texts), SIGNED):
        some = (without_notice(text).encode() for text in texts[start : start + SIGNED])
        runs = [ngram_runs(content, settings.ngram, signs=False).hashes for content in some]
        offsets = np.cumsum([0, *map(len, runs)], dtype=np.uint64)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(runs), offsets, width, SEED)
        parts.append(np.array(matrix.to_rows(), np.uint32))
    return np.concatenate(parts)


def band_keys(matrix: Matrix, settings: DuplicateSettings) -> Keys:
    """Return one number for each document and band, [documents, bands]: equal if all hashes of the band are."""
    values = matrix.reshape(len(matrix), settings.bands, settings.rows).astype(np.uint64) + np.uint64(1)
    keys = np.zeros((len(matrix), settings.bands), np.uint64)
    for row in range(settings.rows):
        keys = (keys ^ values[:, :, row]) * MULTIPLIER
        keys ^= keys >> np.uint64(29)
    return keys


def drop_duplicates(
    units: Sequence[UnitJob], data: DataSettings, entries: Mapping[str, SourceEntry], folder: Path, samples: Samples
) -> None:
    """Say in each unit what stays; count what does not in the entry of its source, and offer samples of it."""
    counts = [(unit.folder / HASHES).stat().st_size // 16 for unit in units]
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    duplicates = find_duplicates(*_gathered(units, begins, data.duplicates, folder), data.duplicates.similarity)
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        kinds = duplicates.kind[begin:end]
        np.save(unit.folder / KEPT, kinds == 0)
        sizes = pq.read_table(unit.folder / DOCUMENTS, columns=["bytes"]).column("bytes").to_numpy()
        entry = entries[unit.source.name]
        for kind, reason in REASONS.items():
            if count := int((kinds == kind).sum()):
                size, why = int(sizes[kinds == kind].sum()), f"duplicates: {reason}"
                entry.add({"kept": -count, "kept_bytes": -size, "drops": {why: count}, "dropped_bytes": {why: size}})
    for kind, reason in REASONS.items():
        numbers = np.flatnonzero(duplicates.kind == kind)
        for number in np.random.default_rng(kind).permutation(numbers)[: data.samples].tolist():
            gone, stays = (_named(units, begins, each) for each in (number, int(duplicates.original[number])))
            where = f"of {stays['repository']}/{stays['path']}"
            samples.offer(asdict(Drop(gone["repository"], gone["path"], "duplicates", reason, gone["bytes"], where)))
    for left in folder.glob("*.bin"):
        left.unlink()


def _named(units: Sequence[UnitJob], begins: Indices, number: int) -> dict[str, Any]:
    """Return repository, path and bytes of a document by its number."""
    unit = int(np.searchsorted(begins, number, side="right")) - 1
    table = pq.read_table(units[unit].folder / DOCUMENTS, columns=["repository", "path", "bytes"])
    return dict(table.slice(number - int(begins[unit]), 1).to_pylist()[0])


def _gathered(
    units: Sequence[UnitJob], begins: Indices, settings: DuplicateSettings, folder: Path
) -> tuple[Keys, Keys, Matrix]:
    """Return hashes [documents, 2], keys [bands, documents] and signatures of all documents, in files."""
    count, bands = int(begins[-1]), settings.bands if settings.near else 0
    hashes = _in_file(folder / HASHES, (count, 2), np.uint64)
    keys = _in_file(folder / KEYS, (bands, count), np.uint64)
    matrix = _in_file(folder / SIGNATURES, (count, bands * settings.rows), np.uint32)
    for unit, begin, end in zip(units, begins, begins[1:], strict=False):
        hashes[begin:end] = np.fromfile(unit.folder / HASHES, np.uint64).reshape(-1, 2)
        if bands:
            keys[:, begin:end] = np.fromfile(unit.folder / KEYS, np.uint64).reshape(-1, bands).T
            matrix[begin:end] = np.fromfile(unit.folder / SIGNATURES, np.uint32).reshape(-1, matrix.shape[1])
    return hashes, keys, matrix


def _in_file(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    """Return an array in a file for which there is room: writing through a map of a full disk would end the process."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return np.memmap(path, dtype, "r+", shape=shape)


@dataclass(frozen=True)
class Duplicates:
    """For each document: what it is (0: it stays; EXACT; NEAR), and the document that stays in its place."""

    kind: npt.NDArray[np.uint8]
    original: Indices

    def drop(self, first: Indices, later: Indices, kind: int) -> None:
        """Drop each later document whose earlier one stays, in order of the later ones."""
        for index in np.lexsort((first, later)):
            keep, gone = int(first[index]), int(later[index])
            if self.kind[keep] == 0 and self.kind[gone] == 0:
                self.kind[gone] = kind
                self.original[gone] = keep


def find_duplicates(hashes: Keys, keys: Keys, matrix: Matrix, similarity: float) -> Duplicates:
    """Return which documents are duplicates; arrays may be memory-mapped.

    `hashes` [documents, 2] are of the texts, `keys` [bands, documents] and `matrix` [documents, …] of their signatures; with
    no bands only exact duplicates are found.
    """
    result = Duplicates(np.zeros(len(hashes), np.uint8), np.arange(len(hashes)))
    for first, later in _equal_pairs(hashes[:, 0], np.arange(len(hashes))):
        same = hashes[first, 1] == hashes[later, 1]
        result.drop(first[same], later[same], EXACT)
    for _ in range(ROUNDS):
        first, later = _near_pairs(keys, matrix, np.flatnonzero(result.kind == 0), similarity)
        # Dropping changes who is first in a bucket, so those that stay are compared again until nothing is close.
        result.drop(first, later, NEAR)
        # A document may have gone for the sake of one that has gone since: it comes back, to be compared again.
        orphans = (result.kind == NEAR) & (result.kind[result.original] != 0)
        if not len(first) and not orphans.any():
            break
        result.kind[orphans] = 0
        result.original[orphans] = np.flatnonzero(orphans)
    return result


def _near_pairs(keys: Keys, matrix: Matrix, alive: Indices, similarity: float) -> tuple[Indices, Indices]:
    """Return the pairs (earlier, later) that share a band and are similar enough."""
    count = np.uint64(keys.shape[1])
    pairs = np.zeros(0, np.uint64)  # earlier × count + later: most pairs share several bands
    for band in keys:
        for first, later in _equal_pairs(band[alive], alive):
            for start in range(0, len(first), CHECKED):
                one, other = first[start : start + CHECKED], later[start : start + CHECKED]
                close = (matrix[one] == matrix[other]).mean(axis=1) >= similarity
                pairs = np.union1d(pairs, one[close].astype(np.uint64) * count + other[close].astype(np.uint64))
    return (pairs // count).astype(np.int64), (pairs % count).astype(np.int64)


def _equal_pairs(keys: Keys, indices: Indices) -> list[tuple[Indices, Indices]]:
    """Return pairs (earlier, later) of documents with equal keys: each with the first of its group and with the one before."""
    slices = np.uint64(len(keys) // SLICE + 1)
    pairs = []
    for number in range(int(slices)):
        chosen = np.flatnonzero(keys % slices == number)
        order = chosen[np.argsort(keys[chosen], kind="stable")]  # equal keys stay in document order
        ordered = keys[order]
        equal = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        if len(equal):
            starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
            heads = starts[np.searchsorted(starts, equal, side="right") - 1]
            pairs.append((indices[order[np.r_[heads, equal - 1]]], indices[order[np.r_[equal, equal]]]))
    return pairs
