"""Pack the documents of a source into shards: window by window, so that memory does not grow with the corpus."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.arrays import mapped
from etude.data.manifest import ShardEntry
from etude.data.packing import pack
from etude.data.shape import TABLE, TABLE_SCHEMA, TOKENS
from etude.data.shards import write_shard
from etude.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    # Of a unit: lengths of its documents, their numbers in the source's table, where they begin in its mapped tokens.
    Part = tuple[Any, Any, Any, Any]

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
