"""Requests that point at the code, for models that are too small to find it: made from a task when they are asked for, not stored.

`shown` names the file and shows the broken code; what is wrong with it is for the agent to see. `told` dictates the change, as
users do for small things: what is left is to call the tools and to copy exactly. Neither is what the benchmark is about, and a
result says by which style it was made. They are there because nothing is learnt from tasks that are never solved.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import TYPE_CHECKING, cast, get_args

from etude.tasks.generators.parsed import Parsed, changed_lines
from etude.tasks.prompts import templates
from etude.tasks.replacements import changes
from etude.tasks.task import Edit, PointedStyle, Style

if TYPE_CHECKING:
    from etude.tasks.task import Task

MOST_TOLD, MOST_PIECES = 1_200, 4  # characters that are dictated, in how many places
AND_ALSO = "\nand also\n```\n{old}\n```\nby\n```\n{new}\n```"
MOST_SHOWN = 40  # lines of a function; of a longer one, those around the change


def asked(task: Task, style: Style) -> tuple[Style, str]:
    """Return a task's request in a style, or in the first it has."""
    if style in get_args(PointedStyle):
        if text := pointed(task, cast("PointedStyle", style)):
            return style, text
        style = "terse"
    return min(task.prompts.items(), key=lambda pair: pair[0] != style)


def pointed(task: Task, style: PointedStyle) -> str | None:
    """Return the request that points at the code; None where the solution is in several files, or too long."""
    if len(task.candidate.edits) != 1:
        return None
    facts = _told(task.candidate.edits[0]) if style == "told" else _shown(task.candidate.edits[0])
    if facts is None:
        return None
    observed = re.search(r"(?m)^Observed: (.+)$", task.prompts.get("full", ""))
    said = {"seen": f" {observed[1].rstrip('.')}." if observed else "", **facts}
    rng = random.Random(f"{task.id} {style}")  # noqa: S311 - draws words
    return rng.choice(templates()[task.split][style]).format(**said) + facts.get("more", "")


@lru_cache(maxsize=4096)
def _told(edit: Edit) -> dict[str, str] | None:
    """Return what gives way to what, in pieces that the file has once."""
    if edit.broken is None or edit.fixed is None:
        return None
    made = [(each.old or "", each.new or "") for each in changes(edit.path, edit.broken, edit.fixed)]
    if len(made) > MOST_PIECES or not all(old and new for old, new in made) or len(str(made)) > MOST_TOLD:
        return None
    more = "".join(AND_ALSO.format(old=old, new=new) for old, new in made[1:])
    return {"path": edit.path, "old": made[0][0], "new": made[0][1], "more": more}


@lru_cache(maxsize=4096)
def _shown(edit: Edit) -> dict[str, str] | None:
    """Return the function that is wrong, or the lines around what is."""
    if edit.broken is None or edit.fixed is None or not edit.path.endswith(".py"):
        return None
    file = Parsed(edit.path, edit.broken)
    spans = changed_lines(edit.fixed, edit.broken)
    lines = edit.broken.splitlines(keepends=True)
    first, last = max(1, min(span[0] for span in spans)), max(span[1] for span in spans)
    around = [
        (file.first_line(node), node.end_lineno or 0, name)
        for name, node in file.definitions
        if file.first_line(node) <= first and last <= (node.end_lineno or 0)
    ]
    begin, end, name = min(around, key=lambda each: each[1] - each[0], default=(1, len(lines), edit.path))
    if end - begin >= MOST_SHOWN:
        begin, end = max(begin, first - MOST_SHOWN // 2), min(end, first + MOST_SHOWN // 2)
    if last > end:
        return None
    return {"path": edit.path, "name": name, "code": "".join(lines[begin - 1 : end]).rstrip("\n") + "\n"}
