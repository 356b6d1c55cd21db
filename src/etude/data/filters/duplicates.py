"""Exact and near-duplicates across the whole corpus: of two alike, the one that comes first in the recipe stays.

Near-duplicates are found by MinHash (Broder 1997): the share of equal entries in two signatures estimates the Jaccard
similarity of the documents' word n-grams. Documents with all hashes of one band equal are candidates; a candidate pair
counts if the estimate from the *whole* signature reaches the wanted similarity. Other tools drop every candidate, and all
of a chain A≈B≈C; here a document is dropped only if it is close to one that stays, which the drop then names.

Memory is bounded: signatures stay on disk, and bands are worked through one by one, in slices of their keys.

Runs of words as 64-bit numbers, fast: what near-duplicates and contamination are found by.

Words are cut and hashed for a whole text at once, in numpy: a regular expression and a dictionary take four times as long,
and this is the most expensive step before tokenising. The hash of a word is Σ value(byte) · P^position (mod 2⁶⁴), taken from
running sums over the text and shifted back to the word's start by P^−start, so equal words have equal hashes wherever they
stand. Equal runs give equal numbers on every machine; different ones agree by a chance of about 2⁻⁶⁴.

Bytes of characters outside ASCII count as letters. Letters are compared without their case, ASCII ones only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from rensa import RMinHash

if TYPE_CHECKING:
    Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
    Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]
    from collections.abc import Sequence

    from etude.data.settings import DuplicateSettings

    Matrix = np.ndarray[tuple[int, int], np.dtype[np.uint32]]
    Keys = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
FINISH = np.uint64(0xFF51AFD7ED558CCD)
SPACE, WORD, SIGN = 0, 1, 2


CLASSES = np.full(256, SIGN, np.uint8)  # by byte
CLASSES[[byte for byte in range(256) if byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_"]] = WORD
CLASSES[[*b" \t\n\r\f\v\0"]] = SPACE
VALUES = np.random.Generator(np.random.PCG64(20240117)).integers(1, 2**64, 256, np.uint64)  # by byte
VALUES[ord("A") : ord("Z") + 1] = VALUES[ord("a") : ord("z") + 1]


@lru_cache(maxsize=4)
def _powers(length: int) -> tuple[Hashes, Hashes]:
    """Return P^i and P^−i for i < length."""
    inverse = pow(BASE, -1, 2**64)
    tables = []
    for base in (BASE, inverse):
        steps = np.full(length, base, np.uint64)
        steps[0] = 1
        tables.append(np.cumprod(steps))
    return tables[0], tables[1]


class Runs(NamedTuple):
    """One number for each run of n words, and where in the UTF-8 text it begins and ends."""

    hashes: Hashes
    starts: Offsets
    ends: Offsets


def ngram_runs(content: bytes, n: int, *, signs: bool) -> Runs:
    """Return the runs of `n` words of a UTF-8 text; a text of fewer words has one run, of all of them.

    With `signs`, a run of signs between words is a word too: what code consists of.
    """
    starts, ends = _words(content, signs=signs)
    count = len(starts) - n + 1 if len(starts) >= n else min(len(starts), 1)
    n = min(n, len(starts))
    hashes = _word_hashes(content, starts, ends)
    runs = np.zeros(count, np.uint64)
    for offset in range(n):
        runs = runs * MULTIPLIER + hashes[offset : count + offset]
    return Runs(_mixed(runs), starts[:count], ends[n - 1 : n - 1 + count] if n else ends)


def _words(content: bytes, *, signs: bool) -> tuple[Offsets, Offsets]:
    classes = np.zeros(len(content) + 2, np.uint8)  # a space before and after
    classes[1:-1] = CLASSES[np.frombuffer(content, np.uint8)]
    changes = np.flatnonzero(classes[1:] != classes[:-1])
    kind = classes[changes + 1]  # of what begins there
    wanted = kind[:-1] != SPACE if signs else kind[:-1] == WORD
    return changes[:-1][wanted], changes[1:][wanted]


def _word_hashes(content: bytes, starts: Offsets, ends: Offsets) -> Hashes:
    # Tables in powers of two, so that few of them are made.
    powers, inverses = _powers(1 << max(10, len(content).bit_length()))
    sums = np.zeros(len(content) + 1, np.uint64)
    np.cumsum(VALUES[np.frombuffer(content, np.uint8)] * powers[: len(content)], out=sums[1:])
    return _mixed((sums[ends] - sums[starts]) * inverses[starts])


def _mixed(hashes: Hashes) -> Hashes:
    """Spread what differs little over all bits."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= FINISH
    return hashes ^ (hashes >> np.uint64(33))


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
