"""SWE-bench rows: a set written as them, and rows read as tasks, given the codebase they are about.

`patch` is the solution, from the broken tree to the solved one; `test_patch` brings the hidden tests back. Rows of SWE-smith, whose
`patch` makes the error, are read with `reverse`.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import write_text
from etude.tasks.generators.parsed import is_test_path, solution_spans
from etude.tasks.score import visible
from etude.tasks.task import Candidate, Edit, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from etude.tasks.manifest import TaskSet
    from etude.tasks.suite import Ready
    from etude.tasks.task import StoredStyle

NO_NEWLINE = "\\ No newline at end of file"
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")


def diff(path: str, before: str | None, after: str | None) -> str:
    """Return a unified diff of one file, as git writes it."""
    names = ["/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}"]
    lines = difflib.unified_diff(_split(before or ""), _split(after or ""), names[0], names[1])
    body = "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{body}" if body else ""


def _split(text: str) -> list[str]:
    """Return lines that end at newlines only: a form feed in a line is no end of it."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


@dataclass
class Hunk:
    """Lines of a file that give way to others; where they begin, counted from 0, in the file before and after."""

    starts: tuple[int, int]
    sides: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))


def hunks(patch: str) -> Iterator[tuple[str | None, str | None, list[Hunk]]]:
    """Yield of each file of a diff the path before, the path after, and its hunks."""
    for part in re.split(r"^(?=diff --git )|^(?=--- (?!.*\n[^+]))", patch, flags=re.MULTILINE):
        head = re.match(r"--- (?:a/)?([^\t\n]+).*\n\+\+\+ (?:b/)?([^\t\n]+).*\n", part)
        if head:
            before, after = (None if name == "/dev/null" else name for name in head.groups())
            yield before, after, _parsed(part[head.end() :])


def _parsed(text: str) -> list[Hunk]:
    found: list[Hunk] = []
    sign = " "
    for line in _split(text):
        at = HUNK.match(line)
        if at:
            found.append(Hunk((int(at[1]) - (at[2] != "0"), int(at[3]) - (at[4] != "0"))))
        sign = line[0] if line[0] in " -+" else sign
        sides = (
            [side for side, own in zip(found[-1].sides, "-+", strict=True) if sign in (" ", own)]
            if found and not at
            else []
        )
        for side in sides:
            if line[0] == "\\":  # the line before has no newline
                side[-1] = side[-1].removesuffix("\n")
            elif line[0] in " -+":
                side.append(line[1:])
    return found


def applied(text: str, changes: Iterable[Hunk], *, reverse: bool = False) -> str:
    """Return a text with hunks applied, or undone; UserError where it is not as they say."""
    lines = _split(text)
    for hunk in sorted(changes, key=lambda each: each.starts, reverse=True):
        at, (before, after) = hunk.starts[reverse], hunk.sides[::-1] if reverse else hunk.sides
        if lines[at : at + len(before)] != before:
            raise UserError(f"the patch does not fit: from line {at + 1} on the file is not what it says")
        lines[at : at + len(before)] = after
    return "".join(lines)


def row_of(task: Task, codebase: Ready) -> dict[str, Any]:
    """Return a task as a row."""
    patch = "".join(diff(edit.path, edit.broken, edit.fixed) for edit in task.candidate.edits)
    solution = {edit.path for edit in task.candidate.edits}
    seen = [entry for entry in visible(task, codebase) if entry.path not in solution]
    tests = [
        diff(each.path, (each.content or b"").decode(), (codebase.tree / each.path).read_bytes().decode())
        for each in seen
    ]
    prompt = task.prompts.get("terse") or next(iter(task.prompts.values()), "")
    return {"repo": f"pypi/{task.package}", "instance_id": task.id, "base_commit": codebase.digest, "patch": patch,
            "test_patch": "".join(tests), "problem_statement": prompt, "hints_text": "", "created_at": "", "version": task.version,
            "FAIL_TO_PASS": json.dumps(task.fail_to_pass), "PASS_TO_PASS": json.dumps(task.pass_to_pass),
            "environment_setup_commit": codebase.digest}  # fmt: skip


def write_rows(tasks: TaskSet, path: Path) -> None:
    """Write a set as rows."""
    rows = [row_of(task, tasks.codebase(task)) for task in tasks.tasks]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def task_of_row(row: dict[str, Any], codebase: Ready, *, reverse: bool = False) -> Task:
    """Return a row's task; the codebase's tree is the solved one. `reverse`: its patch makes the error."""
    edits = []
    for before, after, changes in hunks(row["patch"]):
        path, (broken_path, solved_path) = str(after or before), (after, before) if reverse else (before, after)
        if not is_test_path(path):
            solved = (codebase.tree / path).read_bytes().decode() if solved_path else None
            broken = applied(solved or "", changes, reverse=not reverse) if broken_path else None
            edits.append(Edit(path, broken, solved))
    lists = [
        tuple(json.loads(value) if isinstance(value, str) else value)
        for value in (row["FAIL_TO_PASS"], row["PASS_TO_PASS"])
    ]
    candidate = Candidate("history", ("swe-bench",), tuple(edits), solution_spans(edits))
    said: dict[StoredStyle, str] = {"terse": row["problem_statement"]}
    return Task(
        row["instance_id"], codebase.name, codebase.version, candidate, said, lists[0], lists[1], (), "debugging"
    )
