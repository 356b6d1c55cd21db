"""What one attempt was asked, and what it left, in the terms of the axes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from etude.agent.changes import content_of, under
from etude.rewards.interaction import Premise
from etude.sandbox.box import Entry
from etude.tasks.prompts import suspects
from etude.tasks.seal import FOLDERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.rewards.diffs import Change
    from etude.tasks.task import Style, Task

MOST_BYTES = 1 << 20  # of a file that is compared: an agent may write a gigabyte


def asked(task: Task, style: Style) -> tuple[Style, str]:
    """Return a task's request in a style, or in the first it has."""
    return min(task.prompts.items(), key=lambda pair: pair[0] != style)


def premise_of(task: Task, style: Style, prompt: str) -> Premise | None:
    """Return what a request with a wrong premise blames, as far as its words tell, and what is at fault."""
    words = set(re.findall(r"\w+", prompt))
    blamed = tuple(name for name in suspects(task.candidate) if name.rpartition(".")[2] in words)
    names = tuple(span.name for span in task.candidate.spans if span.name)
    return Premise(blamed, names or tuple(edit.path for edit in task.candidate.edits)) if style == "premise" else None


def own_changes(entries: Sequence[Entry], layers: Sequence[Path]) -> list[Entry]:
    """Return the files an agent changed: a folder that went is what was in it; caches, which no user would commit, are none.

    Of long files the beginning stands for the whole.
    """
    found = []
    for entry in entries:
        if entry.kind == "folder" or FOLDERS & set(entry.path.split("/")):
            continue
        if entry.kind != "gone":
            found.append(replace(entry, content=(entry.content or b"")[:MOST_BYTES]))
            continue
        inside = [(layer, path) for layer in layers for path in (layer / entry.path).rglob("*") if path.is_file()]
        gone = {path.relative_to(layer).as_posix() for layer, path in inside} or {entry.path}
        found += [Entry(path, "gone") for path in sorted(gone)]
    return found


def change_of(entries: Sequence[Entry], layers: Sequence[Path]) -> Change:
    """Return changed files before and after, as text; what is none is read as if it were."""
    found = {}
    for entry in entries:
        before = under(layers, entry.path)
        old = None if before is None else content_of(before)[:MOST_BYTES].decode("utf-8", "replace")
        new = None if entry.kind == "gone" else (entry.content or b"").decode("utf-8", "replace")
        if old != new:
            found[entry.path] = old, new
    return found
