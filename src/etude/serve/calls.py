"""Tool calls in sampled text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as ChatML templates teach them.

A call that is not well formed stays text, so that whoever reads it can say so to the model. White space around calls is theirs.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

from pydantic_core import from_json

from etude.serve.text import begun

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """One call."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


class CallReader:
    """Takes the calls out of a text while it comes."""

    def __init__(self) -> None:
        self.held = ""
        self.found = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Return the text between calls and the calls that are certain now."""
        self.held += text
        said, calls = "", []
        while (end := self.held.find(CLOSE)) >= 0:
            start = self.held.rfind(OPEN, 0, end)
            call = parse_call(self.held[start + len(OPEN) : end]) if start >= 0 else None
            if call is None:
                said += self.held[: end + len(CLOSE)]
            else:
                said += self.held[:start].rstrip()
                calls.append(call)
            self.held = self.held[end + len(CLOSE) :]
        self.found += len(calls)
        opened = self.held.find(OPEN)
        if opened < 0:  # what white space and a begun mark at the end belong to is not known yet
            opened = len(self.held) - begun(self.held, OPEN)
        certain = len(self.held[:opened].rstrip())
        said, self.held = said + self.held[:certain], self.held[certain:]
        return said, calls

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.found and self.held.isspace() else self.held


def parse_call(text: str) -> Call | None:
    """Return a call, if this is one."""
    try:
        made = from_json(text.strip(), allow_inf_nan=False)
    except ValueError:
        return None
    if not (isinstance(made, dict) and made.keys() <= {"name", "arguments"} and isinstance(made.get("name"), str)):
        return None
    arguments = made.get("arguments", {})
    return Call(made["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
