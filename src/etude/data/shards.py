"""Packed rows on disk: four arrays, memory-mapped, with nothing but the tokens themselves and where things begin.

`NAME.tokens.npy`     uint16 or uint32 [T]: the rows one after another, without padding
`NAME.rows.npy`       int64 [R + 1]: where each row begins in the tokens, and the end
`NAME.pieces.npy`     int64 [P + 1]: where each piece of a document begins, and the end; every row begins with a piece
`NAME.documents.npy`  int64 [P]: the document each piece is of, a number in the corpus's table of documents

They are ordinary .npy files, little-endian: equal rows give equal bytes, and any tool can read them.

Arrays on disk, in a way that a full disk is said and not a crash.

`np.save` hides the reason of a failed write, and writing through a map of a file that has no room ends the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from etude.errors import UserError, one_line
from etude.files import sha256_file, whole_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from etude.data.packing import Integers, Packed

    Tokens = npt.NDArray[np.unsignedinteger[Any]]


def save_array(path: Path, values: Any) -> None:
    """Write a .npy file, whole or not at all."""
    with whole_file(path) as beside, beside.open("wb") as file:
        header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(values).data)


def empty_array(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    """Return an array in a file of its own, for which there is room."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return np.memmap(path, dtype, "r+", shape=shape)


def mapped(path: Path, dtype: Any) -> Any:
    """Return the numbers in a flat file without reading them; a file of none cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


OFFSET = "<i8"


def dtype_for(vocabulary: int) -> str:
    """Return the smallest type that holds every token."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def write_shard(
    folder: Path,
    name: str,
    packed: Packed,
    document: Callable[[int], npt.NDArray[Any]],
    numbers: npt.ArrayLike,
    vocabulary: int,
) -> dict[str, Any]:
    """Write the rows of one packing window; return their count, that of tokens, and the digests of the files.

    `document` gives the tokens of a document by its index in the window and is asked piece by piece, so no more than a row
    is held here. `numbers` are the documents' numbers in the corpus's table. The tokens come first: if they cannot be had,
    no file is left.
    """
    ends = np.concatenate([[0], np.cumsum(packed.lengths)])
    path = {part: folder / f"{name}.{part}.npy" for part in ("tokens", "rows", "pieces", "documents")}
    with whole_file(path["tokens"]) as beside, beside.open("wb") as file:
        kind = np.dtype(dtype_for(vocabulary)).newbyteorder("<")
        header = {"descr": kind.str, "fortran_order": False, "shape": (int(ends[-1]),)}
        np.lib.format.write_array_header_1_0(file, header)
        for index in range(len(packed)):
            pieces = packed.row(index)
            row = np.concatenate([document(number)[start : start + length] for number, start, length in pieces])
            assert len(row) == sum(length for _, _, length in pieces), f"documents of row {index} changed length"
            assert 0 <= row.min() <= row.max() < vocabulary, f"row {index} holds a token outside of the vocabulary"
            file.write(row.astype(kind).data)
    for part, values in (
        ("rows", ends[packed.offsets]),
        ("pieces", ends),
        ("documents", np.asarray(numbers)[packed.documents]),
    ):
        save_array(path[part], values.astype(OFFSET))
    files = {each.name: sha256_file(each) for each in path.values()}
    return {"rows": len(packed), "tokens": int(ends[-1]), "files": files}


class Row(NamedTuple):
    """One packed row, and where in it the pieces begin."""

    tokens: Tokens  # [n], n at most the length of a row
    starts: Integers  # [pieces], the first is 0


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard; reading a row touches only its pages."""

    tokens: Tokens  # [T]
    rows: Integers  # [R + 1]
    pieces: Integers  # [P + 1]
    documents: Integers  # [P]
    first: Integers  # [R + 1]: the first piece of each row

    @classmethod
    def open(cls, folder: Path, name: str) -> Shard:
        """Map the four files and refuse those that cannot belong together."""
        tokens = _mapped(folder / f"{name}.tokens.npy", ("<u2", "<u4"))
        rows = _offsets(folder / f"{name}.rows.npy", len(tokens))
        pieces = _offsets(folder / f"{name}.pieces.npy", len(tokens))
        documents = _mapped(folder / f"{name}.documents.npy", (OFFSET,))
        first = np.searchsorted(pieces, rows)
        if not np.array_equal(pieces[first], rows):
            raise _damaged(folder / f"{name}.pieces.npy", "a row begins inside a piece")
        if len(documents) != len(pieces) - 1:
            raise _damaged(folder / f"{name}.documents.npy", f"{len(documents)} entries for {len(pieces) - 1} pieces")
        return cls(tokens, rows, pieces, documents, first)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def size(self, index: int) -> int:
        """Return how many tokens a row holds, without reading them."""
        return int(self.rows[index + 1] - self.rows[index])

    def row(self, index: int) -> Row:
        """Return a row; its arrays are views of the file."""
        begin = self.rows[index]
        starts = self.pieces[self.first[index] : self.first[index + 1]] - begin
        return Row(self.tokens[begin : self.rows[index + 1]], starts)


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; delete the corpus's folder and build it again")


def _mapped(path: Path, kinds: tuple[str, ...]) -> npt.NDArray[Any]:
    try:
        mapped = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; delete the corpus's folder and build it again") from None
    except (ValueError, EOFError) as error:
        raise _damaged(path, one_line(error)) from None
    if not isinstance(mapped, np.memmap) or mapped.ndim != 1 or mapped.dtype.str not in kinds:
        raise _damaged(path, "it is not a list of numbers of the expected type")
    if (size := path.stat().st_size) != (expected := mapped.offset + mapped.nbytes):
        raise _damaged(path, f"{size} bytes, not {expected}")
    return np.asarray(mapped)  # without the subclass, which makes every slice slow


def _offsets(path: Path, end: int) -> Integers:
    offsets = _mapped(path, (OFFSET,))
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) <= 0).any():
        raise _damaged(path, f"its offsets do not rise from 0 to the {end} tokens there are")
    return offsets
