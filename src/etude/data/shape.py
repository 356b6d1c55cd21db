"""Second pass of the build: turn the documents of a unit that stay into tokens.

Files may be joined by repository and may have their middle moved to the end; each document ends with the separator. A unit
leaves its tokens one after another, their lengths, and a table that says which files each document holds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.compare import KEPT
from etude.data.document import Document
from etude.data.filters.language import is_code
from etude.data.shaping.encoder import Encoder
from etude.data.shaping.fim import FimTokens, draw, rearrange
from etude.data.shaping.repository import header, in_order, joined
from etude.data.units import DOCUMENTS, TEXT_COLUMNS
from etude.files import whole_file, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from etude.data.settings import DataSettings
    from etude.data.shaping.encoder import Tokens
    from etude.data.shaping.fim import Pieces

TOKENS, TABLE, SHAPED = "tokens.bin", "table.parquet", "shaped.json"
READ_ROWS = 256  # documents read at once: each may have a megabyte
JOINED_BYTES = 64_000_000  # of one repository held in memory
TABLE_ROWS = 10_000  # written at once
TABLE_SCHEMA = pa.schema(
    [("repository", pa.string()), ("paths", pa.list_(pa.string())), ("licence", pa.string()), ("heldout", pa.bool_()),
     ("tokens", pa.int64()), ("bytes", pa.int64())]
)  # fmt: skip


@dataclass(frozen=True)
class ShapeJob:
    """What a worker is told."""

    folder: Path  # of the unit
    data: DataSettings
    tokeniser: Path
    separator: int
    heldout: frozenset[str] | float  # repositories; or for loose rows the share, decided by each row's hash
    seed: int


@dataclass(frozen=True)
class Shaped:
    """A document in pieces, and the files it holds."""

    pieces: Pieces
    files: Sequence[Document]
    fim: int = 0  # files in it that were rearranged


def is_heldout(repository: str, heldout: frozenset[str] | float, seed: int) -> bool:
    """Return whether a repository is held out: by name, or for loose rows by chance, fixed by its hash."""
    if isinstance(heldout, frozenset):
        return repository in heldout
    return draw(seed, "heldout", repository).random() < heldout


def shape_unit(job: ShapeJob) -> dict[str, Any]:
    """Do one unit; return its counts, which also lie in its folder."""
    encoder = Encoder(job.tokeniser)
    fim = FimTokens(*(encoder.token(name) or 0 for name in job.data.fim.tokens)) if job.data.fim.rate else None
    counts: dict[str, Counter[str]] = {key: Counter() for key in ("licences", "languages", "evidence")}
    totals: Counter[str] = Counter()
    with shaped_writer(job.folder) as write:
        for documents in _repositories(job):
            for document in documents:
                size = len(document.text.encode())
                counts["licences"][document.licence] += size
                counts["languages"][document.language] += size
                counts["evidence"][document.evidence or "none"] += size
            for shaped, tokens in _encoded(list(_shape(documents, job, fim)), encoder, job):
                held = is_heldout(shaped.files[0].repository, job.heldout, job.seed)
                write(tokens, shaped.files, held)
                split = "heldout" if held else "train"
                totals[split] += len(tokens)
                totals[f"{split}_bytes"] += sum(len(file.text.encode()) for file in shaped.files)
                totals["fim"] += shaped.fim
    write_json(job.folder / SHAPED, {"totals": totals, "exact_fast_tokeniser": encoder.use_fast, **counts})
    return {"written_tokens": totals["train"] + totals["heldout"]}


def read_kept(folder: Path) -> Iterator[list[Document]]:
    """Yield the documents of a unit that stay, some at a time."""
    kept = np.load(folder / KEPT)
    position = 0
    for batch in pq.ParquetFile(folder / DOCUMENTS).iter_batches(READ_ROWS, columns=list(TEXT_COLUMNS)):
        stays = pa.array(kept[position : position + batch.num_rows])
        position += batch.num_rows
        yield [Document(**fields) for fields in batch.filter(stays).to_pylist()]


def _repositories(job: ShapeJob) -> Iterator[list[Document]]:
    """Yield neighbouring documents: those of one repository if files are to be joined, else as they come."""
    if job.data.repositories == "off":
        yield from read_kept(job.folder)
        return
    everything = chain.from_iterable(read_kept(job.folder))
    for _, documents in groupby(everything, key=lambda document: document.repository):
        group, size = [], 0
        for document in documents:
            group.append(document)
            size += len(document.text)
            if size > JOINED_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group


def _shape(documents: list[Document], job: ShapeJob, fim: FimTokens | None) -> Iterator[Shaped]:
    order = job.data.repositories
    files = [document for document in documents if document.kind == "file" and order != "off"]
    yield from (_alone(document, job, fim) for document in documents if document.kind != "file" or order == "off")
    yield from (_joined(group, job, fim) for group in joined(in_order(files, order), job.data.repository_chars))


def _joined(group: Sequence[Document], job: ShapeJob, fim: FimTokens | None) -> Shaped:
    """Return files as one document, each under its name."""
    pieces: Pieces = []
    moved = 0
    for file in group:
        alone = _alone(file, job, fim)
        pieces += [header(file.path), *alone.pieces, "\n"]
        moved += alone.fim
    return Shaped(pieces, group, moved)


def _alone(document: Document, job: ShapeJob, fim: FimTokens | None) -> Shaped:
    """Return one document by itself, with its middle at the end if it is chosen for that."""
    if fim and document.kind == "file" and is_code(document.language):
        rng = draw(job.seed, "fim", document.repository, document.path)
        if rng.random() < job.data.fim.rate:
            return Shaped(rearrange(document.text, fim, rng, job.data.fim.spm), [document], 1)
    return Shaped([document.text], [document])


def _encoded(shaped: list[Shaped], encoder: Encoder, job: ShapeJob) -> Iterator[tuple[Shaped, Tokens]]:
    for each, tokens in zip(shaped, _tokens(shaped, encoder, job.separator), strict=True):
        if each.fim and len(tokens) > job.data.length:
            # Cut over two rows, a middle would be asked for without what surrounds it.
            plain = _joined(each.files, job, None) if len(each.files) > 1 else _alone(each.files[0], job, None)
            yield plain, _tokens([plain], encoder, job.separator)[0]
        else:
            yield each, tokens


def _tokens(shaped: Sequence[Shaped], encoder: Encoder, separator: int) -> list[Tokens]:
    pieces = [[*each.pieces, separator] for each in shaped]
    encoded = iter(encoder.encode([piece for each in pieces for piece in each if isinstance(piece, str)]))
    return [
        np.concatenate([next(encoded) if isinstance(piece, str) else np.array([piece], np.uint32) for piece in each])
        for each in pieces
    ]


@contextlib.contextmanager
def shaped_writer(folder: Path) -> Iterator[Callable[[Tokens, Sequence[Document], bool], None]]:
    """Yield what writes the documents of a unit as they come: their tokens, the files they hold, whether held out."""
    rows: list[dict[str, Any]] = []
    with (
        whole_file(folder / TOKENS) as beside,
        beside.open("wb") as file,
        whole_file(folder / TABLE) as table,
        pq.ParquetWriter(table, TABLE_SCHEMA, compression="zstd") as writer,
    ):

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, TABLE_SCHEMA))
            rows.clear()

        def write(tokens: Tokens, files: Sequence[Document], heldout: bool) -> None:  # noqa: FBT001 - a column
            file.write(tokens.astype("<u4").data)
            paths, size = [each.path for each in files], sum(len(each.text.encode()) for each in files)
            licences = sorted({each.licence for each in files})
            licence = " AND ".join(f"({one})" if " OR " in one and len(licences) > 1 else one for one in licences)
            rows.append({"repository": files[0].repository, "paths": paths, "licence": licence, "heldout": heldout,
                         "tokens": len(tokens), "bytes": size})  # fmt: skip
            if len(rows) >= TABLE_ROWS:
                flush()

        yield write
        flush()
