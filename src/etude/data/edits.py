"""Chains of edits to a file: from git history where there is one, made from the text where there is not.

A chain is the file at the start, and a list of versions after it; the differences between neighbours are shown to a model
which must then write the last version. Made edits are the kind that people make in small steps: rename, insert, delete,
move and change a number. They are drawn from a seeded generator, so a chain is the same everywhere.
"""

from __future__ import annotations

import difflib
import itertools
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.lineage.environment import git_says

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from etude.data.codebase import Codebase

IDENTIFIER = re.compile(r"\b[a-z_][a-z_0-9]{3,}\b")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
FENCE = "```"  # marks the end of a file in a prompt, so no file may hold it
FILES_TRIED = 25  # short files looked up in git for each chain wanted: every look starts a process
TRIES = 20  # draws before a file is given up: not every edit applies to every file


@dataclass(frozen=True)
class EditChain:
    """The versions of one file, oldest first; at least two."""

    path: str
    versions: tuple[str, ...]
    origin: str  # "git" or "made"

    @property
    def diffs(self) -> list[str]:
        """The unified differences between neighbours, without file headers."""
        pairs = zip(self.versions, self.versions[1:], strict=False)
        return [unified_diff(before, after) for before, after in pairs]


def unified_diff(before: str, after: str) -> str:
    """Return the hunks of a unified difference with one line of context."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def _rename(lines: list[str], rng: random.Random) -> list[str]:
    names = sorted(set(IDENTIFIER.findall("\n".join(lines))))
    if not names:
        return lines
    old = rng.choice(names)
    new = f"{old}_{rng.choice(['new', 'value', 'item', 'next'])}"
    return [re.sub(rf"\b{old}\b", new, line) for line in lines]


def _delete(lines: list[str], rng: random.Random) -> list[str]:
    gone = rng.randrange(len(lines))
    return lines[:gone] + lines[gone + 1 :]


def _insert(lines: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(lines))
    indent = lines[at][: -len(lines[at].lstrip()) or None]
    return [*lines[:at], f"{indent}# step {rng.randrange(10, 100)}", *lines[at:]]


def _move(lines: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(len(lines) - 1)
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


def _renumber(lines: list[str], rng: random.Random) -> list[str]:
    candidates = [index for index, line in enumerate(lines) if NUMBER.search(line)]
    if not candidates:
        return lines
    at = rng.choice(candidates)
    return [*lines[:at], NUMBER.sub(str(rng.randrange(100)), lines[at], count=1), *lines[at + 1 :]]


EDITS: tuple[Callable[[list[str], random.Random], list[str]], ...] = (_rename, _delete, _insert, _move, _renumber)


def made_chain(path: str, text: str, steps: int, rng: random.Random) -> EditChain | None:
    """Return a chain of `steps` edits of a text; None if it is too short for that."""
    versions = [text]
    for _ in range(TRIES * steps):
        if len(versions) > steps:
            return EditChain(path, tuple(versions), "made")
        lines = versions[-1].splitlines()
        if len(lines) < 3:
            return None
        edited = "\n".join(rng.choice(EDITS)(lines, rng)) + "\n"
        if edited not in versions:
            versions.append(edited)
    return None


def cut_piece(text: str, most_chars: int) -> str:
    """Return the first whole lines of a text within `most_chars`: a file short enough to be written out again."""
    piece = ""
    for line in text.splitlines():
        if len(piece) + len(line) + 1 > most_chars:
            break
        piece += line + "\n"
    return piece


def made_chains(code: Codebase, count: int, steps: int, most_chars: int, seed: int) -> list[EditChain]:
    """Make up to `count` chains from the files of a tree, spread over it."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    files = [file for file in code.files if FENCE not in file.text]
    rng.shuffle(files)
    chains = (made_chain(file.path, cut_piece(file.text, most_chars), steps, rng) for file in files)
    return list(itertools.islice((chain for chain in chains if chain is not None), count))


def git_chains(root: Path, paths: Sequence[str], count: int, steps: int, most_chars: int) -> list[EditChain]:
    """Return up to `count` chains from git history: the last `steps` commits that changed a file short enough."""
    if not git_says(root, "rev-parse", "HEAD"):
        return []
    short = [path for path in paths if (root / path).is_file() and (root / path).stat().st_size <= most_chars]
    chains = (_git_chain(root, path, steps, most_chars) for path in short[: FILES_TRIED * count])
    return list(itertools.islice((chain for chain in chains if chain is not None), count))


def _git_chain(root: Path, path: str, steps: int, most_chars: int) -> EditChain | None:
    commits = (git_says(root, "log", f"-{steps + 1}", "--format=%H", "--", path) or "").split()
    if len(commits) <= steps:
        return None
    versions = tuple(git_says(root, "show", f"{commit}:./{path}") or "" for commit in reversed(commits))
    short = all(0 < len(version) <= most_chars and FENCE not in version for version in versions)
    distinct = len({tuple(version.splitlines()) for version in versions}) == len(versions)
    return EditChain(path, versions, "git") if short and distinct else None
