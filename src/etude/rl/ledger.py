"""The ledger: the events of a run, one line of JSON each, and the only thing the orchestrator remembers.

    Opened → Finished or Failed, an episode each → Closed → Batched → Trained

State is what these lines add up to (state.py). They are flushed to the disk, as many as there are at once, before anything outside
builds on them, so a kill at any moment loses at most what was not yet written. A torn last line is passed over (jsonl.py). A line
that is whole and yet makes no sense was not torn by us: going on would forget events, so the run stops and names the line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from etude.errors import UserError
from etude.files import canonical_json
from etude.jsonl import append_line, read_lines

if TYPE_CHECKING:
    from pathlib import Path

Fate = Literal["ready", "flat", "void"]  # to be trained on; all rewards alike; fewer than two episodes were valid


@dataclass(frozen=True)
class Opened:
    """A group began."""

    group: int  # from 0, in the order of beginning
    task: str
    epoch: int
    again: int = 0  # how often this task was given back before in this epoch


@dataclass(frozen=True)
class Finished:
    """An episode was scored; its trace lies in `episode_file(folder, group, episode)`."""

    group: int
    episode: int  # from 0
    outcome: Literal["pass", "fail"]
    parts: dict[str, float]  # of the reward, without weights
    behaviour: dict[str, float]
    oldest: int  # version of the weights that sampled its first token, at least
    newest: int
    sampled: int  # tokens
    turns: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The infrastructure failed. `final`: it is not tried again and the group goes without it."""

    group: int
    episode: int
    cause: str
    final: bool


@dataclass(frozen=True)
class Closed:
    """All episodes of a group are finished or finally failed. `rewards` by episode, weighted as it was then."""

    group: int
    fate: Fate
    rewards: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stale:
    """A ready group was too old to be trained on: it is dropped, and its task goes back."""

    group: int


@dataclass(frozen=True)
class Batched:
    """A step was given to the trainer."""

    step: int  # from 1
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """A step was trained, and its weights published."""

    step: int
    version: int


@dataclass(frozen=True)
class Weighted:
    """The weights of the reward's parts were set: at the beginning, and whenever a user changes them."""

    weights: dict[str, float]
    step: int  # the first one they may reach


Event = Opened | Finished | Failed | Closed | Stale | Batched | Trained | Weighted


KINDS: dict[str, TypeAdapter[Event]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Event)}
FIELDS = {kind.__name__: {"event", *(each.name for each in fields(kind))} for kind in get_args(Event)}


def to_line(event: Event) -> bytes:
    """Return an event as a line of JSON. A cause may quote a file name that is no text: that must not end the run."""
    return canonical_json({"event": type(event).__name__, **asdict(event)}).encode(errors="replace") + b"\n"


def from_line(line: bytes) -> Event:
    """Return the event of a line. Raise ValueError saying why it is none."""
    values: Any = json.loads(line)
    name = values.get("event") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"{name!r} is no known event")
    if unlike := FIELDS[name] ^ values.keys():
        raise ValueError(f"{name} lacks or does not know {', '.join(sorted(unlike))}")
    try:
        return KINDS[name].validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class Ledger:
    """Appends and reads. One process appends; any may read meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[Event], int]:
        """Return all events, and the bytes of a torn last line."""
        lines, torn = read_lines(self.path, missing_ok=True)
        events: list[Event] = []
        for number, line in enumerate(lines, 1):
            try:
                events.append(from_line(line))
            except ValueError as error:
                advice = "the file was changed or is of another version of Etude; begin in a new folder"
                raise UserError(f"line {number} of {self.path} is damaged: {error}; {advice}") from None
        return events, torn

    def append(self, *events: Event) -> None:
        """Write events; when this returns they survive a power cut. When it raises, nothing was written."""
        append_line(self.path, b"".join(map(to_line, events)), durable=True)
