"""Runs of words as 64-bit numbers, fast: what near-duplicates and contamination are found by.

Words are cut and hashed for a whole text at once, in numpy: a regular expression and a dictionary take four times as long,
and this is the most expensive step before tokenising. The hash of a word is Σ value(byte) · P^position (mod 2⁶⁴), taken from
running sums over the text and shifted back to the word's start by P^−start, so equal words have equal hashes wherever they
stand. Equal runs give equal numbers on every machine; different ones agree by a chance of about 2⁻⁶⁴.

Bytes of characters outside ASCII count as letters. Letters are compared without their case, ASCII ones only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
    Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]

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
