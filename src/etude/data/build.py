"""Build a corpus: from sources to packed tokens and a manifest that accounts for every document.

    1. filter   each source is read, judged and cleaned, unit by unit        units.py, filters/      in parallel
    2. compare  duplicates across sources, repositories to hold out          compare.py
    3. shape    what stays becomes tokens, unit by unit                      shape.py, shaping/      in parallel
    4. pack     documents into rows, rows into shards                        pack_source.py
    5. account  the manifest, the samples, the list of contaminated files    accounts.py

A unit of 1 or 3 that is done survives a kill; the other steps take seconds and are done again. The result depends neither on
the number of workers nor on interruptions.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import etude
from etude.data import mixing
from etude.data.accounts import refuse_empty, source_entry
from etude.data.compare import Repositories, drop_duplicates, hold_out, loose
from etude.data.document import Document
from etude.data.filters.contamination import index_tasks, read_tasks
from etude.data.filters.private import scrub
from etude.data.manifest import MANIFEST, Manifest, load_manifest, tools
from etude.data.ngrams import ngram_runs
from etude.data.pack_source import pack_source, write_table
from etude.data.samples import Samples
from etude.data.settings import SELF
from etude.data.shape import SHAPED, ShapeJob, is_heldout, read_kept, shape_unit
from etude.data.shaping import tokeniser
from etude.data.shaping.encoder import Encoder
from etude.data.shards import dtype_for
from etude.data.sources import open_source
from etude.data.units import RESULT, UnitJob, filter_unit, share_out
from etude.errors import UserError
from etude.files import canonical_json, read_json, sha256_file, write_json, write_text
from etude.parallel import cores
from etude.work import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.data.compare import Dropped
    from etude.data.manifest import ShardEntry, SourceEntry
    from etude.data.settings import DataSettings
    from etude.data.sources import OpenSource
    from etude.work import Work

UNITS, SHARDS, TOKENISER, TABLES = "units", "shards", "tokeniser", "documents"
SAMPLES, HITS = "samples.json", "contamination.jsonl"
DAMAGE = ("damaged", "broken", "unpacks to too much")
NAMED = 5  # repositories named in a line
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class Build:
    """One corpus being built in a stage's folder."""

    data: DataSettings
    work: Work
    seed: int
    base: Path | None  # the model whose tokeniser is used, and who writes replay

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
        reporter = self.work.reporter
        most = self.data.filters.max_bytes
        opened = {source.name: open_source(source, most, self.work.cache, reporter) for source in self.data.source}
        with self.work.timed("filter"):
            units = self._filter(opened)
        samples = Samples(self.data.samples)
        with self.work.timed("compare"):
            dropped = drop_duplicates(units, self.data, self.work.folder / UNITS, samples)
        self._refuse_empty(units, dropped)
        repositories = hold_out(units, self.data, self.seed)
        if self.data.tokeniser.source == "train":
            self._train_tokeniser(units, repositories)
        encoder, separator = self._encoder()
        with self.work.timed("shape"):
            self._shape(units, repositories, separator)
        with self.work.timed("pack"):
            entries, shards, histogram = self._pack(units, opened, dropped, repositories, encoder.vocabulary)
        self._account(units, samples, entries, shards, histogram, encoder, separator)

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
        total = sum(read_json(unit.folder / RESULT)["tally"]["kept_bytes"] for unit in units)
        every = max(1, round(total / self.data.tokeniser.sample_bytes))
        number = 0
        for unit in units:
            for document in chain.from_iterable(read_kept(unit.folder)):
                number += 1
                if number % every == 0 and not is_heldout(
                    document.repository, self._held(unit, repositories), self.seed
                ):
                    yield document.text

    def _held(self, unit: UnitJob, repositories: Repositories) -> frozenset[str] | float:
        """Return what decides which documents of a unit are held out."""
        return self.data.heldout * unit.source.hold_out if loose(unit) else repositories.heldout

    def _encoder(self) -> tuple[Encoder, int]:
        encoder = Encoder(self.work.folder / TOKENISER / "tokenizer.json")
        check_fim(encoder, self.data)
        return encoder, find_separator(encoder, self.data.separator)

    def _filter(self, opened: dict[str, OpenSource]) -> list[UnitJob]:
        tasks = read_tasks([Path(name).expanduser() for name in self.data.contamination.tasks])
        index = index_tasks(tasks, self.data.contamination.ngram, self.data.contamination.hits)
        tokens = [len(ngram_runs(text.encode(errors="replace"), 1, signs=True).hashes) for _, text in tasks]
        short = sum(count < self.data.contamination.ngram for count in tokens)
        if short:
            self.work.reporter.say(
                f"data: {short} of {len(tasks)} texts of benchmark tasks are too short to be looked for"
            )
        jobs: list[UnitJob] = []
        for source in self.data.source:
            for parts in share_out(opened[source.name].parts):
                jobs.append(UnitJob(source, self.data, parts, index, self.work.folder / UNITS / f"{len(jobs):05d}"))
        units = [Unit(f"filter/{job.folder.name}", job, max(job.size, 1)) for job in jobs]
        self.work.parallel("data: filtering", units, "B", filter_unit, self.data.workers or cores())
        for job in jobs:
            for reason, count in read_json(job.folder / RESULT)["tally"]["drops"].items():
                if any(word in reason for word in DAMAGE):
                    self.work.reporter.say(
                        f"data: source {job.source.name!r}: {count} × {reason}; what else was there is lost"
                    )
        return jobs

    def _refuse_empty(self, units: Sequence[UnitJob], dropped: Sequence[Dropped]) -> None:
        for source in self.data.source:
            tallies = [read_json(unit.folder / RESULT)["tally"] for unit in units if unit.source is source]
            again = [each for unit, each in zip(units, dropped, strict=True) if unit.source is source]
            drops: Counter[str] = Counter()
            for counts in [*(tally["drops"] for tally in tallies), *(each["documents"] for each in again)]:
                drops.update(counts)
            if drops.total() == (total := sum(tally["documents_in"] for tally in tallies)):
                refuse_empty(source.name, total, drops)

    def _shape(self, units: Sequence[UnitJob], repositories: Repositories, separator: int) -> None:
        file = self.work.folder / TOKENISER / "tokenizer.json"
        jobs = []
        for unit in units:
            job = ShapeJob(unit.folder, self.data, file, separator, self._held(unit, repositories), self.seed)
            jobs.append(Unit(f"shape/{unit.folder.name}", job, max(unit.size, 1)))
        self.work.parallel("data: tokenising", jobs, "B", shape_unit, self.data.workers or cores())

    def _pack(
        self,
        units: Sequence[UnitJob],
        opened: dict[str, OpenSource],
        dropped: Sequence[Dropped],
        repositories: Repositories,
        vocabulary: int,
    ) -> tuple[list[SourceEntry], list[ShardEntry], dict[str, Counter[int]]]:
        entries: list[SourceEntry] = []
        shards: list[ShardEntry] = []
        histogram: dict[str, Counter[int]] = {}
        with self.work.reporter.task("data: packing", len(self.data.source), "sources") as task:
            for source in self.data.source:
                mine = [index for index, unit in enumerate(units) if unit.source is source]
                folders = [units[index].folder for index in mine]
                gone = [dropped[index] for index in mine]
                count, held = repositories.counts[source.name], repositories.heldout_in[source.name]
                entries.append(source_entry(source, opened[source.name], folders, gone, count, held))
                self._write_source(source.name, source.domain, folders, vocabulary, shards, histogram)
                task.advance()
        if self.data.replay and self.data.replay.source == SELF:
            entries.append(self._replay(vocabulary, shards, histogram))
        for entry in entries:
            packed = sum(shard.tokens for shard in shards if shard.source == entry.name)
            assert packed == sum(entry.tokens.values()), f"{entry.name}: {packed} tokens packed of {entry.tokens}"
        self._say_held_out(entries)
        return entries, shards, histogram

    def _say_held_out(self, entries: Sequence[SourceEntry]) -> None:
        """Say where whole repositories could not give the share that was asked for."""
        say, wanted = self.work.reporter.say, self.data.heldout
        for domain in dict.fromkeys(entry.domain for entry in entries):
            mine = [entry for entry in entries if entry.domain == domain]
            held, total = (sum(e.tokens["heldout"] for e in mine), sum(sum(e.tokens.values()) for e in mine))
            if wanted and not held:
                say(
                    f"data: nothing of {domain!r} is held out: no repository is as small as {wanted:.0%} of it; raise data.heldout"
                )
            elif held:
                names = list(dict.fromkeys(name for entry in mine for name in entry.heldout_repositories))
                listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
                say(f"data: {held / total:.1%} of {domain!r} is held out: {listed or 'single rows'}")
        for entry in entries:
            if not entry.tokens["train"]:
                say(f"data: the source {entry.name!r} is held out whole; nothing of it will be trained on")

    def _write_source(
        self,
        name: str,
        domain: str,
        folders: Sequence[Path],
        vocabulary: int,
        shards: list[ShardEntry],
        histogram: dict[str, Counter[int]],
    ) -> None:
        made, lengths = pack_source(name, domain, folders, self.data.length, vocabulary, self.work.folder / SHARDS)
        shards += made
        histogram.setdefault(domain, Counter()).update(lengths)
        write_table(folders, self.work.folder / TABLES / f"{name}.parquet")

    def _replay(self, vocabulary: int, shards: list[ShardEntry], histogram: dict[str, Counter[int]]) -> SourceEntry:
        from etude.data.replay import sample_base

        assert self.base is not None
        assert self.data.replay is not None
        folder = self.work.folder / UNITS / SELF
        separator = self._encoder()[1]
        entry = sample_base(self.base, self.data, separator, vocabulary, folder, self.work, self.seed)
        self._write_source(SELF, entry.domain, [folder], vocabulary, shards, histogram)
        return entry

    def _account(
        self,
        units: Sequence[UnitJob],
        samples: Samples,
        entries: list[SourceEntry],
        shards: list[ShardEntry],
        histogram: dict[str, Counter[int]],
        encoder: Encoder,
        separator: int,
    ) -> None:
        folder = self.work.folder
        results = [read_json(unit.folder / RESULT) for unit in units]
        for result in results:
            samples.offer_all(result["samples"])
        hits = [hit for result in results for hit in result["hits"]]
        write_json(folder / SAMPLES, self._scrubbed(samples.all()))
        write_text(folder / HITS, "".join(canonical_json(hit) + "\n" for hit in hits))
        Manifest(
            etude=etude.__version__,
            seed=self.seed,
            length=self.data.length,
            dtype=dtype_for(encoder.vocabulary),
            separator=separator,
            vocabulary=encoder.vocabulary,
            tokeniser=sha256_file(folder / TOKENISER / "tokenizer.json"),
            exact_fast_tokeniser=all(read_json(unit.folder / SHAPED)["exact_fast_tokeniser"] for unit in units),
            shares=self._shares(entries),
            histogram={
                domain: [counts[bit] for bit in range(max(counts, default=-1) + 1)]
                for domain, counts in histogram.items()
            },
            contamination=len(hits) if self.data.contamination.tasks else None,
            sources=entries,
            shards=shards,
            tools=tools(),
            settings=self.data.model_dump(mode="json", exclude={"workers"}),
        ).save(folder)

    def _scrubbed(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return samples of dropped documents without their secrets: most left before the step that replaces those."""
        shown = [Document(sample["repository"], sample["path"], sample["excerpt"]) for sample in samples]
        if self.data.filters.scrub and shown:
            scrub(shown, self.work.folder / UNITS)
        return [sample | {"excerpt": document.text} for sample, document in zip(samples, shown, strict=True)]

    def _shares(self, entries: Sequence[SourceEntry]) -> dict[str, float]:
        replay = self.data.replay
        return mixing.shares(
            {entry.name: entry.tokens["train"] for entry in entries},
            {entry.name: entry.domain for entry in entries},
            {source.name: source.weight for source in self.data.source},
            self.data.shares,
            (replay.source, replay.share) if replay else None,
        )


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
        raise UserError(
            f"data.fim: the tokeniser has no token {lacking[0]!r}; name its own in data.fim.tokens, or set data.fim.rate = 0"
        )
