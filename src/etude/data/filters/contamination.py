"""Benchmark tasks kept out of training data: documents that share runs of code tokens with a task.

A token is a word or a run of signs, so layout does not matter. A run of 13 that also stands in a task is a hit; `hits`
distinct ones make a document contaminated. Every hit is listed with the task and the words, so that a person can judge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.data.ngrams import ngram_runs
from etude.errors import UserError
from etude.files import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from etude.data.ngrams import Hashes

SHOWN = 3  # runs of words listed for one document


@dataclass(frozen=True)
class Hit:
    """What a document shares with tasks."""

    tasks: tuple[str, ...]
    runs: int  # distinct ones
    words: tuple[str, ...]  # some of them


@dataclass(frozen=True)
class TaskIndex:
    """The runs of all tasks. Picklable, and small: benchmarks are."""

    ngram: int
    hits: int
    runs: Hashes  # sorted
    task_of_run: np.ndarray[tuple[int], np.dtype[np.int64]]
    tasks: tuple[str, ...]

    def hit(self, text: str) -> Hit | None:
        """Return what a document shares with tasks, if that is enough to call it contaminated."""
        if not len(self.runs):
            return None
        content = text.encode()
        found = ngram_runs(content, self.ngram, signs=True)
        places = np.searchsorted(self.runs, found.hashes)
        places[places == len(self.runs)] = 0
        at = np.flatnonzero(self.runs[places] == found.hashes)
        distinct, first = np.unique(found.hashes[at], return_index=True)
        if len(distinct) < self.hits:
            return None
        names = {self.tasks[self.task_of_run[place]] for place in places[at]}
        spans = [slice(found.starts[index], found.ends[index]) for index in at[np.sort(first)[:SHOWN]]]
        words = tuple(" ".join(content[span].decode(errors="replace").split()) for span in spans)
        return Hit(tuple(sorted(names)), len(distinct), words)


def index_tasks(texts: Sequence[tuple[str, str]], ngram: int, hits: int) -> TaskIndex:
    """Index (name, text) pairs. A text of fewer than `ngram` tokens is one run: a document must hold nothing else to match."""
    names = tuple(dict.fromkeys(name for name, _ in texts))
    number = {name: index for index, name in enumerate(names)}
    runs, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for name, text in texts:
        found = ngram_runs(text.encode(), ngram, signs=True).hashes
        runs.append(found)
        owners.append(np.full(len(found), number[name]))
    distinct, first = np.unique(np.concatenate(runs), return_index=True)
    return TaskIndex(ngram, hits, distinct, np.concatenate(owners)[first], names)


def read_tasks(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Read tasks from files and folders: every string in a line of JSONL, or a whole file of plain text."""
    texts: list[tuple[str, str]] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"benchmark tasks {str(path)!r} do not exist; put data.contamination.tasks right")
        for file in [path] if path.is_file() else files_below(path):
            texts += _jsonl_tasks(file) if file.suffix == ".jsonl" else _plain_task(file)
    if paths and not texts:
        raise UserError(f"{', '.join(map(str, paths))} hold no text; put data.contamination.tasks right")
    return texts


def _plain_task(file: Path) -> list[tuple[str, str]]:
    try:
        return [(file.name, file.read_text(encoding="utf-8"))]
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; benchmark tasks are JSONL or plain text") from None


def _jsonl_tasks(file: Path) -> Iterator[tuple[str, str]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                raise UserError(f"{file}:{number} is not JSON; benchmark tasks are JSONL or plain text") from None
            named = row.get("id") or row.get("task_id") or row.get("name") if isinstance(row, dict) else None
            name = str(named or f"{file.name}:{number}")
            yield from ((name, text) for text in _strings(row))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
