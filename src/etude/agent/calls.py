"""The parts of one turn, calls and their answers: the interface between the formats of calls and everything that uses them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    tokens: dict[str, int] = field(default_factory=dict)  # by kind: thinking, calls, said; adds up to those sampled


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
