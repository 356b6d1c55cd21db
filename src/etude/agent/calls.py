"""What a policy said in one turn, taken apart: the seam between the formats of calls and everything that uses them.

A format turns talk into tokens and tokens into talk. It only ever appends: what was sampled stays as it was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Call:
    """One call of a tool, arguments as they were written."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """What one sampled turn says."""

    thinking: str
    said: str  # outside of thinking and calls
    calls: tuple[Call, ...]
    malformed: tuple[str, ...] = ()  # one line each: what is wrong with a call that could not be read
    tokens: Mapping[str, int] = field(default_factory=dict)  # by kind: thinking, calls, said; adds up to those sampled


@dataclass(frozen=True)
class Answer:
    """What a tool answered."""

    call: Call
    text: str
    failed: bool = False
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)  # for traces and rewards, never shown to the policy


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool."""

    name: str
    kind: type[str | int]
    about: str
    required: bool = True


@dataclass(frozen=True)
class ToolSpec:
    """What a policy is told about a tool."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]


class Format(Protocol):
    """How talk is written for one model."""

    name: str
    stop_tokens: frozenset[int]  # each ends a turn

    def opening(self, system: str, tools: Sequence[ToolSpec], task: str) -> list[int]:
        """Return the tokens up to where the policy's first turn begins."""
        ...

    def following(self, last: Sequence[int], messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens after a turn (`last`: its tokens, ended or cut off) up to the next one.

        Messages are (role, text): role "tool" for answers, "user" for what the harness asks; mixed in one call, in this order.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in an assistant's turn, without its end; special tokens spelt in it stay text."""
        ...

    def close_thinking(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that end the thinking a turn is in the midst of; none if it is not."""
        ...

    def read(self, tokens: Sequence[int]) -> Turn:
        """Take a sampled turn apart."""
        ...

    def write(self, *calls: Call, said: str = "", thinking: str = "") -> str:
        """Return a turn's text without its end, as this model is to write it: for scripts and examples."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, for people."""
        ...
