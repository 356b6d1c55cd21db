"""Calls as JSON: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen's templates and sprout's teach them."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from etude.agent.calls import Call
from etude.agent.formats.reading import Found

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE, _CLOSING = re.compile(r"\s*"), re.compile(rf"\s*{CLOSE}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class JsonCalls:
    """The value is read first and its end after it: a string in it may well spell the closing mark."""

    name = "json"

    def find(self, text: str, start: int) -> Found | None:
        """Return the first call."""
        begin = text.find(OPEN, start)
        if begin < 0:
            return None
        try:
            value, end = _DECODER.raw_decode(text, _SPACE.match(text, begin + len(OPEN)).end())  # type: ignore[union-attr]
            closing = _CLOSING.match(text, end)
            if closing is None:
                return Found(begin, behind_fault(text, begin), f"a call has no {CLOSE} behind its JSON")
            return Found(begin, closing.end(), _call(value))
        except RecursionError:
            fault = "a call is nested too deeply"
        except ValueError as error:
            fault = f"a call is not JSON: {str(error)[:80]}"
        return Found(begin, behind_fault(text, begin), fault)

    def render(self, call: Call) -> str:
        """Return a call as JSON."""
        written = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"{OPEN}\n{written}\n{CLOSE}"


def behind_fault(text: str, begin: int) -> int:
    """Return where reading goes on after a call that cannot be read: behind its closing mark, or at the next call."""
    closed, opened = text.find(CLOSE, begin), text.find(OPEN, begin + len(OPEN))
    ends = [closed + len(CLOSE)] * (closed >= 0) + [opened] * (opened >= 0)
    return min(ends, default=len(text))


def _call(value: Any) -> Call | str:
    if not (isinstance(value, dict) and value.keys() <= {"name", "arguments"} and isinstance(value.get("name"), str)):
        return 'a call is not {"name": …, "arguments": {…}}'
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name'][:40]!r} are not an object"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"a call of {value['name'][:40]!r} holds half a character (a lone surrogate)"
    return Call(value["name"], arguments)
