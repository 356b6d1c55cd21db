"""Documents into rows of a fixed capacity, and rows into shards on disk.

Rows are packed by best-fit decreasing: the pieces are taken from the longest to the shortest, and each goes into the row with
the least free space that still holds it. A document is cut only if it is longer than a row, and then into whole rows and one
rest: cropping documents to fill rows to the brim would lose a third of the tokens of code at 2,048. What is left free is
padding, well under 1 % for a window of some thousand documents. The free spaces in use are kept as a sorted list. There are
never more of them than rows, nor more than `capacity`, so the list is short and a bisection beats any cleverer structure.

A source is packed window by window, so that memory does not grow with the corpus; a window becomes a shard of four arrays,
with nothing but the tokens themselves and where things begin:

`NAME.tokens.npy`     uint16 or uint32 [T]: the rows one after another, without padding
`NAME.rows.npy`       int64 [R + 1]: where each row begins in the tokens, and the end
`NAME.pieces.npy`     int64 [P + 1]: where each piece of a document begins, and the end; every row begins with a piece
`NAME.documents.npy`  int64 [P]: the document each piece is of, a number in the corpus's table of documents

They are ordinary .npy files, little-endian: equal rows give equal bytes, and any tool can read them. They are not written with
`np.save`, which hides the reason of a failed write: a full disk is to be said.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from etude.data.manifest import ShardEntry
from etude.data.tokenise import TABLE, TABLE_SCHEMA, TOKENS
from etude.errors import UserError, one_line
from etude.files import sha256_file, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

OFFSET = "<i8"
WINDOW_TOKENS = 64_000_000  # packed together into one shard, and never split over two


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
    sizes = np.asarray(lengths, dtype=np.int64)
    pieces = -(-sizes // capacity)  # of each document
    documents = np.repeat(np.arange(len(sizes)), pieces)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * capacity
    sizes = np.minimum(sizes[documents] - starts, capacity)
    falling = np.argsort(-sizes, kind="stable")
    rows = np.asarray(_best_fit(sizes[falling].tolist(), capacity), dtype=np.int64)
    by_row = falling[np.argsort(rows, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return Packed(documents[by_row], starts[by_row], sizes[by_row], offsets)


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the row each piece goes into; rows are numbered as they are opened."""
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    spaces: list[int] = []  # those with rows, rising
    placed: list[int] = []
    opened = 0
    for size in sizes:
        best = bisect_left(spaces, size)
        if best < len(spaces):
            space = spaces[best]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del spaces[best]
        else:
            space, row = capacity, opened
            opened += 1
        placed.append(row)
        if left := space - size:
            if not rows_with[left]:
                insort(spaces, left)
            rows_with[left].append(row)
    return placed


def pack_source(
    source: str, domain: str, folders: Sequence[Path], length: int, vocabulary: int, shards: Path
) -> tuple[list[ShardEntry], Counter[int]]:
    """Write the shards of a source; return them, and its documents counted by powers of two of their tokens."""
    entries: list[ShardEntry] = []
    histogram: Counter[int] = Counter()
    for split in ("train", "heldout"):
        for shard, (numbers, documents) in enumerate(_windows(folders, heldout=split == "heldout")):
            name, lengths = f"{source}-{split}-{shard:05d}", [len(each) for each in documents]
            written = write_shard(shards, name, pack(lengths, length), documents, numbers, vocabulary)
            entries.append(ShardEntry(name=name, source=source, domain=domain, split=split, **written))
            histogram.update(each.bit_length() - 1 for each in lengths)
    return entries, histogram


