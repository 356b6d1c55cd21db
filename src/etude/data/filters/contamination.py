"""Benchmark tasks kept out of training data: documents that share runs of code tokens with a task.

A token is a word or a run of signs; white space does not matter. A run of 13 that also stands in a task is a hit; `hits`
distinct ones of one task (all of them, if it is so short that it has fewer) make a document contaminated. Licence notices
at the top do not count. Every hit is listed with the task and the words, so that a person can judge.

Runs of words (n-grams) are 64-bit numbers; near-duplicates are found by the same ones. Words are cut and hashed for a whole
text at once, in numpy: a regular expression and a dictionary take four times as long, and this is the most expensive step
before tokenising. The hash of a word is Σ value(byte) · P^position (mod 2⁶⁴), taken from running sums over the text and
shifted back to the word's start by P^−start, so equal words have equal hashes wherever they stand. Equal runs give equal
numbers on every machine; different ones agree by a chance of about 2⁻⁶⁴. Bytes of characters outside ASCII count as letters.
Letters are compared without their case, ASCII ones only.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from etude.errors import UserError
from etude.files import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]
    Offsets = npt.NDArray[np.int64]

PUBLIC, REQUESTS = ("task.yaml", "task.toml"), ("problem_statement.md", "instruction.md")  # of SWE-bench, of Harbor
SHOWN = 3  # runs of words listed for one document
LEADING_COMMENT = re.compile(r"\s*(?:(?:(?:#|//|--|;|%)[^\n]*\n)+|/\*.*?\*/)\s*", re.DOTALL)  # the first one only
NOTICE = re.compile(r"licen[cs]e|copyright", re.IGNORECASE)
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
FINISH = np.uint64(0xFF51AFD7ED558CCD)
SPACE, WORD, SIGN = 0, 1, 2
CLASSES = np.full(256, SIGN, np.uint8)  # by byte
CLASSES[[byte for byte in range(256) if byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_"]] = WORD
CLASSES[[*b" \t\n\r\f\v\0"]] = SPACE
VALUES = np.random.Generator(np.random.PCG64(20240117)).integers(1, 2**64, 256, np.uint64)  # by byte
VALUES[ord("A") : ord("Z") + 1] = VALUES[ord("a") : ord("z") + 1]


@lru_cache(maxsize=4)
def _powers(length: int) -> tuple[Hashes, Hashes]:
    """Return P^i and P^−i for i < length."""
    steps = np.ones((2, length), np.uint64)
    steps[:, 1:] = [[BASE], [pow(BASE, -1, 2**64)]]
    powers, inverses = np.cumprod(steps, axis=1)
    return powers, inverses


class Runs(NamedTuple):
    """One number for each run of n words, and where in the UTF-8 text it begins and ends."""

    hashes: Hashes
    starts: Offsets
    ends: Offsets


def ngram_runs(content: bytes, n: int, *, signs: bool) -> Runs:
    """Return the runs of `n` words of a UTF-8 text; a text of fewer words has one run, of all of them.

    With `signs`, a run of signs between words is a word too: what code consists of.
    """
    data = np.frombuffer(content, np.uint8)
    starts, ends = _words(data, signs=signs)
    count = len(starts) - n + 1 if len(starts) >= n else min(len(starts), 1)
    n = min(n, len(starts))
    hashes = _word_hashes(data, starts, ends)
    runs = np.zeros(count, np.uint64)
    for offset in range(n):
        runs = runs * MULTIPLIER + hashes[offset : count + offset]
    return Runs(_mixed(runs), starts[:count], ends[n - 1 : n - 1 + count] if n else ends)


def _words(data: npt.NDArray[np.uint8], *, signs: bool) -> tuple[Offsets, Offsets]:
    classes = np.pad(CLASSES[data], 1)  # a space before and after
    changes = np.flatnonzero(classes[1:] != classes[:-1])
    kind = classes[changes + 1]  # of what begins there
    wanted = kind[:-1] != SPACE if signs else kind[:-1] == WORD
    return changes[:-1][wanted], changes[1:][wanted]


def _word_hashes(data: npt.NDArray[np.uint8], starts: Offsets, ends: Offsets) -> Hashes:
    # Tables in powers of two, so that few of them are made.
    powers, inverses = _powers(1 << max(10, len(data).bit_length()))
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(VALUES[data] * powers[: len(data)], out=sums[1:])
    return _mixed((sums[ends] - sums[starts]) * inverses[starts])


def _mixed(hashes: Hashes) -> Hashes:
    """Spread what differs little over all bits."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= FINISH
    return hashes ^ (hashes >> np.uint64(33))


