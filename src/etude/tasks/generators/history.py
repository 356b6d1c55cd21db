"""What people changed: the difference between two releases, or a commit of a repository, undone under its own tests.

The pristine tree is the newer release, or the tree of the commit; broken is its source as it was before. A file that differs in
layout, comments, docstrings or the version only stays as it is: such a difference is no task. A large release is offered in
pieces, each file and each run of changed lines alone; which of them any test notices is for validation to find out. A commit
must change source and tests together. Of a history the first parents are followed, so that a merged branch is one change, of the
size in which people hand in their work.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.errors import UserError
from etude.git import git, repository_of
from etude.tasks.generators import parsed
from etude.tasks.generators.parsed import Parsed, is_test_path, solution_spans
from etude.tasks.task import Candidate, Edit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MOST_LINES = 600  # of a solution
MOST_LOST = 5  # public names that the newer release no longer has: more is another library
NEAR = 8  # unchanged lines between two runs that belong together
CHANGELOG = re.compile(
    r"(change(s|log)|history|news|releases?|release[-_]notes|whatsnew).*?(\.(md|rst|txt))?", re.IGNORECASE
)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)|`([^`<]*) ?<[^>]*>`_+")
REFERENCE = re.compile(
    r"\((?:issue|pr|gh)[^)]*\)|\([^()]*[#@][^()]*\)|^\d+: |\bthanks\b.*|https?://\S+"
    r"|(?:\b(?:by|via|fix(?:es)?|closes|see|in|PR|pull|issue) )*[#@!]\w[\w/-]*",
    re.IGNORECASE,
)
MARKS = re.compile(r":\w+:`|`+|\*\*|\(\)")
VERSION_NAME = re.compile(r"^(__)?version(_info|_tuple|__)*$", re.IGNORECASE)
MOST_COMMITS = 2000  # looked at, from HEAD backwards
MOST_FILES = 40  # changed by one commit
DEAD_WORDS = re.compile(
    r"\b[0-9a-f]{7,40}\b|\(?(?:(?:fix(?:es|ed)?|close[sd]?|resolve[sd]?|refs?|see) )?#\d+\)?|https?://\S+", re.I
)
MERGED = re.compile(
    r"Merge (?:pull request|branch|remote|tag|PR)\b.*|Merged? .* into .*|(?:Auto-?)?merge\b.{0,60}", re.IGNORECASE
)
ENTRY = re.compile(r"\x01([0-9a-f]{40,64})\n([0-9a-f ]*)\n(.*?)\x02([^\x01]*)", re.DOTALL)
TRAILER = re.compile(r"^(?:[A-Z][\w-]+-by|Change-Id|Signed-off|Co-authored).*:.*$", re.MULTILINE)
NOT_PYTHON = (SyntaxError, RecursionError)


class _Meaning(ast.NodeTransformer):
    """Drops docstrings and values of version names."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        literal = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if literal else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        return None if any(VERSION_NAME.match(each.id) for each in names) else self.generic_visit(node)


def same_meaning(path: str, one: str, other: str) -> bool:
    """Whether two texts of a file do the same but for docstrings and the version."""
    if one == other or not path.endswith(".py"):
        return one == other
    meanings = [parsed.shape(_Meaning().visit(parsed.parse(text))) for text in (one, other)]
    return meanings[0] == meanings[1]


def _with_version_of(text: str, newer: str) -> str:
    """Return the older text with the newer version written in it, so that tests of the version do not count."""
    line = re.compile(r"""^[ \t]*(?:__)?version\w*[^=\n]*=[ \t]*(["'(].*)$""", re.IGNORECASE | re.MULTILINE)
    values = line.findall(newer)
    later = iter(values if len(line.findall(text)) == len(values) else [])
    return line.sub(lambda match: match[0].replace(match[1], next(later, match[1])), text)


def edits_between(older: Mapping[str, str], newer: Mapping[str, str]) -> tuple[Edit, ...]:
    """Return the files that changed in meaning, tests left out. SyntaxError if one is not Python."""
    edits = []
    for path in sorted({*older, *newer}):
        broken, fixed = older.get(path), newer.get(path)
        if is_test_path(path) or broken == fixed:
            continue
        if broken is not None and fixed is not None:
            if same_meaning(path, broken, fixed):
                continue
            broken = _with_version_of(broken, fixed) if path.endswith(".py") else broken
        edits.append(Edit(path, broken, fixed))
    return tuple(edits)


