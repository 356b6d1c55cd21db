"""The datatrove side of benchmarks/corpus.py; runs in its own environment.

    PYTHON benchmarks/corpus_datatrove.py job.json      prints one JSON line: seconds by step, documents and tokens

Everything is set for datatrove's speed, within what it offers. Steps that need no second look at the whole corpus share
one executor, so that documents are read three times and written once. Its hooks for a word tokeniser, for text
normalisation and for writing rows are used: the words are then those Etude counts, for near-duplicates and for
contamination, and its MinHash is twenty times as fast as with its defaults (spaCy's English words). Hashes are xxhash;
nothing is compressed; processes are forked. It has no blocks for lengths of code, and its block for repeated lines splits
words and paragraphs too, so Etude's rules are given to its LambdaFilter.
"""

# mypy: disable-error-code="import-not-found", disallow-subclassing-any=false

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import create_hash_func
from datatrove.utils.text import TextNormConfig, ngrams, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer

from etude.data.filters.content import generated, quality

if TYPE_CHECKING:
    from datatrove.data import Document

LINES_BUFFERED = 1000  # of signatures; the default of 5 is for thousands of files
TOKENISED_AT_ONCE = 1000  # documents; the default of 10,000 takes twice the memory and is no faster
WORDS = r"\w+"  # for duplicates
CODE_TOKENS = r"\w+|[^\w\s]+"  # for contamination
AS_THEY_ARE = TextNormConfig(  # but for their case
    norm_whitespace=False, remove_punctuation=False, norm_unicode_diacritics=False, norm_numbers=False
)


class Words(WordTokenizer):
    """Words by a regular expression: the way of datatrove to bring one's own, where its languages are all natural ones."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return self.pattern.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return lines: code has no sentences."""
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return where the words are."""
        return [match.span() for match in self.pattern.finditer(text)]


def worth_keeping(document: Document, limits: Any) -> bool | tuple[bool, str]:
    """Judge a document as Etude does."""
    row: Any = SimpleNamespace(text=document.text, path="", kind="row", language="plain-text")
    reason = generated(row) or quality(row, limits)
    return (False, reason) if reason else True


def text_of(document: Document) -> str:
    """Return what exact duplicates have in common."""
    return str(document.text)


def as_row(_: JsonlWriter, document: Document) -> dict[str, Any]:
    """Return the row of a document; the writer's own way copies it deeply first."""
    return {"text": document.text, "id": document.id, "metadata": document.metadata}


