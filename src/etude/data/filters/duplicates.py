"""Exact and near-duplicates across the whole corpus: of two alike, the one that comes first in the recipe stays.

Near-duplicates are found by MinHash (Broder 1997): the share of equal entries in two signatures estimates the Jaccard
similarity of the documents' word n-grams. Documents with all hashes of one band equal are candidates; a candidate pair
counts if the estimate from the *whole* signature reaches the wanted similarity. Other tools drop every candidate, and all
of a chain A≈B≈C; here a document is dropped only if it is close to one that stays, which the drop then names.

Memory is bounded: signatures stay on disk, and bands are worked through one by one, in slices of their keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from rensa import RMinHash

from etude.data.ngrams import MULTIPLIER, ngram_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.data.settings import DuplicateSettings

    Matrix = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
    Keys = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

SEED = 7  # of the permutations; part of the result
SIGNED = 4096  # documents signed at once: the library hands signatures over as Python numbers
SLICE = 8_000_000  # keys sorted at once: about 200 MB
CHECKED = 65_536  # candidate pairs compared at once: about 60 MB
EXACT, NEAR = 1, 2
ROUNDS = 20  # two or three are usual
LEADING_COMMENT = re.compile(r"\s*(?:(?:(?:#|//|--|;|%)[^\n]*\n)+|/\*.*?\*/)\s*", re.DOTALL)  # the first one only
NOTICE = re.compile(r"licen[cs]e|copyright", re.IGNORECASE)


def text_hash(text: str) -> tuple[int, int]:
    """Return 128 bits that are equal for equal texts, as two numbers."""
    whole = xxhash.xxh3_128_intdigest(text.encode())
    return whole >> 64, whole & (2**64 - 1)


def signatures(texts: Sequence[str], settings: DuplicateSettings) -> Matrix:
    """Return the MinHash signatures of texts, [documents, bands × rows]."""
    width = settings.bands * settings.rows
    parts = [np.zeros((0, width), np.uint32)]
    for start in range(0, len(texts), SIGNED):
        some = (without_notice(text).encode() for text in texts[start : start + SIGNED])
        runs = [ngram_runs(content, settings.ngram, signs=False).hashes for content in some]
        offsets = np.zeros(len(runs) + 1, np.uint64)
        np.cumsum([len(run) for run in runs], out=offsets[1:])
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(runs), offsets, width, SEED)
        parts.append(np.array(matrix.to_rows(), np.uint32))
    return np.concatenate(parts)


def without_notice(text: str) -> str:
    """Return the text without the licence notice at its top: it would make all short files of a project look alike."""
    head = LEADING_COMMENT.match(text)
    if not head or not NOTICE.search(head[0]):
        return text
    return text[head.end() :] if text[head.end() :].strip() else text


@dataclass(frozen=True)
class Duplicates:
    """For each document: what it is (0: it stays; EXACT; NEAR), and the document that stays in its place."""

    kind: np.ndarray[tuple[int], np.dtype[np.uint8]]
    original: Indices


def band_keys(matrix: Matrix, settings: DuplicateSettings) -> Keys:
    """Return one number for each document and band, [documents, bands]: equal if all hashes of the band are."""
    values = matrix.reshape(len(matrix), settings.bands, settings.rows).astype(np.uint64) + np.uint64(1)
    keys = np.zeros((len(matrix), settings.bands), np.uint64)
    for row in range(settings.rows):
        keys = (keys ^ values[:, :, row]) * MULTIPLIER
        keys ^= keys >> np.uint64(29)
    return keys


def find_duplicates(hashes: Keys, keys: Keys, matrix: Matrix, similarity: float) -> Duplicates:
    """Return which documents are duplicates; arrays may be memory-mapped.

    `hashes` [documents, 2] are of the texts, `keys` [bands, documents] and `matrix` [documents, …] of their signatures; with
    no bands only exact duplicates are found.
    """
    found = Duplicates(np.zeros(len(hashes), np.uint8), np.arange(len(hashes)))
    for first, later in _equal_pairs(hashes[:, 0], np.arange(len(hashes))):
        same = hashes[first, 1] == hashes[later, 1]
        _drop(found, first[same], later[same], EXACT)
    for _ in range(ROUNDS):
        pairs = _near_pairs(keys, matrix, np.flatnonzero(found.kind == 0), similarity)
        # Dropping changes who is first in a bucket, so those that stay are compared again until nothing is close.
        _drop(found, *pairs, NEAR)
        # A document may have gone for the sake of one that has gone since: it comes back, to be compared again.
        orphans = (found.kind == NEAR) & (found.kind[found.original] != 0)
        if not len(pairs[0]) and not orphans.any():
            break
        found.kind[orphans] = 0
        found.original[orphans] = np.flatnonzero(orphans)
    return found


def _drop(found: Duplicates, first: Indices, later: Indices, kind: int) -> None:
    """Drop each later document whose earlier one stays, in order of the later ones."""
    for index in np.lexsort((first, later)):
        keep, gone = int(first[index]), int(later[index])
        if found.kind[keep] == 0 and found.kind[gone] == 0:
            found.kind[gone] = kind
            found.original[gone] = keep


def _near_pairs(keys: Keys, matrix: Matrix, alive: Indices, similarity: float) -> tuple[Indices, Indices]:
    """Return the pairs (earlier, later) that share a band and are similar enough."""
    count = np.uint64(keys.shape[1])
    pairs = np.zeros(0, np.uint64)  # earlier × count + later: most pairs share several bands
    for band in keys:
        for first, later in _equal_pairs(band[alive], alive):
            close = _similar(matrix, first, later, similarity)
            pairs = np.union1d(pairs, first[close].astype(np.uint64) * count + later[close].astype(np.uint64))
    return (pairs // count).astype(np.int64), (pairs % count).astype(np.int64)


def _equal_pairs(keys: np.ndarray[tuple[int], np.dtype[np.uint64]], indices: Indices) -> list[tuple[Indices, Indices]]:
    """Return pairs (earlier, later) of documents with equal keys: each with the first of its group and with the one before."""
    slices = len(keys) // SLICE + 1
    pairs = []
    for number in range(slices):
        chosen = np.flatnonzero(keys % np.uint64(slices) == number) if slices > 1 else np.arange(len(keys))
        order = chosen[np.argsort(keys[chosen], kind="stable")]  # equal keys stay in document order
        ordered = keys[order]
        equal = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        if not len(equal):
            continue
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        heads = starts[np.searchsorted(starts, equal, side="right") - 1]
        first = indices[order[np.r_[heads, equal - 1]]]
        later = indices[order[np.r_[equal, equal]]]
        pairs.append((first, later))
    return pairs


def _similar(matrix: Matrix, first: Indices, later: Indices, similarity: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    close = np.zeros(len(first), bool)
    for start in range(0, len(first), CHECKED):
        here = slice(start, start + CHECKED)
        close[here] = (matrix[first[here]] == matrix[later[here]]).mean(axis=1) >= similarity
    return close
