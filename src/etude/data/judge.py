"""First pass of the build: read, judge and clean one unit of a source, and write what stays.

A unit is some parts of one source, about 64 MB together. It is done by one worker in bounded memory, leaves a folder of its
own, and is done again if it was interrupted. Its folder holds the kept documents (Parquet), their hashes and signatures for
finding duplicates across the corpus, and the counts.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.document import Document, Drop, Part, Raw, Samples
from etude.data.filters.content import Quality, decode, generated, is_code, is_text, language
from etude.data.filters.duplicates import band_keys, signatures, text_hash
from etude.data.filters.licence import Licences, Policy
from etude.data.filters.private import scrub
from etude.files import publish_folder, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from etude.data.filters.contamination import TaskIndex
    from etude.data.settings import DataSettings, SourceSettings

UNIT_BYTES = 64_000_000
BATCH_BYTES = 48_000_000  # of text held in memory at once: the secret detector takes a second to start for each batch
BATCH_DOCUMENTS = 100_000
DIFF_SIGNS = re.compile(r"^[+-]", re.MULTILINE)
DOCUMENTS, RESULT = "documents.parquet", "result.json"
# Flat files of [documents, 2], [documents, bands] and [documents, hashes].
HASHES, KEYS, SIGNATURES = "hashes.bin", "keys.bin", "signatures.bin"
EXCERPT = 400  # characters of a dropped document that are shown
TEXT_COLUMNS = ("repository", "path", "kind", "language", "licence", "evidence", "text")
SCHEMA = pa.schema([*((name, pa.string()) for name in TEXT_COLUMNS), ("bytes", pa.int64())])


@dataclass(frozen=True)
class UnitJob:
    """What a worker is told."""

    source: SourceSettings
    data: DataSettings
    parts: tuple[Part, ...]
    tasks: TaskIndex
    folder: Path  # where its result goes

    @property
    def size(self) -> int:
        """About how many bytes it reads."""
        return sum(part.size for part in self.parts)

    @property
    def loose(self) -> bool:
        """Whether each row is on its own, so that there are too many repositories to list."""
        source = self.source
        return bool(source.jsonl or source.parquet or source.dataset) and source.repository_column is None

    @cached_property
    def result(self) -> dict[str, Any]:
        """What came of it, once it is done."""
        return dict(read_json(self.folder / RESULT))


def share_out(parts: Sequence[Part]) -> list[tuple[Part, ...]]:
    """Group neighbouring parts into units of about equal size. The grouping depends on the parts alone."""
    units: list[list[Part]] = []
    room = 0
    for part in parts:
        if room < part.size or not units:
            units.append([])
            room = UNIT_BYTES
        units[-1].append(part)
        room -= part.size
    return [tuple(unit) for unit in units]


@dataclass
class _Progress:
    """What a unit has come to so far."""

    samples: Samples
    tally: Counter[str] = field(default_factory=lambda: Counter(documents_in=0, bytes_in=0, kept=0, kept_bytes=0))
    drops: Counter[str] = field(default_factory=Counter)  # "step: reason" → documents
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    digest: Any = field(default_factory=hashlib.sha256)
    scrubbed: Counter[str] = field(default_factory=Counter)
    hits: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def drop(self, drop: Drop) -> None:
        self.drops[f"{drop.step}: {drop.reason}"] += 1
        self.dropped_bytes[f"{drop.step}: {drop.reason}"] += drop.size
        self.samples.offer(drop)

    def timed(self, step: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[step] += now - since
        return now


def filter_unit(job: UnitJob) -> dict[str, Any]:
    """Do one unit; return its counts, which also lie in its folder."""
    work = job.folder.with_name(f"{job.folder.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(job.folder, ignore_errors=True)
    work.mkdir(parents=True)
    progress = _Progress(Samples(job.data.samples))
    with pq.ParquetWriter(work / DOCUMENTS, SCHEMA, compression="zstd", compression_level=1) as writer:
        for batch in _batches(job, progress):
            _finish_batch(batch, job, progress, work, writer)
    came, kept, size = (progress.tally[key] for key in ("documents_in", "kept", "bytes_in"))
    assert came == kept + progress.drops.total(), f"something disappeared: {progress}"
    tally = {**progress.tally, "drops": progress.drops, "dropped_bytes": progress.dropped_bytes}
    digest, samples = progress.digest.hexdigest(), progress.samples.all()
    write_json(work / RESULT, {"digest": digest, "tally": tally, "samples": samples,
                               "scrubbed": progress.scrubbed, "hits": progress.hits})  # fmt: skip
    publish_folder(work, job.folder)
    seconds = {step: round(spent, 4) for step, spent in progress.seconds.items()}
    return {"documents": came, "kept": kept, "bytes": size, "seconds": seconds}


def _batches(job: UnitJob, progress: _Progress) -> Iterator[list[Document]]:
    """Yield the documents that pass the filters for single documents, some at a time."""
    batch: list[Document] = []
    size = 0
    for part in job.parts:
        for document in _judged(part, job, progress):
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    yield batch


def _judged(part: Part, job: UnitJob, progress: _Progress) -> Iterator[Document]:
    judge = _Judge(part, job, progress)
    clock = time.perf_counter()
    for entry in part.read():
        clock = progress.timed("read", clock)
        verdict = entry if isinstance(entry, Drop) else judge.verdict(entry)
        size = verdict.size if isinstance(verdict, Drop) else judge.size
        progress.tally.update(documents_in=1, bytes_in=size)
        if isinstance(verdict, Drop):
            progress.drop(verdict)
        else:
            yield verdict
        clock = time.perf_counter()


class _Judge:
    """The filters that look at one document at a time, in the order that is cheapest."""

    def __init__(self, part: Part, job: UnitJob, progress: _Progress) -> None:
        self.job, self.progress = job, progress
        self.size = 0
        self.quality = Quality(job.data.filters)
        self.policy = Policy(job.source.licences, job.source.unknown)
        clock = time.perf_counter()
        self.licences = Licences(part.licence_files(), part.stated_licence(), job.source.licence)
        progress.timed("licence", clock)

    def verdict(self, raw: Raw) -> Document | Drop:
        """Return the document, filled in, or why it is dropped; `size` then says how many bytes it had."""
        clock = time.perf_counter()
        content = raw.content if isinstance(raw.content, bytes) else raw.content.encode(errors="surrogatepass")
        size = self.size = len(content)
        name = f"{raw.repository}\0{raw.path}\0".encode(errors="surrogateescape")
        self.progress.digest.update(name + hashlib.sha256(content).digest())
        document = decode(raw)
        clock = self.progress.timed("decode", clock)
        if isinstance(document, str):
            return Drop(raw.repository, raw.path, "decode", document, size)
        for step, judge in (
            ("language", language), ("selection", self._unselected), ("generated", generated),
            ("quality", self.quality), ("licence", self._licence_reason),
        ):  # fmt: skip
            reason = judge(document)
            clock = self.progress.timed(step, clock)
            if reason:
                return Drop(raw.repository, raw.path, step, reason, size, document.text[:EXCERPT])
        return document

    def _unselected(self, document: Document) -> str | None:
        """Return why the source does not ask for this file, if so."""
        source = self.job.source
        if document.kind != "file":
            return None
        if source.include and not any(fnmatch.fnmatch(document.path, pattern) for pattern in source.include):
            return "not included"
        if any(fnmatch.fnmatch(document.path, pattern) for pattern in source.exclude):
            return "excluded"
        wrong = {"all": False, "code": not is_code(document.language), "prose": not is_text(document.language)}
        return f"not {source.keep}" if wrong[source.keep] else None

    def _licence_reason(self, document: Document) -> str | None:
        document.licence, document.evidence = self.licences.of(document)
        return self.policy.reason(document.licence)


def _finish_batch(
    batch: list[Document], job: UnitJob, progress: _Progress, workspace: Path, writer: pq.ParquetWriter
) -> None:
    """Scrub a batch, keep benchmark tasks out of it, sign it and write it."""
    clock = time.perf_counter()
    if job.data.filters.scrub and batch:
        progress.scrubbed.update(scrub(batch, workspace))
    clock = progress.timed("private", clock)
    kept = [document for document in batch if not _contaminated(document, job.tasks, progress)]
    clock = progress.timed("contamination", clock)
    texts = [document.text for document in kept]
    _append(workspace / HASHES, np.array([text_hash(text) for text in texts], np.uint64))
    clock = progress.timed("hashes", clock)
    if job.data.duplicates.near:
        matrix = signatures(texts, job.data.duplicates)
        _append(workspace / SIGNATURES, matrix)
        _append(workspace / KEYS, band_keys(matrix, job.data.duplicates))
    clock = progress.timed("signatures", clock)
    sizes = [len(text.encode()) for text in texts]
    progress.tally.update(kept=len(kept), kept_bytes=sum(sizes))
    columns = {name: [getattr(document, name) for document in kept] for name in TEXT_COLUMNS}
    writer.write_table(pa.table({**columns, "bytes": sizes}, schema=SCHEMA))
    progress.timed("write", clock)


def _append(file: Path, values: Any) -> None:
    with file.open("ab") as opened:
        opened.write(values.tobytes())


def _contaminated(document: Document, tasks: TaskIndex, progress: _Progress) -> bool:
    # In a diff the lines of a task have signs before them, which would break its runs.
    hit = tasks.hit(DIFF_SIGNS.sub("", document.text) if document.kind == "commit" else document.text)
    if hit is None:
        return False
    where = {"repository": document.repository, "path": document.path}
    progress.hits.append(where | {"tasks": list(hit.tasks), "runs": hit.runs, "words": list(hit.words)})
    why, size = "shares code with benchmark tasks", len(document.text.encode())
    progress.drop(Drop(document.repository, document.path, "contamination", why, size, hit.words[0]))
    return True
