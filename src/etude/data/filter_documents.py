"""First pass of the build: read, filter and clean one unit of a source, and write what stays.

A unit is some parts of one source, about 64 MB together. It is done by one worker in bounded memory, leaves a folder of its
own, and is done again if it was interrupted. Its folder holds the kept documents (Parquet), their hashes and signatures for
finding duplicates across the corpus, and the counts.

The filters are small functions that return why a document is dropped, or None. Their order is cheap and certain first, so that
the dear ones see little, and no step reads what an earlier one dropped:

1. `decode`: bytes become text, or the file is no text at all.                                             filters/content.py
2. `language`: code or prose? Data files, images and the like leave here; the later steps know what they look at.
3. `selection`: does the source ask for this file?
4. `generated`: what no person wrote here (vendored, generated, minified, lock files), by path and by its own heading.
5. `quality`: too short, too long lines, too repetitive: counts over the whole text.
6. `licence`: who may use it, file by file; after the counts, because a classifier may have to read texts. filters/licence.py
7. `private`: secrets and personal data are replaced, not dropped; in batches, because the detector is a program to start.
   Before duplicates, so that two copies that differ in a scrubbed address only count as copies.           filters/private.py
8. `contamination`, against benchmark tasks: needs to see final texts, as `deduplicate.py` does.     filters/contamination.py
9. `repair`: where a source asks for it, each document gives way to what is made of it.                     tasks/repairs.py
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import re
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.deduplicate import DOCUMENTS, HASHES, KEYS, SIGNATURES, band_keys, signatures, text_hash
from etude.data.document import Document, Drop, Part, Raw, Samples, in_groups
from etude.data.filters.content import PROSE, decode, generated, is_code, language, quality
from etude.data.filters.licence import Licences, refusal
from etude.data.filters.private import scrub
from etude.data.manifest import SourceEntry
from etude.files import publish_folder, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from etude.data.filters.contamination import TaskIndex
    from etude.data.settings import DataSettings, SourceSettings

    class Maker(Protocol):
        """Makes documents of documents, those of one unit in their order. A copy of it works on each unit."""

        def make(self, document: Document, made: Counter[str]) -> list[Document] | str:
            """Return what is made of one document, or why nothing is; count what was made, and what could not be."""
            ...


UNIT_BYTES = 64_000_000
BATCH_BYTES = 48_000_000  # of text held in memory at once: the secret detector takes a second to start for each batch
SMALLEST = 480  # bytes a document counts as at least, which has a price of its own: no more than 100,000 at once
DIFF_SIGNS = re.compile(r"^[+-]", re.MULTILINE)
RESULT = "result.json"
EXCERPT = 400  # characters of a dropped document that are shown
SCHEMA = pa.schema([*((name, pa.string()) for name in Document.__slots__), ("bytes", pa.int64())])


@dataclass(frozen=True)
class UnitJob:
    """A unit of a source, to be filtered."""

    source: SourceSettings
    data: DataSettings
    parts: list[Part]
    tasks: TaskIndex
    folder: Path  # where its result goes
    maker: Maker | None = None  # of what is made from its documents, if they are not what is wanted

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
        """The result of a finished unit: counts, digest, samples of drops, contaminated documents."""
        return dict(read_json(self.folder / RESULT))


def units_of(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group neighbouring parts into units of about equal size. The grouping depends on the parts alone."""
    return in_groups(parts, lambda part: part.size, UNIT_BYTES)


def filter_unit(job: UnitJob) -> dict[str, Any]:
    """Do one unit; return some of its counts and the seconds of each step. All counts lie in its folder."""
    return _Filtering(job).run()


