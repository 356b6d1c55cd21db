"""Benchmark tasks kept out of training data: documents that share runs of code tokens with a task.

A token is a word or a run of signs; white space does not matter. A run of 13 that also stands in a task is a hit; `hits`
distinct ones of one task (all of them, if it is so short that it has fewer) make a document contaminated. Licence notices
at the top do not count. Every hit is listed with the task and the words, so that a person can judge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.data.filters.duplicates import ngram_runs, without_notice
from etude.errors import UserError
from etude.files import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from etude.data.filters.duplicates import Hashes

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
    runs: Hashes  # sorted
    task_of_run: np.ndarray[tuple[int], np.dtype[np.int64]]
    tasks: tuple[str, ...]
    needed: np.ndarray[tuple[int], np.dtype[np.int64]]  # distinct runs of each task that make a document contaminated

    def hit(self, text: str) -> Hit | None:
        """Return what a document shares with tasks, if that is enough to call it contaminated."""
        if not len(self.runs):
            return None
        content = without_notice(text).encode()
        found = ngram_runs(content, self.ngram, signs=True)
        places = np.searchsorted(self.runs, found.hashes)
        places[places == len(self.runs)] = 0
        at = np.flatnonzero(self.runs[places] == found.hashes)
        distinct, first = np.unique(places[at], return_index=True)
        enough = np.bincount(self.task_of_run[distinct], minlength=len(self.tasks)) >= self.needed
        if not enough.any():
            return None
        names = tuple(sorted(self.tasks[index] for index in np.flatnonzero(enough)))
        spans = [slice(found.starts[index], found.ends[index]) for index in at[np.sort(first)[:SHOWN]]]
        words = tuple(" ".join(content[span].decode(errors="replace").split()) for span in spans)
        return Hit(names, len(distinct), words)


def index_tasks(texts: Sequence[tuple[str, str]], ngram: int, hits: int) -> TaskIndex:
    """Index (name, text) pairs. A text of fewer than `ngram` tokens is one run: a document must hold nothing else to match."""
    names = tuple(dict.fromkeys(name for name, _ in texts))
    number = {name: index for index, name in enumerate(names)}
    runs, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for name, text in texts:
        runs.append(ngram_runs(without_notice(text).encode(errors="replace"), ngram, signs=True).hashes)
        owners.append(np.full(len(runs[-1]), number[name]))
    distinct, first = np.unique(np.concatenate(runs), return_index=True)
    owner = np.concatenate(owners)[first]
    needed = np.clip(np.bincount(owner, minlength=len(names)), 1, hits)
    return TaskIndex(ngram, distinct, owner, names, needed)


def read_tasks(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Read tasks from files and folders: every string in a line of JSONL, or a whole file of plain text."""
    texts: list[tuple[str, str]] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"benchmark tasks {str(path)!r} do not exist; put data.contamination.tasks right")
        for file in [path] if path.is_file() else files_below(path):
            texts += _json_tasks(file) if file.suffix in {".json", ".jsonl"} else [(file.name, _read(file))]
    if paths and not texts:
        raise UserError(f"{', '.join(map(str, paths))} hold no text; put data.contamination.tasks right")
    return texts


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; benchmark tasks are JSON, JSONL or plain text") from None


def _json_tasks(file: Path) -> Iterator[tuple[str, str]]:
    text = _read(file)
    for number, part in enumerate([text] if file.suffix == ".json" else text.splitlines(), start=1):
        try:
            row = json.loads(part)
        except ValueError:
            raise UserError(f"{file}:{number} is not JSON; benchmark tasks are JSON, JSONL or plain text") from None
        named = row.get("id") or row.get("task_id") or row.get("name") if isinstance(row, dict) else None
        name = str(named or f"{file.name}:{number}")
        yield from ((name, text) for text in _strings(row))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
