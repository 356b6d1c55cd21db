"""A source tree as text, and chains of edits to its files: what bases are compared on, and conversations are made of.

**A codebase** is the code below a folder, in path order, and why the other files were left out. In a git checkout only tracked
files count, so that build outputs and virtual environments stay out.

**An edit chain** is a file at the start, and a list of versions after it; the differences between neighbours are shown to a model
which must then write the last version. It comes from git history where there is one, and is made from the text where there is
not. Made edits are the kind that people make in small steps: rename, insert, delete, move and change a number. They are drawn
from a seeded generator, so a chain is the same everywhere.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import os
import random
import re
import shutil
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from etude.errors import UserError
from etude.files import digest_of
from etude.git import git, git_says, repository_of
from etude.rooted import Rooted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
CODE_SUFFIXES, PROSE_SUFFIXES = frozenset(TABLES["code_suffixes"]), frozenset(TABLES["prose_suffixes"])
Keep = Literal["code", "prose"]
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist", "target"})
LARGEST_FILE = 1_000_000  # bytes; longer ones are data or generated


@dataclass(frozen=True)
class SourceFile:
    """One file: its path below the tree's root, and its text."""

    path: str
    text: str

    @property
    def bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Codebase:
    """The code of a tree. `files` are in path order; `left_out` counts every other file by reason."""

    root: Path
    files: tuple[SourceFile, ...]
    left_out: dict[str, int]

    @property
    def bytes(self) -> int:
        """Length of all files in UTF-8."""
        return sum(file.bytes for file in self.files)

    @property
    def digest(self) -> str:
        """One digest for paths and texts."""
        return digest_of([[file.path, hashlib.sha256(file.text.encode()).hexdigest()] for file in self.files])

    def sample(self, most_bytes: int) -> Codebase:
        """Return whole files of about `most_bytes` in all, chosen by the hash of their paths; 0 means everything.

        The choice depends on paths and sizes: it is the same for every model and on every machine, and a changed file
        moves at most a few others. If not one file fits, the smallest is taken.
        """
        if not most_bytes or self.bytes <= most_bytes:
            return self
        chosen, room = [], most_bytes
        for file in sorted(self.files, key=lambda file: hashlib.sha256(file.path.encode()).digest()):
            if file.bytes <= room:
                chosen.append(file)
                room -= file.bytes
        chosen = chosen or [min(self.files, key=lambda file: (file.bytes, file.path))]
        left_out = {**self.left_out, "over the size budget": len(self.files) - len(chosen)}
        return Codebase(self.root, tuple(sorted(chosen, key=lambda file: file.path)), left_out)


def read_codebase(root: Path, keep: Keep = "code") -> Codebase:
    """Read the code below a folder, or one file; or, of a domain that is not code, its prose."""
    if not root.exists():
        raise UserError(f"code folder {str(root)!r} does not exist (looked in {Path.cwd()})")
    left_out: Counter[str] = Counter()
    files = []
    base = root if root.is_dir() else root.parent
    below = tracked_files(root) or [path for path in walked(root) if not os.path.isdir(path)]  # noqa: PTH112 - may raise
    for path in [root] if root.is_file() else below:
        text, fault = _read(path, keep)
        if fault:
            left_out[fault] += 1
        else:
            files.append(SourceFile(path.relative_to(base).as_posix(), text))
    if not any(file.text.strip() for file in files):
        nothing = "it is empty" if root.exists() else "it does not exist"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or nothing
        wanted = "source files" if keep == "code" else f"text ({', '.join(sorted(PROSE_SUFFIXES))})"
        raise UserError(f"{str(root)!r} holds no {keep} to read ({reasons}); point at a folder with {wanted}")
    return Codebase(root, tuple(sorted(files, key=lambda file: file.path)), dict(sorted(left_out.items())))


