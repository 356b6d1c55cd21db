"""What happens in a run, one line of JSON an event: the only memory of the orchestrator.

    Opened → Finished or Failed, an episode each → Closed → Batched → Trained

State is what these lines add up to (state.py), so a kill at any moment loses at most what was not yet written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
    """The machinery failed. `final`: it is not tried again and the group goes without it."""

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
