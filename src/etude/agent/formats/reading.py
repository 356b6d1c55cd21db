"""Sampled text taken apart: thinking, calls, and what is said besides. What comes first decides: a call in thinking is none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from etude.agent.calls import Call, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Found:
    """A call in a text, or what is wrong with it in one line."""

    start: int
    end: int
    made: Call | str


class Style(Protocol):
    """How calls are written: one a file."""

    name: str

    def find(self, text: str, start: int) -> Found | None:
        """Return the first call at `start` or behind it."""
        ...

    def render(self, call: Call) -> str:
        """Return a call as it is to be written."""
        ...


def read_turn(text: str, style: Style, tokens_up_to: Callable[[int], int], *, in_thinking: bool) -> Turn:
    """Take a turn apart. `tokens_up_to`: how many tokens lie wholly before a place; one across a border counts behind it."""
    parts: dict[str, list[str]] = {"thinking": [], "said": []}
    calls, malformed, tokens, counted = [], [], Counter(thinking=0, calls=0, said=0), 0
    for start, end, what in sections(text, style, in_thinking=in_thinking):
        before, counted = counted, tokens_up_to(end)
        if isinstance(what, str):
            parts[what].append(text[start:end])
        elif isinstance(what.made, Call):
            calls.append(what.made)
        else:
            malformed.append(what.made)
        tokens[what if isinstance(what, str) else "calls"] += counted - before
    thoughts = [part.removeprefix(THINK).removesuffix(THOUGHT).strip() for part in parts["thinking"]]
    return Turn("\n".join(thoughts), "".join(parts["said"]).strip(), tuple(calls), tuple(malformed), tokens)


def sections(text: str, style: Style, *, in_thinking: bool) -> Iterator[tuple[int, int, str | Found]]:
    """Yield where each section begins and ends, and what it is; together they are the text."""
    at, found = 0, style.find(text, 0)
    while at < len(text):
        if found and found.start < at:
            found = style.find(text, at)
        think = at if in_thinking else text.find(THINK, at)
        what: str | Found = "said"
        start = end = len(text)
        if think >= 0 and (found is None or think <= found.start):
            closed = text.find(THOUGHT, think)
            start, what = think, "thinking"
            end = closed + len(THOUGHT) if closed >= 0 else len(text)
        elif found:
            start, end, what = found.start, found.end, found
        if start > at:
            yield at, start, "said"
        if end > start:
            yield start, end, what
        at, in_thinking = end, False
