"""Build a corpus: from sources to packed tokens and a manifest that accounts for every document.

    1. filter   each source is read, judged and cleaned, unit by unit        units.py, filters/      in parallel
    2. compare  duplicates across sources, repositories to hold out          compare.py
    3. shape    what stays becomes tokens, unit by unit                      shape.py, shaping/      in parallel
    4. pack     documents into rows, rows into shards                        pack_source.py
    5. account  the manifest, the samples, the list of contaminated files

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
from etude.data import loader, tokeniser
from etude.data.deduplicate import drop_duplicates, hold_out
from etude.data.document import Document, Samples
from etude.data.filters.contamination import index_tasks, read_tasks
from etude.data.filters.duplicates import ngram_runs
from etude.data.filters.private import scrub
from etude.data.judge import UnitJob, filter_unit, share_out
from etude.data.manifest import MANIFEST, Manifest, SourceEntry, load_manifest, tools
from etude.data.packing import pack_source, write_table
from etude.data.settings import SELF
from etude.data.shape import SHAPED, ShapeJob, is_heldout, read_kept, shape_unit
from etude.data.shards import dtype_for
from etude.data.sources import open_source
from etude.data.tokeniser import Encoder
from etude.errors import UserError
from etude.files import canonical_json, read_json, sha256_file, write_json, write_text
from etude.parallel import cores
from etude.work import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from etude.data.deduplicate import DroppedBySource, Repositories
    from etude.data.manifest import ShardEntry
    from etude.data.settings import DataSettings, SourceSettings
    from etude.data.sources import OpenSource
    from etude.work import Work

UNITS, SHARDS, TOKENISER, TABLES = "units", "shards", "tokeniser", "documents"
SAMPLES, HITS = "samples.json", "contamination.jsonl"
DAMAGE = ("damaged", "broken", "unpacks to too much")
NAMED = 5  # repositories named in a line
REASONS = 3  # given when nothing is left of a source
NO_TEXT = ("read: ", "decode: ")  # steps whose drops have no tokens
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class Build:
    """One corpus being built in a stage's folder."""

    data: DataSettings
    work: Work
    seed: int
    base: Path | None  # the model whose tokeniser is used, and who writes replay
    entries: list[SourceEntry] = field(default_factory=list)
    shards: list[ShardEntry] = field(default_factory=list)
    histogram: dict[str, Counter[int]] = field(default_factory=dict)  # documents by domain and log₂ of their tokens

    def run(self) -> Manifest:
        """Build the corpus, or finish building it."""
        folder = self.work.folder
        if not (folder / MANIFEST).exists():
            self._build()
        shutil.rmtree(folder / UNITS, ignore_errors=True)
        return load_manifest(folder)

    def _build(self) -> None:
        if self.data.tokeniser.source != "train":
            self._take_tokeniser()
            self._encoder()  # refuses what does not fit before hours of reading
        if self.data.replay and self.data.replay.source == SELF:
            from etude.data.replay import check_length

            assert self.base is not None
            check_length(self.base, self.data.replay.length)
        most, cache, reporter = self.data.filters.max_bytes, self.work.cache, self.work.reporter
        opened = {source.name: open_source(source, most, cache, reporter) for source in self.data.source}
        with self.work.timed("filter"):
            units = self._filter(opened)
        samples = Samples(self.data.samples)
        with self.work.timed("compare"):
            dropped = drop_duplicates(units, self.data, self.work.folder / UNITS, samples)
        for source in self.data.source:
            refuse_empty(source.name, _of(source, units), dropped)
        repositories = hold_out(units, self.data, self.seed)
        if self.data.tokeniser.source == "train":
            self._train_tokeniser(units, repositories)
        encoder, separator = self._encoder()
        with self.work.timed("shape"):
            self._shape(units, repositories, separator)
        with self.work.timed("pack"):
            self._pack(units, opened, dropped, repositories, encoder.vocabulary, separator)
        self._account(units, samples, encoder.vocabulary, separator)

    def _take_tokeniser(self) -> None:
        named = self.data.tokeniser.source
        folder = self.base if named == "base" else Path(named).expanduser()
        assert folder is not None, "the stage has checked that there is a base"
        tokeniser.take_over(folder, self.work.folder / TOKENISER)

    def _train_tokeniser(self, units: Sequence[UnitJob], repositories: Repositories) -> None:
        target = self.work.folder / TOKENISER
        if not (target / "tokenizer.json").exists():
            self.work.reporter.say("data: training a tokeniser")
            tokeniser.train(self._texts(units, repositories), self.data.tokeniser.vocabulary, target)

    def _texts(self, units: Sequence[UnitJob], repositories: Repositories) -> Iterator[str]:
        """Yield documents from the whole corpus, evenly, of about `sample_bytes` together; none that is held out."""
        total = sum(unit.result["tally"]["kept_bytes"] for unit in units)
        every = max(1, round(total / self.data.tokeniser.sample_bytes))
        number = 0
        for unit in units:
            held = self._held(unit, repositories)
            for document in chain.from_iterable(read_kept(unit.folder)):
                number += 1
                if number % every == 0 and not is_heldout(document.repository, held, self.seed):
                    yield document.text

    def _held(self, unit: UnitJob, repositories: Repositories) -> frozenset[str] | float:
        """Return what decides which documents of a unit are held out."""
        if not unit.loose:
            return repositories.heldout
        return 1.0 if unit.source.hold_out == "all" else self.data.heldout * bool(unit.source.hold_out)

    def _encoder(self) -> tuple[Encoder, int]:
        encoder = Encoder(self.work.folder / TOKENISER / "tokenizer.json")
        check_fim(encoder, self.data)
        return encoder, find_separator(encoder, self.data.separator)

    def _filter(self, opened: dict[str, OpenSource]) -> list[UnitJob]:
        say, settings = self.work.reporter.say, self.data.contamination
        tasks = read_tasks([Path(name).expanduser() for name in settings.tasks])
        index = index_tasks(tasks, settings.ngram, settings.hits)
        tokens = [len(ngram_runs(text.encode(errors="replace"), 1, signs=True).hashes) for _, text in tasks]
        if short := sum(count < settings.ngram for count in tokens):
            say(f"data: {short} of {len(tasks)} texts of benchmark tasks are too short to be looked for")
        jobs: list[UnitJob] = []
        for source in self.data.source:
            for parts in share_out(opened[source.name].parts):
                jobs.append(UnitJob(source, self.data, parts, index, self.work.folder / UNITS / f"{len(jobs):05d}"))
        units = [Unit(f"filter/{job.folder.name}", job, max(job.size, 1)) for job in jobs]
        self.work.parallel("data: filtering", units, "B", filter_unit, self.data.workers or cores())
        for job in jobs:
            for reason, count in job.result["tally"]["drops"].items():
                if any(word in reason for word in DAMAGE):
                    say(f"data: source {job.source.name!r}: {count} × {reason}; what else was there is lost")
        return jobs

    def _shape(self, units: Sequence[UnitJob], repositories: Repositories, separator: int) -> None:
        file = self.work.folder / TOKENISER / "tokenizer.json"
        jobs = []
        for unit in units:
            job = ShapeJob(unit.folder, self.data, file, separator, self._held(unit, repositories), self.seed)
            jobs.append(Unit(f"shape/{unit.folder.name}", job, max(unit.size, 1)))
        self.work.parallel("data: tokenising", jobs, "B", shape_unit, self.data.workers or cores())

    def _pack(
        self, units: Sequence[UnitJob], opened: Mapping[str, OpenSource], dropped: DroppedBySource,
        repositories: Repositories, vocabulary: int, separator: int,
    ) -> None:  # fmt: skip
        with self.work.reporter.task("data: packing", len(self.data.source), "sources") as task:
            for source in self.data.source:
                name, mine = source.name, _of(source, units)
                self.entries.append(source_entry(source, opened[name], mine, dropped, repositories))
                self._write_source(name, source.domain, [unit.folder for unit in mine], vocabulary)
                task.advance()
        if self.data.replay and self.data.replay.source == SELF:
            from etude.data.replay import sample_base

            assert self.base is not None
            folder = self.work.folder / UNITS / SELF
            entry = sample_base(self.base, self.data, separator, vocabulary, folder, self.work, self.seed)
            self.entries.append(entry)
            self._write_source(SELF, entry.domain, [folder], vocabulary)
        for entry in self.entries:
            packed = sum(shard.tokens for shard in self.shards if shard.source == entry.name)
            assert packed == sum(entry.tokens.values()), f"{entry.name}: {packed} tokens packed of {entry.tokens}"
        self._say_held_out()

    def _write_source(self, name: str, domain: str, folders: Sequence[Path], vocabulary: int) -> None:
        made, lengths = pack_source(name, domain, folders, self.data.length, vocabulary, self.work.folder / SHARDS)
        self.shards.extend(made)
        self.histogram.setdefault(domain, Counter()).update(lengths)
        write_table(folders, self.work.folder / TABLES / f"{name}.parquet")

    def _say_held_out(self) -> None:
        """Say where whole repositories could not give the share that was asked for."""
        say, wanted = self.work.reporter.say, self.data.heldout
        whole = {source.name for source in self.data.source if source.hold_out == "all"}
        for domain in dict.fromkeys(entry.domain for entry in self.entries):
            mine = [entry for entry in self.entries if entry.domain == domain]
            held, total = (sum(e.tokens["heldout"] for e in mine), sum(sum(e.tokens.values()) for e in mine))
            if wanted and not held:
                why = f"no repository is as small as {wanted:.0%} of it"
                say(f"data: nothing of {domain!r} is held out: {why}; raise data.heldout")
            elif held:
                names = list(dict.fromkeys(name for entry in mine for name in entry.heldout_repositories))
                listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
                say(f"data: {held / total:.1%} of {domain!r} is held out: {listed or 'single rows'}")
        for entry in self.entries:
            if not entry.tokens["train"] and entry.name not in whole:
                say(f"data: the source {entry.name!r} is held out whole; nothing of it will be trained on")

    def _account(self, units: Sequence[UnitJob], samples: Samples, vocabulary: int, separator: int) -> None:
        folder = self.work.folder
        for unit in units:
            samples.offer_all(unit.result["samples"])
        hits = [hit for unit in units for hit in unit.result["hits"]]
        write_json(folder / SAMPLES, self._scrubbed(samples.all()))
        write_text(folder / HITS, "".join(canonical_json(hit) + "\n" for hit in hits))
        longest = {domain: max(counts, default=-1) for domain, counts in self.histogram.items()}
        Manifest(
            etude=etude.__version__,
            seed=self.seed,
            length=self.data.length,
            dtype=dtype_for(vocabulary),
            separator=separator,
            vocabulary=vocabulary,
            tokeniser=sha256_file(folder / TOKENISER / "tokenizer.json"),
            exact_fast_tokeniser=all(read_json(unit.folder / SHAPED)["exact_fast_tokeniser"] for unit in units),
            shares=self._shares(),
            histogram={name: [self.histogram[name][bit] for bit in range(last + 1)] for name, last in longest.items()},
            contamination=len(hits) if self.data.contamination.tasks else None,
            sources=self.entries,
            shards=self.shards,
            tools=tools(),
            settings=self.data.model_dump(mode="json", exclude={"workers"}),
        ).save(folder)

    def _scrubbed(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return samples of dropped documents without their secrets: most left before the step that replaces those."""
        shown = [Document(sample["repository"], sample["path"], sample["excerpt"]) for sample in samples]
        if self.data.filters.scrub and shown:
            scrub(shown, self.work.folder / UNITS)
        return [sample | {"excerpt": document.text} for sample, document in zip(samples, shown, strict=True)]

    def _shares(self) -> dict[str, float]:
        tokens = {entry.name: entry.tokens["train"] for entry in self.entries}
        domains = {entry.name: entry.domain for entry in self.entries}
        weights = {source.name: source.weight for source in self.data.source}
        replay = (self.data.replay.source, self.data.replay.share) if self.data.replay else None
        return loader.shares(tokens, domains, weights, self.data.shares, replay)


def find_separator(encoder: Encoder, wanted: str | None) -> int:
    """Return the id of the token after each document."""
    for name in (wanted,) if wanted is not None else SEPARATORS:
        found = encoder.token(name)
        if found is not None:
            return found
    if wanted is not None:
        raise UserError(f"data.separator {wanted!r} is not a token of the tokeniser")
    raise UserError("the tokeniser has no usual end token; name the one to put after each document in data.separator")


def check_fim(encoder: Encoder, data: DataSettings) -> None:
    """Refuse fill-in-the-middle for a tokeniser without the tokens for it."""
    lacking = [name for name in data.fim.tokens if encoder.token(name) is None]
    if data.fim.rate and lacking:
        advice = "name its own in data.fim.tokens, or set data.fim.rate = 0"
        raise UserError(f"data.fim: the tokeniser has no token {lacking[0]!r}; {advice}")


def _of(source: SourceSettings, units: Sequence[UnitJob]) -> list[UnitJob]:
    return [unit for unit in units if unit.source is source]


def _added(counts: Sequence[Mapping[str, Any]], key: str) -> Counter[str]:
    return sum((Counter(each[key]) for each in counts), Counter())


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts, the largest first; equal ones by name, so that the order is fixed."""
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def refuse_empty(name: str, units: Sequence[UnitJob], duplicates: DroppedBySource) -> None:
    """Say why nothing is left of a source, if so."""
    tallies = [unit.result["tally"] for unit in units]
    drops = _added(tallies, "drops") + duplicates[name]["documents"]
    total = sum(tally["documents_in"] for tally in tallies)
    if drops.total() < total:
        return
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in list(_sorted(drops).items())[:REASONS])
    unlicensed = reasons.partition(" ")[2].startswith("licence: licence unknown")
    advice = 'set its `licence`, if you know it, or `unknown = "keep"`' if unlicensed else "change its settings"
    raise UserError(
        f"source {name!r}: not one of its {total:,} documents is left ({reasons or 'there were none'}); "
        f"{advice}, or take it out of the recipe"
    )