class Clock:
    """Runs executors, and books the time of each on the steps of the benchmark."""

    def __init__(self, logs: Path, workers: int) -> None:
        self.logs, self.workers = logs, workers
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stages: list[dict[str, Any]] = []

    def run(self, stage: str, tasks: int, pipeline: list[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
        """Run [(step, block)] and return the counts of its blocks by class name.

        If the blocks belong to several steps, wall time is split as the blocks' own clocks say.
        """
        begun = time.perf_counter()
        done = LocalPipelineExecutor(
            [block for _, block in pipeline],
            tasks=tasks,
            workers=min(self.workers, tasks),
            logging_dir=str(self.logs / stage),
            skip_completed=False,
            start_method="fork",
        ).run()
        seconds = time.perf_counter() - begun
        blocks = {
            type(block).__name__: {"step": step, "clock": stats.time_stats.total, **_totals(stats)}
            for (step, block), stats in zip(pipeline, done.stats, strict=True)
        }
        self._book(seconds, blocks)
        self.stages.append({"stage": stage, "tasks": tasks, "seconds": seconds, "blocks": blocks})
        return blocks

    def _book(self, seconds: float, blocks: dict[str, dict[str, Any]]) -> None:
        if len({block["step"] for block in blocks.values()}) == 1:
            self.seconds[next(iter(blocks.values()))["step"]] += seconds
            return
        # This one's clock runs on while later blocks work; what it does, comparing two numbers, is next to nothing.
        told = [block for name, block in blocks.items() if name != "ExactDedupFilter"]
        for block in told:
            self.seconds[block["step"]] += seconds * block["clock"] / sum(block["clock"] for block in told)


def _totals(stats: Any) -> dict[str, int]:
    return {name: value.total for name, value in stats.stats.items() if not name.endswith(".jsonl")}


def index_tasks(tasks: Path, folder: Path, words: Words, config: NGramsDecontConfig) -> None:
    """Write the index of benchmark tasks. (NGramsDecontIndexer does the same, but only with lighteval installed and online.)"""
    hashed = create_hash_func(config.hash_config)
    texts = [json.loads(line)["text"] for line in tasks.read_text(encoding="utf-8").splitlines()]
    runs = {
        hashed(" ".join(run))
        for text in texts
        for run in ngrams(words.word_tokenize(simplify_text(text, config.norm_config)), config.n_grams)
    }
    folder.mkdir(parents=True)
    np.array(sorted(runs), dtype=config.hash_config.np_descr).tofile(folder / "tasks.index.hashes")


def build(job: dict[str, Any], clock: Clock) -> dict[str, int]:
    """Build the corpus and return how many documents each step left, and how many tokens there are."""
    work, shards = Path(job["work"]), len(list(Path(job["shards"]).iterdir()))
    exact, near = ExactDedupConfig(text_of), _near_config(job)
    words = Words(WORDS)
    filtered = clock.run("filter", shards, _filtering(job, exact))
    clock.run("exact-find", 1, [("exact duplicates", _exact_find(work, exact))])
    remaining = partial(_remaining, work, exact)
    signed = MinhashDedupSignature(f"{work}/signatures", near, language=words)
    clock.run("near-sign", shards, [*remaining(), ("near duplicates", signed)])
    buckets = MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=near, lines_to_buffer=LINES_BUFFERED)
    clock.run("near-buckets", near.num_buckets, [("near duplicates", buckets)])
    cluster = MinhashDedupCluster(f"{work}/buckets", f"{work}/removed", near, lines_to_buffer=LINES_BUFFERED)
    clock.run("near-cluster", 1, [("near duplicates", cluster)])
    tokenised = clock.run("tokenise", shards, [*remaining(), *_finishing(job, clock)])
    packing = DocumentTokenizerMerger(
        f"{work}/tokens", f"{work}/packed", "corpus", shuffle_chunk_size=job["length"] + 1, seed=0, progress=False
    )
    packed = clock.run("pack", 1, [("pack", packing)])
    return {
        "read": filtered["JsonlReader"]["documents"],
        "filter": filtered["LambdaFilter"]["forwarded"],
        "exact duplicates": tokenised["ExactDedupFilter"]["forwarded"],
        "near duplicates": tokenised["MinhashDedupFilter"]["forwarded"],
        "decontaminate": tokenised["NGramsDecontFilter"]["forwarded"],
        "tokenise": tokenised["DocumentTokenizer"]["tokens"],
        "pack": packed["DocumentTokenizerMerger"]["tokens"],
    }


def _near_config(job: dict[str, Any]) -> MinhashConfig:
    duplicates = job["duplicates"]
    return MinhashConfig(
        n_grams=duplicates["ngram"],
        num_buckets=duplicates["bands"],
        hashes_per_bucket=duplicates["rows"],
        norm_config=AS_THEY_ARE,
    )


def _filtering(job: dict[str, Any], exact: ExactDedupConfig) -> list[tuple[str, Any]]:
    work, limits = job["work"], SimpleNamespace(**job["filters"])  # no pydantic there
    return [
        ("filter", JsonlReader(job["shards"], compression=None)),
        ("filter", LambdaFilter(partial(worth_keeping, limits=limits))),
        ("filter", JsonlWriter(f"{work}/filtered", compression=None, adapter=as_row)),
        ("exact duplicates", ExactDedupSignature(f"{work}/exact", exact)),
    ]


def _exact_find(work: Path, exact: ExactDedupConfig) -> ExactFindDedups:
    return ExactFindDedups(f"{work}/exact", f"{work}/exact-found", exact, lines_to_buffer=LINES_BUFFERED)


def _remaining(work: Path, exact: ExactDedupConfig) -> list[tuple[str, Any]]:
    """Return the blocks that read what is left after exact duplicates."""
    return [
        ("near duplicates", JsonlReader(f"{work}/filtered", compression=None)),
        ("near duplicates", ExactDedupFilter(f"{work}/exact-found", exact)),
    ]


def _finishing(job: dict[str, Any], clock: Clock) -> list[tuple[str, Any]]:
    work, words = job["work"], Words(CODE_TOKENS)
    config = NGramsDecontConfig(n_grams=job["contamination"]["ngram"], norm_config=AS_THEY_ARE)
    begun = time.perf_counter()
    index_tasks(Path(job["tasks"]), Path(work, "tasks"), words, config)
    clock.seconds["decontaminate"] += time.perf_counter() - begun
    tokeniser = DocumentTokenizer(
        f"{work}/tokens", job["tokeniser"], eos_token=job["separator"], batch_size=TOKENISED_AT_ONCE, seed=0
    )
    return [
        ("near duplicates", MinhashDedupFilter(f"{work}/removed", lines_to_buffer=LINES_BUFFERED)),
        ("scrub", PIIFormatter()),
        ("decontaminate", NGramsDecontFilter(f"{work}/tasks", config, language=words)),
        ("tokenise", tokeniser),
    ]


def main() -> None:
    """Build the corpus and print what it took."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    clock = Clock(Path(job["work"], "logs"), job["workers"])
    begun = time.perf_counter()
    left = build(job, clock)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "documents": left.pop("read"),
        "seconds": time.perf_counter() - begun,
        "steps": dict(clock.seconds),
        "left": left,
        "more": {
            "stages": clock.stages,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "largest_process_mb": used.ru_maxrss // 1000,
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