def _line_count(edits: Sequence[Edit]) -> int:
    """Return how many lines of the solved tree the solution holds, or of the broken one where it only removes."""
    pairs = [(Counter((e.broken or "").splitlines()), Counter((e.fixed or "").splitlines())) for e in edits]
    return sum(max((new - old).total(), (old - new).total()) for old, new in pairs)


def _public_names(texts: Mapping[str, str]) -> set[str]:
    """Return the names that a package offers."""
    files = [Parsed(path, text) for path, text in texts.items() if path.endswith(".py") and not is_test_path(path)]
    return {name for file in files for name, _ in file.definitions if not re.search(r"(^|\.)_", name)}


def _changelog_lines(older: Path, newer: Path) -> list[str]:
    """Return the entries that the newer release's change log has and the older one's has not, as plain sentences."""
    lines: dict[str, None] = {}
    for path in sorted(
        p for p in newer.rglob("*") if CHANGELOG.fullmatch(p.name) and p.suffix != ".py" and p.is_file()
    ):
        before = older / path.relative_to(newer)
        old = set(_entries(parsed.plain_text(before.read_bytes()) or "")) if before.is_file() else set()
        entries = _entries(parsed.plain_text(path.read_bytes()) or "")
        lines |= dict.fromkeys(entry for entry in entries if entry not in old)
    return list(lines)


def _entries(text: str) -> Iterator[str]:
    for match in re.finditer(r"^[ \t]*[-*+•][ \t]+(.+(?:\n(?![ \t]*[-*+•][ \t])[ \t]+\S.*)*)", text, re.MULTILINE):
        entry = LINK.sub(r"\1\2", " ".join(match[1].split()))
        entry = " ".join(MARKS.sub("", REFERENCE.sub("", entry)).split()).strip(" .;:,-")
        if 12 <= len(entry) <= 300 and " " in entry:
            yield entry


def candidate_between(older: Path, newer: Path, sources: Sequence[str], left_out: Counter[str]) -> Candidate | None:
    """Return all of a release's changes as one candidate, of any size; None, and a counted reason, if they make no task."""
    before, after = (parsed.read_texts(tree, parsed.paths_below(tree, sources), left_out) for tree in (older, newer))
    try:
        edits = edits_between(before, after)
        lost = _public_names(before) - _public_names(after)
        spans = solution_spans(edits)
    except NOT_PYTHON:
        left_out["release is not Python of this version"] += 1
        return None
    if not edits or len(lost) > MOST_LOST:
        left_out["release changes no meaning" if not edits else "release drops public names"] += 1
        return None
    about = {"changelog": _changelog_lines(older, newer), **_about(edits)}
    return Candidate("version", ("release",), edits, spans, about)


def _about(edits: Sequence[Edit]) -> dict[str, Any]:
    names = list(dict.fromkeys(span.name for span in solution_spans(edits) if span.name))
    return {"name": names[0] if names else "", "names": names, "path": edits[0].path}