def _windows(folders: Sequence[Path], *, heldout: bool) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield the documents of one split, those of neighbouring units with about WINDOW_TOKENS together.

    Each comes with its number in the source's table; its tokens are a view of the unit's file.
    """
    numbers: list[int] = []
    documents: list[Any] = []
    size, before = 0, 0
    for folder in folders:
        table = pq.read_table(folder / TABLE, columns=["heldout", "tokens"])
        held, lengths = (table.column(name).to_numpy() for name in ("heldout", "tokens"))
        chosen = np.flatnonzero(held == heldout)
        if len(chosen):
            every = np.split(np.asarray(np.memmap(folder / TOKENS, "<u4", "r")), np.cumsum(lengths))
            numbers += (chosen + before).tolist()
            documents += [every[index] for index in chosen]
        before += len(lengths)
        size += int(lengths[chosen].sum())
        if size >= WINDOW_TOKENS:
            yield numbers, documents
            numbers, documents, size = [], [], 0
    if size:
        yield numbers, documents


def write_table(folders: Sequence[Path], target: Path) -> None:
    """Write the table of a source's documents: the units' tables one after another."""
    with whole_file(target) as beside, pq.ParquetWriter(beside, TABLE_SCHEMA, compression="zstd") as writer:
        for folder in folders:
            writer.write_table(pq.read_table(folder / TABLE))


def dtype_for(vocabulary: int) -> str:
    """Return the smallest type that holds every token."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def save_array(path: Path, values: Any) -> None:
    """Write a .npy file, whole or not at all."""
    with whole_file(path) as beside, beside.open("wb") as file:
        _write_header(file, values.dtype, values.shape)
        file.write(np.ascontiguousarray(values).data)


def _write_header(file: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})


def write_shard(
    folder: Path, name: str, packed: Packed, documents: Sequence[Any], numbers: npt.ArrayLike, vocabulary: int
) -> dict[str, Any]:
    """Write the rows of one packing window; return their count, that of tokens, and the digests of the files.

    `documents` are the tokens of each, views of files of which no more than a row is read at a time; `numbers` are theirs
    in the corpus's table. The tokens come first: if they cannot be had, no file is left.
    """
    ends = np.concatenate([[0], np.cumsum(packed.lengths)])
    path = {part: folder / f"{name}.{part}.npy" for part in ("tokens", "rows", "pieces", "documents")}
    with whole_file(path["tokens"]) as beside, beside.open("wb") as file:
        kind = np.dtype(dtype_for(vocabulary)).newbyteorder("<")
        _write_header(file, kind, (int(ends[-1]),))
        for index in range(len(packed)):
            pieces = packed.row(index)
            row = np.concatenate([documents[number][start : start + length] for number, start, length in pieces])
            assert len(row) == sum(length for _, _, length in pieces), f"documents of row {index} changed length"
            assert 0 <= row.min() <= row.max() < vocabulary, f"row {index} holds a token outside of the vocabulary"
            file.write(row.astype(kind).data)
    save_array(path["rows"], ends[packed.offsets].astype(OFFSET))
    save_array(path["pieces"], ends.astype(OFFSET))
    save_array(path["documents"], np.asarray(numbers)[packed.documents].astype(OFFSET))
    files = {each.name: sha256_file(each) for each in path.values()}
    return {"rows": len(packed), "tokens": int(ends[-1]), "files": files}


class Row(NamedTuple):
    """One packed row, and where in it the pieces begin."""

    tokens: npt.NDArray[np.unsignedinteger[Any]]  # [n], n at most the length of a row
    starts: Integers  # [pieces], the first is 0
    learnt: npt.NDArray[np.bool_] | None  # [n]


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard; reading a row touches only its pages. Whether its bytes are those written, `check_shards` says."""

    tokens: npt.NDArray[np.unsignedinteger[Any]]  # [T]
    rows: Integers  # [R + 1]
    pieces: Integers  # [P + 1]
    learnt: npt.NDArray[np.bool_] | None = None  # [T]: tokens to be predicted; None: every one

    @classmethod
    def open(cls, folder: Path, name: str) -> Shard:
        """Map its files; those that cannot be mapped are refused."""
        arrays = []
        for part in ("tokens", "rows", "pieces"):
            path = folder / f"{name}.{part}.npy"
            try:  # without the subclass of the map, which makes every slice slow
                arrays.append(np.asarray(np.load(path, mmap_mode="r")))
            except (OSError, ValueError, EOFError) as error:
                why = f"{path} cannot be read: {one_line(error)}"
                raise UserError(f"{why}; delete the corpus's folder and build it again") from None
        return cls(*arrays)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def size(self, index: int) -> int:
        """Return how many tokens a row holds, without reading them."""
        return int(self.rows[index + 1] - self.rows[index])

    def row(self, index: int) -> Row:
        """Return a row; its tokens are a view of the file."""
        begin, end = self.rows[index], self.rows[index + 1]
        first, last = np.searchsorted(self.pieces, [begin, end])
        learnt = None if self.learnt is None else self.learnt[begin:end]
        return Row(self.tokens[begin:end], self.pieces[first:last] - begin, learnt)
