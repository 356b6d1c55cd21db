"""Conversations in OpenAI's format, checked when they are read: a fault found in training would cost the run."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, Json, ValidationError, model_validator

from etude.data.heldout import choose_heldout
from etude.data.settings import Settings as Strict
from etude.errors import UserError, one_line
from etude.files import canonical_json, digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class _Function(Strict):
    name: str = Field(min_length=1)
    arguments: Json[dict[str, Any]] | dict[str, Any] = Field(default_factory=dict)  # on the wire it is text


class _Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Line(BaseModel):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Line:
        open_calls = 0
        for message in self.messages:
            open_calls = open_calls - 1 if message.role == "tool" else len(message.tool_calls or [])
            if open_calls < 0:
                raise ValueError("a tool message without a call before it")
            if message.role == "assistant" and not (message.content or open_calls):
                raise ValueError("an assistant message with neither content nor tool_calls")
        if all(message.role != "assistant" for message in self.messages):
            raise ValueError("no assistant message, so nothing to learn")
        functions = [tool.get("function") for tool in self.tools or []]
        if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
            raise ValueError('a tool that is not {"type": "function", "function": {"name": …}}')
        canonical_json(self.model_dump())  # raises ValueError for NaN, which JSON does not have
        return self


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates expect them: `content` is always text, the arguments of a call always an object."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    origin: str = ""  # where it is from, for errors
    group: str = ""  # what is held out together, such as all that was made from one file; empty: only itself

    @cached_property
    def digest(self) -> str:
        """Digest of all that a template can see."""
        return digest_of([self.messages, self.tools])


def read_conversations(path: Path) -> list[Conversation]:
    """Read JSONL, plain or .gz: on each line {"messages": […], "tools": […]}, the tools if there are any."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"conversations cannot be read from {path}: {one_line(error)}") from None
    if not lines:
        raise UserError(f"{path} is empty; write one conversation a line")
    return [_conversation(line, f"{path}, line {number}") for number, line in lines]


def _conversation(line: bytes, origin: str) -> Conversation:
    try:
        row = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # without the names of types
        raise UserError(
            f"{origin}: {f'{place} ' if place else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None
    messages = [{**each.model_dump(exclude_none=True), "content": each.content or ""} for each in row.messages]
    return Conversation(messages, row.tools or [], origin)


def split(every: Sequence[Conversation], share: float, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return those to train on and those held out, about `share` of all, in whole groups and chosen by their content."""
    groups = [each.group or each.digest for each in every]
    held = choose_heldout({"chat": Counter(groups)}, share, seed)
    train = [each for each, group in zip(every, groups, strict=True) if group not in held]
    return train, [each for each, group in zip(every, groups, strict=True) if group in held]