def without_notice(text: str) -> str:
    """Return the text without the licence notice at its top: it would make all short files of a project look alike."""
    head = LEADING_COMMENT.match(text)
    rest = text[head.end() :] if head and NOTICE.search(head[0]) else text
    return rest if rest.strip() else text


class Hit(NamedTuple):
    """What a document shares with tasks."""

    tasks: list[str]
    runs: int  # distinct ones
    words: list[str]  # some of them


@dataclass(frozen=True)
class TaskIndex:
    """The runs of all tasks. Picklable, and small: benchmarks are."""

    ngram: int
    runs: Hashes  # sorted
    task_of_run: Offsets
    tasks: tuple[str, ...]
    needed: Offsets  # distinct runs of each task that make a document contaminated

    def hit(self, text: str) -> Hit | None:
        """Return what a document shares with tasks, if that is enough to call it contaminated."""
        if not len(self.runs):
            return None
        content = without_notice(text).encode()
        runs = ngram_runs(content, self.ngram, signs=True)
        places = np.searchsorted(self.runs, runs.hashes) % len(self.runs)
        at = np.flatnonzero(self.runs[places] == runs.hashes)
        distinct, first = np.unique(places[at], return_index=True)
        enough = np.bincount(self.task_of_run[distinct], minlength=len(self.tasks)) >= self.needed
        if not enough.any():
            return None
        names = sorted(self.tasks[index] for index in np.flatnonzero(enough))
        shared = [content[runs.starts[index] : runs.ends[index]] for index in at[np.sort(first)[:SHOWN]]]
        return Hit(names, len(distinct), [" ".join(each.decode(errors="replace").split()) for each in shared])


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
    """Read tasks from files and folders: every string in a line of JSONL, a whole file of plain text, or public benchmarks."""
    texts: list[tuple[str, str]] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"benchmark tasks {str(path)!r} do not exist; put data.contamination.tasks right")
        public = [] if path.is_file() else sorted({each.parent for name in PUBLIC for each in path.glob(f"*/{name}")})
        public += [path] if any((path / name).is_file() for name in PUBLIC) else []
        for folder in public:
            texts += _read_public(folder)
        for file in [path] if path.is_file() else [] if public else files_below(path):
            texts += _read_file(file)
    if paths and not texts:
        raise UserError(f"{', '.join(map(str, paths))} hold no text; put data.contamination.tasks right")
    return texts


def _read_file(file: Path) -> Iterator[tuple[str, str]]:
    kinds = "benchmark tasks are JSON, JSONL or plain text"
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; {kinds}") from None
    if file.suffix not in {".json", ".jsonl"}:
        yield file.name, text
        return
    for number, part in enumerate([text] if file.suffix == ".json" else text.splitlines(), start=1):
        try:
            row = json.loads(part)
        except ValueError:
            raise UserError(f"{file}:{number} is not JSON; {kinds}") from None
        named = row.get("id") or row.get("task_id") or row.get("name") if isinstance(row, dict) else None
        yield from ((str(named or f"{file.name}:{number}"), each) for each in _strings(row))


def _read_public(folder: Path) -> Iterator[tuple[str, str]]:
    """Read a task's request, solution and tests. Its Dockerfile and settings are like those of all others, and mark nothing."""
    for file in files_below(folder):
        place = file.relative_to(folder).parts
        checks = len(place) > 1 and place[0] in {"solution", "tests"}
        wanted = checks or file.name in REQUESTS or file.suffix == ".patch"
        if wanted and file.suffix != ".json":
            with suppress(UnicodeDecodeError):  # pictures and the like hold no code
                yield folder.name, _without_marks(file.read_text(encoding="utf-8"))


def _without_marks(text: str) -> str:
    """Return the new side of a patch as the code it is; other texts as they are."""
    if not text.startswith(("diff --git ", "--- ")):
        return text
    kept = [line for line in text.split("\n") if line.startswith((" ", "+")) and not line.startswith("+++ ")]
    return "\n".join(line[1:] for line in kept)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield _without_marks(value)
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
