"""The reference solution as an agent would carry it out: calls of the tools, each of which is sure to be accepted."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from etude.agent.calls import Call
from etude.tasks.replacements import changes

if TYPE_CHECKING:
    from etude.tasks.task import Task


def solution_calls(task: Task) -> list[Call]:
    """Return the calls that turn the tree an agent sees into the solved one, hidden tests excepted."""
    calls: list[Call] = []
    for edit in task.candidate.edits:
        if edit.fixed is None:
            calls.append(Call("shell", {"command": f"rm -- {shlex.quote(edit.path)}"}))
        elif (
            not (edit.broken or "").strip() or "\r" in f"{edit.broken}{edit.fixed}"
        ):  # `edit` chooses ends of lines itself
            calls.append(Call("write", {"path": edit.path, "content": edit.fixed}))
        else:
            calls += [change.call() for change in changes(edit.path, str(edit.broken), edit.fixed)]
    return calls
