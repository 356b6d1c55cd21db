"""Second pass of the build: turn the documents of a unit that stay into tokens.

Files may be joined by repository and may have their middle moved to the end; each document ends with the separator. A unit
leaves its tokens one after another, their lengths, and a table that says which files each document holds.

The files of a repository as documents long enough to learn how files depend on each other.

Orders: `path`, as a person sees the tree; or `imports`: a file after those it imports, so that a model has read a function
before it sees it used (DeepSeek-Coder 2024). Only Python's imports are followed; all else keeps path order. Cycles are cut
at the file that comes first by path.

Fill-in-the-middle (Bavarian et al. 2022): a file is cut at two characters, and its middle is moved to the end.

    PSM  <prefix> P <suffix> S <middle> M
    SPM  <prefix> <suffix> S <middle> P M      (the variant that shares the prefix token, as Code Llama has it)

The cuts fall between characters, not tokens, because an editor's cursor does too. Each part is tokenised for itself. Taking
the tokens away and the parts back into order gives the file again; a test does.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.deduplicate import KEPT
from etude.data.document import Document
from etude.data.filters.content import is_code
from etude.data.judge import DOCUMENTS, TEXT_COLUMNS
from etude.data.tokeniser import Encoder
from etude.files import whole_file, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from etude.data.settings import DataSettings
    from etude.data.tokeniser import Tokens

IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)


def header(path: str) -> str:
    """Return the line that names a file inside a joined document."""
    return f"### {path}\n"


def in_order(files: Sequence[Document], order: str) -> list[Document]:
    """Return the files of a repository in the stated order."""
    ordered = sorted(files, key=lambda file: file.path)
    if order == "path":
        return ordered
    modules = {name: index for index, file in enumerate(ordered) for name in module_names(file.path)}
    needs = [sorted(_imported(file, modules) - {index}) for index, file in enumerate(ordered)]
    return [ordered[index] for index in _after_needs(needs)]


def _after_needs(needs: Sequence[Sequence[int]]) -> list[int]:
    """Return all numbers, each after those it needs where that is possible; depth first, without recursion."""
    done: dict[int, None] = {}
    seen: set[int] = set()
    for start in range(len(needs)):
        stack = [start]
        while stack:
            here = stack[-1]
            seen.add(here)
            waiting = [other for other in needs[here] if other not in seen]
            if waiting:
                stack.append(waiting[0])
            else:
                done.setdefault(stack.pop())
    return list(done)


def module_names(path: str) -> list[str]:
    """Return the names a Python file can be imported by: with and without its leading folders (`src/a/b.py` is also a.b)."""
    if not path.endswith(".py"):
        return []
    parts = path.removesuffix(".py").split("/")
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return [".".join(parts[start:]) for start in range(min(2, len(parts)))]


def _imported(file: Document, modules: dict[str, int]) -> set[int]:
    found: set[int] = set()
    package = file.path.split("/")[:-1]
    for module, names, plain in IMPORT.findall(file.text) if file.path.endswith(".py") else []:
        dots = len(module) - len(module.lstrip("."))
        above = ".".join(package[: len(package) - dots + 1]) if dots else ""
        start = ".".join(part for part in (above, module.lstrip(".")) if part)
        wanted = [name.split(" as ")[0].strip() for name in (names or plain).split(",")]
        candidates = [start, *(f"{start}.{name}" for name in wanted)] if start else wanted
        found |= {modules[name] for name in candidates if name in modules}
    return found


def joined(files: Sequence[Document], most_chars: int) -> Iterator[list[Document]]:
    """Yield groups of neighbouring files that make documents of at most `most_chars`; a longer file stands alone."""
    group: list[Document] = []
    size = 0
    for file in files:
        length = len(header(file.path)) + len(file.text) + 1
        if group and size + length > most_chars:
            yield group
            group, size = [], 0
        group.append(file)
        size += length
    if group:
        yield group


Pieces = list[str | int]  # text to be tokenised, and tokens as they are


class FimTokens(NamedTuple):
    """The ids of the three tokens."""

    prefix: int
    middle: int
    suffix: int


def draw(seed: int, *identity: str) -> random.Random:
    """Return the random numbers of one document: the same in any order, on any machine, in any worker."""
    digest = hashlib.blake2b("\0".join([str(seed), *identity]).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))  # noqa: S311 - not a secret


def rearrange(text: str, tokens: FimTokens, rng: random.Random, spm_share: float) -> Pieces:
    """Cut a text at two places and move its middle to the end."""
    first, second = sorted(rng.randint(0, len(text)) for _ in range(2))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if rng.random() < spm_share:
        return [tokens.prefix, tokens.suffix, suffix, tokens.middle, prefix + middle]
    return [tokens.prefix, prefix, tokens.suffix, suffix, tokens.middle, middle]


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