def pieces(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the parts of a release that are small enough: the whole, each file, each run of changed lines."""
    edits = [edit for edit in candidate.edits if edit.path.endswith(".py")]
    groups = [("release", candidate.edits)]
    groups += [("file", (edit,)) for edit in edits] if len(candidate.edits) > 1 else []
    for edit in edits:
        hunks = list(_hunks(edit))
        groups += [("hunk", (hunk,)) for hunk in hunks] if len(hunks) > 1 else []
    for kind, group in groups:
        if _line_count(group) <= MOST_LINES:
            about = _about(group)
            if kind != "release":
                about["changelog"] = _matching(candidate.about.get("changelog", []), about["names"])
            yield Candidate(candidate.generator, (kind,), group, solution_spans(group), {**candidate.about, **about})


def _hunks(edit: Edit) -> Iterator[Edit]:
    """Yield a file with one run of changes undone, all others as in the newer release, where that parses and differs in meaning."""
    if edit.broken is None or edit.fixed is None:
        return
    old, new = edit.broken.splitlines(keepends=True), edit.fixed.splitlines(keepends=True)
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(NEAR // 2):
        inner = [code for code in group if code[0] != "equal"]
        (_, i1, _, j1, _), (_, _, i2, _, j2) = inner[0], inner[-1]
        broken = "".join([*new[:j1], *old[i1:i2], *new[j2:]])
        try:
            if not same_meaning(edit.path, broken, edit.fixed):
                yield Edit(edit.path, broken, edit.fixed)
        except NOT_PYTHON:
            continue


def _matching(entries: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the change-log entries that speak of some definitions."""
    words = {word for name in names for word in [name.split(".")[-1].lower()] if len(word) > 3}
    return [entry for entry in entries if any(word in entry.lower() for word in words)]


class Commit(NamedTuple):
    """A commit, its first parent, and the paths that differ between them. A rename is a removal and an addition."""

    name: str
    parent: str
    message: str
    paths: tuple[str, ...]


def commits(repository: Path, left_out: Counter[str], head: str = "HEAD") -> Iterator[Commit]:
    """Yield the commits from one backwards, along first parents; the one without a parent is counted."""
    opened = repository_of(repository, bare=True)
    words = ("log", "-z", "--first-parent", "--diff-merges=first-parent", "--name-only", "--no-renames", f"--max-count={MOST_COMMITS}",
             "--format=%x01%H%n%P%n%B%x02", head)  # fmt: skip
    done = git(opened, *words) if opened else None
    if done is None or done.returncode:
        raise UserError(f"{repository} is no git repository with a commit; give the folder of one, or install git")
    for name, parents, message, listing in ENTRY.findall(done.stdout.decode(errors="replace").replace("\r\n", "\n")):
        if not parents:
            left_out["commit is the first"] += 1
            continue
        paths = (path.strip("\n") for path in listing.split("\0"))
        yield Commit(name, parents.split()[0], message, tuple(filter(None, paths)))


def _commit_texts(repository: Path, commits: Sequence[str], paths: Sequence[str]) -> list[dict[str, str]]:
    """Return those files that each commit has; ValueError if one is binary or long."""
    texts: list[dict[str, str]] = [{} for _ in commits]
    opened, wanted = repository_of(repository, bare=True), [(i, path) for i in range(len(commits)) for path in paths]
    if opened is None or any("\n" in path for path in paths):
        raise ValueError
    asked = "".join(f"{commits[i]}:{path}\n" for i, path in wanted)
    given = git(opened, "cat-file", "--batch", given=asked.encode(errors="surrogateescape")).stdout
    for i, path in wanted:
        head, _, given = given.partition(b"\n")
        if head.endswith(b" missing"):
            continue
        size = int(head.rpartition(b" ")[2])
        text, given = parsed.plain_text(given[:size]), given[size + 1 :]
        if text is None:
            raise ValueError
        texts[i][path] = text
    return texts


def _undone(repository: Path, commit: Commit, sources: Sequence[str], least: int) -> tuple[Edit, ...] | str:
    """Return the edits of a commit, or why it makes no task."""
    paths = [path for path in commit.paths if parsed.is_below(path, sources) and not is_test_path(path)]
    if not paths or not any(map(is_test_path, commit.paths)):
        return "commit changes no tests" if paths else "commit changes no source"
    if len(commit.paths) > MOST_FILES:
        return "commit changes too many files"
    try:
        edits = edits_between(*_commit_texts(repository, (commit.parent, commit.name), paths))
        solution_spans(edits)
    except ValueError:
        return "commit has a long or binary file"
    except NOT_PYTHON:
        return "commit is not Python of this version"
    if not edits:
        return "commit changes no meaning"
    lines = _line_count(edits)
    return "commit is too large" if lines > MOST_LINES else "commit is too small" if lines < least else edits


def candidates(
    repository: Path, sources: Sequence[str], left_out: Counter[str], least: int = 0, head: str = "HEAD"
) -> Iterator[Candidate]:
    """Yield the commits of a repository that make tasks, the newest first, undone; the others are counted by reason."""
    for commit in commits(repository, left_out, head):
        edits = _undone(repository, commit, sources, least)
        if isinstance(edits, str):
            left_out[edits] += 1
            continue
        subject, body = _told(commit.message)
        about = {"commit": commit.name, "parent": commit.parent, "subject": subject, "body": body,
                 "tests": [path for path in commit.paths if is_test_path(path)], **_about(edits)}  # fmt: skip
        yield Candidate("history", ("commit",), edits, solution_spans(edits), about)


def _told(message: str) -> tuple[str, str]:
    """Return the first line of a message and the rest, without what only names commits, reports and people.

    Of a merged branch, the line that its author gave it counts.
    """
    lines = [line.strip() for line in DEAD_WORDS.sub("", TRAILER.sub("", message)).strip().splitlines()]
    while lines and (not lines[0] or MERGED.fullmatch(lines[0])):
        lines.pop(0)
    return " ".join("".join(lines[:1]).split()).strip(" .:"), "\n".join(lines[1:]).strip()