def source_entry(
    source: SourceSettings, opened: OpenSource, units: Sequence[UnitJob], dropped: DroppedBySource, found: Repositories
) -> SourceEntry:
    """Return the entry of a source in the manifest: the counts of its units, added up."""
    duplicates = dropped[source.name]
    shaped = [read_json(unit.folder / SHAPED) for unit in units]
    tallies = [unit.result["tally"] for unit in units]
    numbers = {key: sum(tally[key] for tally in tallies) for key in ("documents_in", "bytes_in", "kept", "kept_bytes")}
    numbers["kept"] -= duplicates["documents"].total()
    numbers["kept_bytes"] -= duplicates["bytes"].total()
    tokens = _added(shaped, "totals")
    lost = _added(tallies, "dropped_bytes")
    readable = numbers["bytes_in"] - sum(size for reason, size in lost.items() if reason.startswith(NO_TEXT))
    written = tokens["train"] + tokens["heldout"]
    return SourceEntry(
        name=source.name,
        domain=source.domain,
        location=opened.location,
        revision=opened.revision,
        digest=hashlib.sha256("".join(unit.result["digest"] for unit in units).encode()).hexdigest(),
        **numbers,
        drops=_sorted(_added(tallies, "drops") + duplicates["documents"]),
        dropped_bytes=_sorted(lost + duplicates["bytes"]),
        scrubbed=_sorted(_added([unit.result for unit in units], "scrubbed")),
        repositories=found.counts[source.name],
        heldout_repositories=found.heldout_in[source.name],
        **{key: _sorted(_added(shaped, key)) for key in ("licences", "languages", "evidence")},
        tokens={split: tokens[split] for split in ("train", "heldout")},
        text_bytes={split: tokens[f"{split}_bytes"] for split in ("train", "heldout")},
        tokens_in=round(readable * written / numbers["kept_bytes"]) if numbers["kept_bytes"] else 0,
        fim=tokens["fim"],
    )
