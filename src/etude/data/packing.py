"""Documents into rows of a fixed capacity: best-fit decreasing.

The pieces are taken from the longest to the shortest, and each goes into the row with the least free space that still
holds it. A document is cut only if it is longer than a row, and then into whole rows and one rest: cropping documents to
fill rows to the brim would lose a third of the tokens of code at 2,048. What is left free is padding, well under 1 % for
a window of some thousand documents.

The free spaces in use are kept as a sorted list. There are never more of them than rows, nor more than `capacity`, so
the list is short (at most about the root of the number of tokens) and a bisection beats any cleverer structure in Python.

Pack the documents of a source into shards: window by window, so that memory does not grow with the corpus.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.manifest import ShardEntry
from etude.data.shape import TABLE, TABLE_SCHEMA, TOKENS
from etude.data.shards import mapped, write_shard
from etude.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]
    from collections.abc import Iterator
    from pathlib import Path

    # Of a unit: lengths of its documents, their numbers in the source's table, where they begin in its mapped tokens.
    Part = tuple[Any, Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Packed:
    """Pieces in the order of their rows. Piece p is `lengths[p]` tokens of `documents[p]` from `starts[p]` on."""

    documents: Integers  # [P], indices into the lengths that were packed
    starts: Integers  # [P]
    lengths: Integers  # [P]
    offsets: Integers  # [R + 1]: row r holds the pieces offsets[r] to offsets[r + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Return the (document, start, length) of each piece in a row."""
        here = slice(self.offsets[index], self.offsets[index + 1])
        columns = (self.documents[here], self.starts[here], self.lengths[here])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def pack(lengths: Sequence[int] | Integers, capacity: int) -> Packed:
    """Pack documents of these lengths into rows of at most `capacity` tokens; an empty document has no piece.

    Equal pieces keep their order, and of rows with equal space the one filled last is taken: the result is a function of
    the arguments.
    """
    documents, starts, sizes = _cut(np.asarray(lengths, dtype=np.int64), capacity)
    falling = np.argsort(-sizes, kind="stable")
    rows = np.asarray(_best_fit(sizes[falling].tolist(), capacity), dtype=np.int64)
    by_row = falling[np.argsort(rows, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return Packed(documents[by_row], starts[by_row], sizes[by_row], offsets)


def _cut(lengths: Integers, capacity: int) -> tuple[Integers, Integers, Integers]:
    """Return document, start and length of every piece, in document order."""
    pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * capacity
    return documents, starts, np.minimum(lengths[documents] - starts, capacity)


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the row each piece goes into; rows are numbered as they are opened."""
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    spaces: list[int] = []  # those with rows, rising
    placed: list[int] = []
    opened = 0
    for size in sizes:
        found = bisect_left(spaces, size)
        if found < len(spaces):
            space = spaces[found]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del spaces[found]
        else:
            space, row = capacity, opened
            opened += 1
        placed.append(row)
        if left := space - size:
            if not rows_with[left]:
                insort(spaces, left)
            rows_with[left].append(row)
    return placed


WINDOW_TOKENS = 64_000_000  # packed together into one shard, and never split over two
SPLITS = ("train", "heldout")


class _Window:
    """Some documents that are packed together: how long they are and where their tokens lie."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.lengths, self.numbers, self.starts = (
            np.concatenate([part[column] for part in parts]) for column in range(3)
        )
        self.units = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
        self.tokens = [part[3] for part in parts]

    def document(self, index: int) -> Any:
        """Return the tokens of a document."""
        start = self.starts[index]
        return self.tokens[self.units[index]][start : start + self.lengths[index]]


def pack_source(
    source: str, domain: str, folders: Sequence[Path], length: int, vocabulary: int, shards: Path
) -> tuple[list[ShardEntry], Counter[int]]:
    """Write the shards of a source; return them, and its documents counted by powers of two of their tokens."""
    entries: list[ShardEntry] = []
    histogram: Counter[int] = Counter()
    for split in SPLITS:
        for number, window in enumerate(_windows(folders, heldout=split == "heldout")):
            name = f"{source}-{split}-{number:05d}"
            packed = pack(window.lengths, length)
            written = write_shard(shards, name, packed, window.document, window.numbers, vocabulary)
            entries.append(ShardEntry(name=name, source=source, domain=domain, split=split, **written))
            histogram.update(int(each).bit_length() - 1 for each in window.lengths)
    return entries, histogram


def _windows(folders: Sequence[Path], *, heldout: bool) -> Iterator[_Window]:
    """Yield the documents of one split: those of neighbouring units with about WINDOW_TOKENS together."""
    parts: list[Part] = []
    size, before = 0, 0
    for folder in folders:
        table = pq.read_table(folder / TABLE, columns=["heldout", "tokens"])
        held, lengths = (table.column(name).to_numpy() for name in ("heldout", "tokens"))
        chosen = np.flatnonzero(held == heldout)
        starts = np.cumsum(lengths) - lengths
        if len(chosen):  # each map is an open file
            parts.append((lengths[chosen], chosen + before, starts[chosen], mapped(folder / TOKENS, "<u4")))
        before += len(lengths)
        size += int(lengths[chosen].sum())
        if size >= WINDOW_TOKENS:
            yield _Window(parts)
            parts, size = [], 0
    if size:
        yield _Window(parts)


def write_table(folders: Sequence[Path], target: Path) -> None:
    """Write the table of a source's documents: the units' tables one after another."""
    with whole_file(target) as beside, pq.ParquetWriter(beside, TABLE_SCHEMA, compression="zstd") as writer:
        for folder in folders:
            writer.write_table(pq.read_table(folder / TABLE))
        if not folders:
            writer.write_table(pa.Table.from_pylist([], TABLE_SCHEMA))
