"""Build a corpus: from sources to packed tokens and a manifest that accounts for every document.

    1. read and filter  each source is opened, its documents are judged and cleaned, unit by unit, in parallel
                                                                       sources/, filter_documents.py, filters/
    2. compare          duplicates across sources, repositories to hold out         deduplicate.py, heldout.py
    3. tokenise         what stays becomes tokens, unit by unit, in parallel                       tokenise.py
    4. pack             documents into rows, rows into shards, which `loader.py` mixes into batches packing.py
    5. account          the manifest, the samples, the list of contaminated files                  manifest.py

A unit of 1 or 3 that is done survives a kill; the other steps take seconds and are done again. The result depends neither on
the number of workers nor on interruptions.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import etude
from etude.data import loader
from etude.data.deduplicate import drop_duplicates
from etude.data.document import Document, Samples
from etude.data.filter_documents import UnitJob, filter_unit, units_of
from etude.data.filters.contamination import index_tasks, ngram_runs, read_tasks
from etude.data.filters.private import scrub
from etude.data.heldout import hold_out, is_heldout
from etude.data.manifest import MANIFEST, TOOLS, Manifest, ShardEntry, SourceEntry, load_manifest
from etude.data.packing import dtype_for, pack_source, write_table
from etude.data.settings import SELF, DataSettings, SourceSettings
from etude.data.sources import OpenSource, open_source
from etude.data.tokenise import Encoder, TokeniseJob, copy_tokeniser, read_kept, tokenise_unit, train_tokeniser
from etude.errors import UserError
from etude.files import canonical_json, sha256_file, write_json, write_text
from etude.lineage.environment import version_of
from etude.work import Unit, Work, cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from etude.data.filter_documents import Maker

UNITS, SHARDS, TOKENISER, TABLES = "units", "shards", "tokeniser", "documents"
SAMPLES, HITS = "samples.json", "contamination.jsonl"
DAMAGE = ("damaged", "broken", "unpacks to too much")
NAMED = 5  # repositories named in a line
REASONS = 3  # given when nothing is left of a source
NO_TEXT = ("read: ", "decode: ")  # steps whose drops have no tokens


@dataclass(frozen=True)
class Build:
    """One corpus being built in a stage's folder."""

    data: DataSettings
    work: Work
    seed: int
    base: Path | None  # the model whose tokeniser is used, and who writes replay
    maker: Callable[[SourceSettings], Maker] | None = None  # of repairs, for sources that ask for them
    entries: dict[str, SourceEntry] = field(default_factory=dict)  # by source
    shards: list[ShardEntry] = field(default_factory=list)
    histogram: dict[str, Counter[int]] = field(default_factory=dict)  # documents by domain and log₂ of their tokens

    def run(self) -> Manifest:
        """Build the corpus, or finish building it."""
        folder = self.work.folder
        if not (folder / MANIFEST).exists():
            self._build()
        shutil.rmtree(folder / UNITS, ignore_errors=True)
        return load_manifest(folder)

    @property
    def _replays_itself(self) -> bool:
        return self.data.replay is not None and self.data.replay.source == SELF

    def _build(self) -> None:
        if self.data.tokeniser.source != "train":
            self._encoder()  # refuses what does not fit before hours of reading
        if self._replays_itself:
            from etude.data.replay import check_length

            check_length(self.base, self.data.replay)
        reporter = self.work.reporter
        units, samples = self.compared()
        heldout = hold_out(units, self.data, self.entries, self.seed)
        if self.data.tokeniser.source == "train" and not self._tokeniser.exists():
            reporter.say("data: training a tokeniser")
            train_tokeniser(self._texts(units, heldout), self.data.tokeniser.vocabulary, self._tokeniser.parent)
        encoder, separator = self._encoder()
        with self.work.timed("shape"):
            exact = self._tokenise(units, heldout, separator)
        with self.work.timed("pack"):
            self._pack(units, encoder.vocabulary, separator)
        self._say_held_out()
        self._account(units, samples, encoder.vocabulary, separator, exact=exact)

    def compared(self) -> tuple[list[UnitJob], Samples]:
        """Read and filter the sources, and drop duplicates: the documents that stay, unit by unit, and samples of the others."""
        most, cache, reporter = self.data.filters.max_bytes, self.work.cache, self.work.reporter
        sources = {source.name: open_source(source, most, cache, reporter) for source in self.data.source}
        with self.work.timed("filter"):
            units = self._filter(sources)
        samples = Samples(self.data.samples)
        with self.work.timed("compare"):
            drop_duplicates(units, self.data, self.entries, self.work.folder / UNITS, samples)
        for entry in self.entries.values():
            refuse_empty(entry)
        return units, samples

    @property
    def _tokeniser(self) -> Path:
        return self.work.folder / TOKENISER / "tokenizer.json"

    def _encoder(self) -> tuple[Encoder, int]:
        """Return the encoder and the separator; the tokeniser is copied if it is not trained here."""
        named = self.data.tokeniser.source
        if named != "train":
            folder = self.base if named == "base" else Path(named).expanduser()
            assert folder is not None, "the stage has checked that there is a base"
            copy_tokeniser(folder, self._tokeniser.parent)
        encoder = Encoder(self._tokeniser)
        if self.data.fim.rate:
            encoder.fim_tokens(self.data.fim.tokens)
        return encoder, encoder.separator(self.data.separator)

    def _texts(self, units: Sequence[UnitJob], heldout: frozenset[str]) -> Iterator[str]:
        """Yield documents from the whole corpus, evenly, of about `sample_bytes` together; none that is held out."""
        total = sum(unit.result["counts"]["kept_bytes"] for unit in units)
        every = max(1, round(total / self.data.tokeniser.sample_bytes))
        number = 0
        for unit in units:
            held = self._held(unit, heldout)
            for document in chain.from_iterable(read_kept(unit.folder)):
                number += 1
                if number % every == 0 and not is_heldout(document.repository, held, self.seed):
                    yield document.text

    def _held(self, unit: UnitJob, heldout: frozenset[str]) -> frozenset[str] | float:
        """Return what decides which documents of a unit are held out: repositories, or for loose rows a share."""
        if not unit.loose:
            return heldout
        return 1.0 if unit.source.hold_out == "all" else self.data.heldout * bool(unit.source.hold_out)

    def _filter(self, sources: Mapping[str, OpenSource]) -> list[UnitJob]:
        say, settings = self.work.reporter.say, self.data.contamination
        tasks = read_tasks([Path(name).expanduser() for name in settings.tasks])
        index = index_tasks(tasks, settings.ngram, settings.hits)
        tokens = [len(ngram_runs(text.encode(errors="replace"), 1, signs=True).hashes) for _, text in tasks]
        if short := sum(count < settings.ngram for count in tokens):
            say(f"data: {short} of {len(tasks)} texts of benchmark tasks are too short to be looked for")
        jobs: list[UnitJob] = []
        for source in self.data.source:
            for parts in units_of(sources[source.name].parts):
                maker = self.maker(source) if self.maker and source.kind == "repair" else None
                folder = self.work.folder / UNITS / f"{len(jobs):05d}"
                jobs.append(UnitJob(source, self.data, parts, index, folder, maker))
        units = [Unit(f"filter/{job.folder.name}", job, max(job.size, 1)) for job in jobs]
        self.work.parallel("data: filtering", units, "B", filter_unit, self.data.workers or cores())
        for source in self.data.source:
            where, mine = sources[source.name], [job.result for job in jobs if job.source is source]
            digest = hashlib.sha256("".join(result["digest"] for result in mine).encode()).hexdigest()
            entry = SourceEntry(name=source.name, domain=source.domain, digest=digest,
                                location=where.location, revision=where.revision)  # fmt: skip
            for result in mine:
                entry.add(result["counts"])
            for reason, count in entry.drops.items():
                if any(word in reason for word in DAMAGE):
                    say(f"data: source {source.name!r}: {count} × {reason}; what else was there is lost")
            self.entries[source.name] = entry
        return jobs

    def _tokenise(self, units: Sequence[UnitJob], heldout: frozenset[str], separator: int) -> bool:
        """Tokenise what stays; return whether the fast tokeniser was right everywhere."""
        work = []
        for unit in units:
            held = self._held(unit, heldout)
            job = TokeniseJob(unit.folder, self.data, self._tokeniser, separator, held, self.seed)
            work.append(Unit(f"shape/{unit.folder.name}", job, max(unit.size, 1)))
        self.work.parallel("data: tokenising", work, "B", tokenise_unit, self.data.workers or cores())
        rows = [self.work.metrics.get(each.key) or {} for each in work]
        for unit, row in zip(units, rows, strict=True):
            self.entries[unit.source.name].add(row["counts"])
        for entry in self.entries.values():
            unread = sum(size for reason, size in entry.dropped_bytes.items() if reason.startswith(NO_TEXT))
            entry.tokens_in = round((entry.bytes_in - unread) * entry.tokens.total() / max(entry.kept_bytes, 1))
        return all(row["exact_fast_tokeniser"] for row in rows)

    def _pack(self, units: Sequence[UnitJob], vocabulary: int, separator: int) -> None:
        folders = {source.name: [unit.folder for unit in units if unit.source is source] for source in self.data.source}
        if self._replays_itself:
            from etude.data.replay import sample_base

            folder = self.work.folder / UNITS / SELF
            entry = sample_base(self.base, self.data, separator, vocabulary, folder, self.work, self.seed)
            self.entries[SELF], folders[SELF] = entry, [folder]
        with self.work.reporter.task("data: packing", len(folders), "sources") as task:
            for name, mine in folders.items():
                domain, target = self.entries[name].domain, self.work.folder / SHARDS
                shards, lengths = pack_source(name, domain, mine, self.data.length, vocabulary, target)
                self.shards.extend(shards)
                self.histogram.setdefault(domain, Counter()).update(lengths)
                write_table(mine, self.work.folder / TABLES / f"{name}.parquet")
                task.advance()

    def _say_held_out(self) -> None:
        """Say what is held out, and where whole repositories could not give the share that was asked for."""
        say, entries = self.work.reporter.say, self.entries.values()
        for domain in dict.fromkeys(entry.domain for entry in entries):
            mine = [entry for entry in entries if entry.domain == domain]
            held, total = sum(entry.tokens["heldout"] for entry in mine), sum(entry.tokens.total() for entry in mine)
            names = list(dict.fromkeys(name for entry in mine for name in entry.heldout_repositories))
            listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            if held:
                say(f"data: {held / total:.1%} of {domain!r} is held out: {listed or 'single rows'}")
            elif self.data.heldout and sum(entry.repositories for entry in mine) == 1:
                advice = 'add another, with hold_out = "all", to measure on'
                say(f"data: nothing of {domain!r} is held out: it is a single repository, never split; {advice}")
            elif self.data.heldout:
                why = f"no repository is as small as {self.data.heldout:.0%} of it"
                say(f"data: nothing of {domain!r} is held out: {why}; raise data.heldout")
        whole = {source.name for source in self.data.source if source.hold_out == "all"}
        for entry in entries:
            if not entry.tokens["train"] and entry.name not in whole:
                say(f"data: the source {entry.name!r} is held out whole; nothing of it will be trained on")

    def _account(
        self, units: Sequence[UnitJob], samples: Samples, vocabulary: int, separator: int, *, exact: bool
    ) -> None:
        folder, results = self.work.folder, [unit.result for unit in units]
        for sample in chain.from_iterable(result["samples"] for result in results):
            samples.offer(sample)
        hits = [hit for result in results for hit in result["hits"]]
        write_json(folder / SAMPLES, self._scrubbed(samples.all()))
        write_text(folder / HITS, "".join(canonical_json(hit) + "\n" for hit in hits))
        longest = {domain: max(counts, default=-1) for domain, counts in self.histogram.items()}
        counts = {name: [self.histogram[name][bit] for bit in range(last + 1)] for name, last in longest.items()}
        Manifest(
            etude=etude.__version__, seed=self.seed, length=self.data.length, dtype=dtype_for(vocabulary), separator=separator,
            vocabulary=vocabulary, tokeniser=sha256_file(self._tokeniser), exact_fast_tokeniser=exact, shares=self._shares(),
            histogram=counts, contamination=len(hits) if self.data.contamination.tasks else None,
            sources=list(self.entries.values()), shards=self.shards, tools={name: version_of(name) for name in TOOLS},
            settings=self.data.model_dump(mode="json", exclude={"workers"}),
        ).save(folder)  # fmt: skip

    def _scrubbed(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return samples of dropped documents without their secrets: most left before the step that replaces those."""
        shown = [Document(sample["repository"], sample["path"], sample["excerpt"]) for sample in samples]
        if self.data.filters.scrub and shown:
            scrub(shown, self.work.folder / UNITS)
        return [sample | {"excerpt": document.text} for sample, document in zip(samples, shown, strict=True)]

    def _shares(self) -> dict[str, float]:
        tokens = {name: entry.tokens["train"] for name, entry in self.entries.items()}
        domains = {name: entry.domain for name, entry in self.entries.items()}
        weights = {source.name: source.weight for source in self.data.source}
        replay = (self.data.replay.source, self.data.replay.share) if self.data.replay else None
        return loader.shares(tokens, domains, weights, self.data.shares, replay)


def refuse_empty(entry: SourceEntry) -> None:
    """Say why nothing is left of a source, if so."""
    if entry.kept:
        return
    counts = sorted(entry.drops.items(), key=lambda drop: (-drop[1], drop[0]))[:REASONS]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts) or "there were none"
    unlicensed = counts and counts[0][0].startswith("licence: licence unknown")
    advice = 'set its `licence`, if you know it, or `unknown = "keep"`' if unlicensed else "change its settings"
    gone = f"not one of its {entry.documents_in:,} documents is left ({reasons})"
    raise UserError(f"source {entry.name!r}: {gone}; {advice}, or take it out of the recipe")