def tracked_files(root: Path) -> list[Path]:
    """Return what git tracks below a folder and is there: files, links, submodules; nothing if it is no git checkout."""
    repository = repository_of(root)
    if repository is None or shutil.which("git") is None:
        return []
    listed = git(repository, "ls-files", "-z", folder=root)
    if listed.returncode:
        reason = " ".join(listed.stderr.decode(errors="replace").strip().splitlines()[:1])
        advice = "put that right, or copy the files elsewhere"
        raise UserError(f"{root} is a git checkout that git cannot read ({reason}); {advice}")
    names = dict.fromkeys(os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
    with Rooted(root) as rooted:  # an index may name what lies behind a link
        return [root / name for name in names if rooted.stat(name)]


def passed_over(folder: Path) -> bool:
    """Say whether what lies in a folder is left out: hidden, installed, built, or somewhere else."""
    return folder.name in SKIPPED_FOLDERS or folder.name.startswith(".") or folder.is_symlink()


def walked(root: Path) -> Iterator[Path]:
    """Yield what lies below a folder; one that is not or cannot be entered stands for all that is in it."""
    closed: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=closed.append):
        passed = [name for name in folders if passed_over(Path(folder, name))]
        folders[:] = [name for name in folders if name not in passed]
        yield from (Path(folder, name) for name in [*names, *passed])
    yield from (Path(error.filename) for error in closed)


def git_revision(root: Path) -> str | None:
    """Return the commit a git checkout stands at, with `+changes` if tracked files below differ from it; else None."""
    folder = root if root.is_dir() else root.parent
    if not tracked_files(folder):
        return None
    commit = git_says(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    changed = git_says(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all", "--", ".")
    return f"{commit.strip()}{'+changes' if changed else ''}" if commit else None


def _read(path: Path, keep: Keep) -> tuple[str, str]:
    """Return the text of a source file, and the reason to leave it out, if there is one."""
    from etude.data.filters.content import decoded

    if path.suffix.lower() not in (CODE_SUFFIXES if keep == "code" else PROSE_SUFFIXES):
        return "", "not source code" if keep == "code" else "not prose"
    if not path.name.isascii() and path.name != path.name.encode(errors="ignore").decode():
        return "", "name not UTF-8"
    try:
        if path.is_symlink() or not path.is_file():
            return "", "a link or special file"
        if path.stat().st_size > LARGEST_FILE:
            return "", "over 1 MB"
        text = decoded(path.read_bytes())
    except OSError:
        return "", "unreadable"
    if text is None:
        return "", "not UTF-8"
    return text, "binary" if "\0" in text else "" if text else "empty"


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
        return [unified_diff(before, after) for before, after in itertools.pairwise(self.versions)]


def unified_diff(before: str, after: str) -> str:
    """Return the hunks of a unified difference with one line of context."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def _rename(lines: list[str], rng: random.Random) -> list[str]:
    if names := sorted(set(IDENTIFIER.findall("\n".join(lines)))):
        old = rng.choice(names)
        new = f"{old}_{rng.choice(['new', 'value', 'item', 'next'])}"
        return [re.sub(rf"\b{old}\b", new, line) for line in lines]
    return lines


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
    if candidates := [index for index, line in enumerate(lines) if NUMBER.search(line)]:
        at = rng.choice(candidates)
        return [*lines[:at], NUMBER.sub(str(rng.randrange(100)), lines[at], count=1), *lines[at + 1 :]]
    return lines


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
    lines = [line + "\n" for line in text.splitlines()]
    ends = itertools.accumulate(map(len, lines))
    return "".join(line for line, end in zip(lines, ends, strict=True) if end <= most_chars)


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
    texts = [git_says(root, "show", f"{commit}:./{path}") or "" for commit in reversed(commits)]
    versions = tuple(text.removeprefix("\ufeff") for text in texts)
    short = all(0 < len(version) <= most_chars and FENCE not in version for version in versions)
    distinct = len({tuple(version.splitlines()) for version in versions}) == len(versions)
    return EditChain(path, versions, "git") if short and distinct else None