class _Filtering:
    """One unit at work."""

    def __init__(self, job: UnitJob) -> None:
        self.job = job
        self.entry = SourceEntry(name=job.source.name, domain=job.source.domain)
        self.samples, self.digest = Samples(job.data.samples), hashlib.sha256()
        self.hits: list[dict[str, Any]] = []  # documents that share code with benchmark tasks
        self.seconds: dict[str, float] = defaultdict(float)  # by step
        self.clock = time.perf_counter()
        self.maker = copy.deepcopy(job.maker)

    def run(self) -> dict[str, Any]:
        """Write the unit's folder, whole or not at all."""
        final, entry = self.job.folder, self.entry
        work = final.with_name(f"{final.name}.work")
        for folder in (work, final):
            shutil.rmtree(folder, ignore_errors=True)
        work.mkdir(parents=True)
        with pq.ParquetWriter(work / DOCUMENTS, SCHEMA, compression="zstd", compression_level=1) as writer:
            passed = chain.from_iterable(map(self._passed, self.job.parts))
            batches = in_groups(passed, lambda document: max(len(document.text), SMALLEST), BATCH_BYTES)
            for batch in chain(batches, [[]]):  # at least one, so that all files are there
                self._finish(batch, work, writer)
        assert entry.documents_in == entry.kept + entry.drops.total(), f"a document disappeared: {entry}"
        result = {"digest": self.digest.hexdigest(), "samples": self.samples.all(), "hits": self.hits}
        write_json(work / RESULT, {"counts": entry.counts(), **result})
        publish_folder(work, final)
        seconds = {step: round(spent, 4) for step, spent in self.seconds.items()}
        return {"documents": entry.documents_in, "kept": entry.kept, "bytes": entry.bytes_in, "seconds": seconds}

    def _timed(self, step: str) -> None:
        """Count the time since the last call to a step."""
        before, self.clock = self.clock, time.perf_counter()
        self.seconds[step] += self.clock - before

    def _drop(self, drop: Drop) -> None:
        self.entry.drop(drop)
        self.samples.offer(asdict(drop))

    def _passed(self, part: Part) -> Iterator[Document]:
        source = self.job.source
        licences = Licences(part.licences(), source.licence)
        self._timed("licence")

        def licence(document: Document) -> str | None:
            document.licence, document.evidence = licences.of(document)
            return refusal(document.licence, source.licences, source.unknown)

        steps: dict[str, Callable[[Document], str | None]] = {
            "language": language,
            "selection": partial(unselected, source=source),
            "generated": generated,
            "quality": partial(quality, limits=self.job.data.filters),
            "licence": licence,
        }
        for raw in part.read():
            self._timed("read")
            size, outcome = (raw.size, raw) if isinstance(raw, Drop) else self._judged(raw, steps)
            self.entry.documents_in += 1
            self.entry.bytes_in += size
            if isinstance(outcome, Drop):
                self._drop(outcome)
            else:
                yield outcome

    def _judged(self, raw: Raw, steps: dict[str, Callable[[Document], str | None]]) -> tuple[int, Document | Drop]:
        """Return how many bytes a document had; and the document, filled in, or why it is dropped."""
        size, name = len(raw.content), f"{raw.repository}\0{raw.path}\0".encode(errors="surrogateescape")
        self.digest.update(name + hashlib.sha256(raw.content).digest())
        document = decode(raw)
        self._timed("decode")
        if isinstance(document, str):
            return size, Drop(raw.repository, raw.path, "decode", document, size)
        for step, reason_of in steps.items():
            reason = reason_of(document)
            self._timed(step)
            if reason:
                return size, Drop(raw.repository, raw.path, step, reason, size, document.text[:EXCERPT])
        return size, document

    def _finish(self, batch: list[Document], work: Path, writer: pq.ParquetWriter) -> None:
        """Scrub a batch, keep benchmark tasks out of it, sign it and write it."""
        settings = self.job.data
        if settings.filters.scrub and batch:
            self.entry.scrubbed.update(scrub(batch, work))
        self._timed("private")
        kept = [document for document in batch if not self._contaminated(document)]
        self._timed("contamination")
        if self.maker is None:
            self._write(kept, work, writer)
            return
        made = chain.from_iterable(map(self._made, kept))
        for some in chain(in_groups(made, lambda each: max(len(each.text), SMALLEST), BATCH_BYTES), [[]]):
            self._timed("make")
            self._write(some, work, writer)

    def _made(self, document: Document) -> list[Document]:
        """Return what is made of a document, which comes in in its place."""
        assert self.maker is not None
        made, size = self.maker.make(document, self.entry.made), len(document.text.encode())
        if isinstance(made, str):
            self._drop(Drop(document.repository, document.path, "repair", made, size, document.text[:EXCERPT]))
            return []
        self.entry.made_of += 1
        more = sum(len(each.text.encode()) for each in made) - size
        self.entry.add({"documents_in": len(made) - 1, "bytes_in": more})
        return made

    def _write(self, kept: list[Document], work: Path, writer: pq.ParquetWriter) -> None:
        """Sign documents and write them."""
        settings, texts = self.job.data, [document.identity or document.text for document in kept]
        _append(work / HASHES, np.array([text_hash(text) for text in texts], np.uint64))
        self._timed("hashes")
        if settings.duplicates.near:
            matrix = signatures(texts, settings.duplicates)
            _append(work / SIGNATURES, matrix)
            _append(work / KEYS, band_keys(matrix, settings.duplicates))
        self._timed("signatures")
        sizes = [len(document.text.encode()) for document in kept]
        self.entry.add({"kept": len(kept), "kept_bytes": sum(sizes)})
        columns = {name: [getattr(document, name) for document in kept] for name in Document.__slots__}
        writer.write_table(pa.table({**columns, "bytes": sizes}, schema=SCHEMA))
        self._timed("write")

    def _contaminated(self, document: Document) -> bool:
        # In a diff the lines of a task have signs before them, which would break its runs.
        hit = self.job.tasks.hit(DIFF_SIGNS.sub("", document.text) if document.kind == "commit" else document.text)
        if hit is None:
            return False
        self.hits.append({"repository": document.repository, "path": document.path, **hit._asdict()})
        why, size = "shares code with benchmark tasks", len(document.text.encode())
        self._drop(Drop(document.repository, document.path, "contamination", why, size, hit.words[0]))
        return True


def unselected(document: Document, source: SourceSettings) -> str | None:
    """Return why a source does not ask for this file, if so."""
    if document.kind != "file":
        return None
    if source.include and not any(fnmatch.fnmatch(document.path, pattern) for pattern in source.include):
        return "not included"
    if any(fnmatch.fnmatch(document.path, pattern) for pattern in source.exclude):
        return "excluded"
    wanted = {"all": True, "code": is_code(document.language), "prose": document.language in PROSE}
    return None if wanted[source.keep] else f"not {source.keep}"


def _append(file: Path, values: Any) -> None:
    with file.open("ab") as opened:
        opened.write(values.tobytes())
