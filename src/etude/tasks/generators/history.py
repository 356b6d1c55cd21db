"""A repository's own fixes: commits that change source and tests together, undone. The commit's tree is the pristine one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.errors import UserError
from etude.lineage.environment import git, git_says
from etude.tasks.generators.parsed import LARGEST_FILE, is_test_path, solution_spans
from etude.tasks.generators.version import MOST_LINES, changed_line_count, edits_between
from etude.tasks.task import Candidate

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MOST_COMMITS = 2000  # looked at, from HEAD backwards
MOST_FILES = 40  # changed by one commit
DEAD_WORDS = re.compile(
    r"\b[0-9a-f]{7,40}\b|\(?(?:(?:fix(?:es|ed)?|close[sd]?|resolve[sd]?|refs?|see) )?#\d+\)?|https?://\S+", re.I
)
TRAILER = re.compile(r"^(?:[A-Z][\w-]+-by|Change-Id|Signed-off|Co-authored).*:.*$", re.MULTILINE)


@dataclass(frozen=True)
class Commit:
    """A commit with one parent, and the paths it changed. A rename is a removal and an addition."""

    name: str
    parent: str
    message: str
    paths: tuple[str, ...]


def commits(repository: Path, left_out: Counter[str], most: int = MOST_COMMITS) -> Iterator[Commit]:
    """Yield the commits from HEAD backwards that have one parent; the others are counted."""
    log = git_says(repository, "log", "-z", f"--max-count={most}", "--format=%H%n%P%n%B", "HEAD")
    if log is None:
        raise UserError(f"{repository} is no git repository with a commit; give the folder of one, or install git")
    for entry in filter(None, log.split("\0")):
        name, parents, message = entry.split("\n", 2)
        if len(parents.split()) != 1:
            left_out["commit is a merge" if parents else "commit is the first"] += 1
            continue
        listing = git_says(repository, "diff-tree", "-r", "-z", "--no-renames", "--name-only", parents, name) or ""
        yield Commit(name, parents, message, tuple(filter(None, listing.split("\0"))))


def _text(repository: Path, commit: str, path: str) -> str | None:
    """Return a file of a commit, None if it has none; ValueError if it is binary or long."""
    done = git(repository, "cat-file", "blob", f"{commit}:{path}")
    if done is None or done.returncode:
        return None
    if len(done.stdout) > LARGEST_FILE or b"\0" in done.stdout:
        raise ValueError
    return done.stdout.decode()


def _texts(repository: Path, commit: str, paths: Sequence[str]) -> dict[str, str]:
    return {path: text for path in paths if (text := _text(repository, commit, path)) is not None}


def _below(path: str, places: Sequence[str]) -> bool:
    return any(place in {".", path} or path.startswith(f"{place}/") for place in places)


def _refusal(commit: Commit, source: Sequence[str]) -> str | None:
    if not source:
        return "commit changes no source"
    if not any(is_test_path(path) for path in commit.paths):
        return "commit changes no tests"
    return "commit changes too many files" if len(commit.paths) > MOST_FILES else None


def reversal(repository: Path, commit: Commit, sources: Sequence[str], left_out: Counter[str]) -> Candidate | None:
    """Return a commit undone, its tests left in place; None, and a counted reason, if it makes no task."""
    paths = [path for path in commit.paths if _below(path, sources) and not is_test_path(path)]
    reason = _refusal(commit, paths)
    if reason is None:
        try:
            edits = edits_between(_texts(repository, commit.parent, paths), _texts(repository, commit.name, paths))
            spans = solution_spans(edits)
            reason = None if edits else "commit changes no meaning"
        except ValueError:
            reason = "commit has a long or binary file"
        except (SyntaxError, RecursionError):
            reason = "commit is not Python of this version"
    if reason is None and changed_line_count(edits) > MOST_LINES:
        reason = "commit is too large"
    if reason is not None:
        left_out[reason] += 1
        return None
    names = list(dict.fromkeys(span.name for span in spans if span.name))
    subject, _, body = DEAD_WORDS.sub("", TRAILER.sub("", commit.message)).partition("\n")
    about = {"commit": commit.name, "parent": commit.parent, "subject": " ".join(subject.split()).strip(" .:"), "body": body.strip(),
             "name": names[0] if names else "", "names": names, "path": edits[0].path}  # fmt: skip
    return Candidate("history", ("commit",), edits, spans, about)


def candidates(
    repository: Path, sources: Sequence[str], left_out: Counter[str], most: int = MOST_COMMITS
) -> Iterator[Candidate]:
    """Yield the commits of a repository that make tasks, the newest first; the others are counted by reason."""
    for commit in commits(repository, left_out, most):
        if candidate := reversal(repository, commit, sources, left_out):
            yield candidate
