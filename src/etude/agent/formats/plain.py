"""Calls as raw text, for models that were taught none: nothing is escaped, so code is written as it is.

    @edit
    path: src/a.py
    old<<END
    any text
    END
    new<<END
    …
    END
    @end

A value without a newline stands behind `name: `, exactly as it is; any other between `name<<MARK` and the line `MARK`, the first of
END, END1, END2 … that is no line of the value. So writing and reading are inverses for every string. A line such as `@property`
in quoted code is no call: arguments or `@end` must follow.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from etude.agent.calls import Call, ToolSpec
from etude.agent.formats.reading import Found

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_HEAD = re.compile(rf"^@({_NAME})[ \t\r]*$", re.MULTILINE)
_ARGUMENT = re.compile(rf"({_NAME})(?::[ ]?([^\n]*)|<<([A-Za-z0-9_]+))(?:\n|\Z)")
_END = re.compile(r"@end[ \t\r]*(?:\n|\Z)")
HOW = """To use a tool, write a call like this, on lines of its own; several calls may follow each other:

@tool
name: a value that fits on one line
other<<END
a value
of several lines
END
@end

If a line of the value is END, write END1 (or END2 …) instead, both times. Nothing is escaped. Tools:"""


class PlainCalls:
    """All values are text."""

    name = "plain"

    def find(self, text: str, start: int) -> Found | None:
        """Return the first call."""
        for head in _HEAD.finditer(text, start):
            if head[1] != "end" and (found := _read(text, head)):
                return found
        return None

    def render(self, call: Call) -> str:
        """Return a call as text."""
        return "\n".join(
            [f"@{call.name}", *(_written(name, str(value)) for name, value in call.arguments.items()), "@end"]
        )

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        """Return how calls are written, and what there is to call."""
        lines = [HOW]
        for tool in tools:
            lines.append(f"@{tool.name}: {tool.about}")
            for each in tool.parameters:
                kind = ["a number"] * (each.kind is int) + ["optional"] * (not each.required)
                lines.append(f"  {each.name}{' (' * bool(kind)}{', '.join(kind)}{')' * bool(kind)}: {each.about}")
        return "\n".join(lines) if tools else ""


def _written(name: str, value: str) -> str:
    if "\n" not in value:
        return f"{name}: {value}"
    lines = set(value.split("\n"))
    mark = next(mark for number in itertools.count() if (mark := f"END{number or ''}") not in lines)
    return f"{name}<<{mark}\n{value}\n{mark}"


def _read(text: str, head: re.Match[str]) -> Found | None:
    """Return the call that a line `@name` begins, if it does begin one."""
    arguments: dict[str, str] = {}
    begun = at = head.end() + 1
    fault = ""
    while not fault:
        if end := _END.match(text, at):
            return Found(head.start(), end.end(), Call(head[1], arguments))
        if not (argument := _ARGUMENT.match(text, at)):
            line = text[at:].partition("\n")[0]
            fault = f"a call of {head[1][:40]!r} has no " + (f"argument {line[:60]!r}" if line else "@end")
            break
        name, value, mark = argument.groups()
        at = argument.end()
        if mark:
            closing = re.compile(rf"^{mark}$", re.MULTILINE).search(text, at)
            if closing is None:
                fault = f"the value of {name[:40]!r} has no line {mark[:40]} behind it"
                break
            value, at = text[at : max(at, closing.start() - 1)], closing.end() + 1
        if name in arguments:
            fault = f"a call of {head[1][:40]!r} gives {name[:40]!r} twice"
        arguments[name] = value
    after = _HEAD.search(text, at)
    ends = after is not None and after[1] == "end"
    if at == begun < len(text) and not ends:
        return None
    return Found(head.start(), len(text) if after is None else after.end() if ends else after.start(), fault)
