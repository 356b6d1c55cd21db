"""Calls as tags, values as raw text: `<function=…><parameter=…>`, as Qwen3-Coder's template teaches them.

A newline behind an opening and before a closing tag is the tag's. A value ends at a `</parameter>` that another parameter or the
end of the function follows, so it may spell one itself.
"""

from __future__ import annotations

import json
import re

from etude.agent.calls import Call
from etude.agent.formats.json_calls import CLOSE, OPEN, behind_fault
from etude.agent.formats.reading import Found

_CALL = re.compile(rf"{OPEN}\s*<function=([^<>\s]+)>(.*?)</function>\s*{CLOSE}", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class TagCalls:
    """All values are text."""

    name = "tags"

    def find(self, text: str, start: int) -> Found | None:
        """Return the first call."""
        begin = text.find(OPEN, start)
        if begin < 0:
            return None
        call = _CALL.match(text, begin)
        if call is None:
            return Found(begin, behind_fault(text, begin), f"a call is not <function=…>…</function> up to {CLOSE}")
        name, body = call.groups()
        arguments, at = {}, 0
        while parameter := _PARAMETER.match(body, at):
            arguments[parameter[1]], at = parameter[2], parameter.end()
        if body[at:].strip():
            return Found(begin, call.end(), f"a call of {name[:40]!r} holds more than <parameter=…>…</parameter>")
        return Found(begin, call.end(), Call(name, arguments))

    def render(self, call: Call) -> str:
        """Return a call as tags."""
        values = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in call.arguments.items()
        }
        body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"{OPEN}\n<function={call.name}>\n{body}</function>\n{CLOSE}"
