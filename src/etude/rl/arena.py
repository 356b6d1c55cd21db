"""Where episodes are played: the seam between the loop, which knows groups and weights, and whatever a task is.

`TaskArena` (task_arena.py) plays coding tasks in sandboxes. Tests and other domains bring arenas of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.agent.calls import Format
    from etude.agent.trace import Trace
    from etude.inference.policy import Policy


@dataclass(frozen=True)
class Item:
    """A task as the loop sees it. `kin`: what tasks that are alike have in common; hardness is learnt of those."""

    id: str
    kin: str = ""


@dataclass(frozen=True)
class Played:
    """An episode that ended by itself, at a limit, or malformed: whatever the policy did, it is scored."""

    trace: Trace  # `rewards` holds the parts, without weights
    outcome: Literal["pass", "fail"]
    behaviour: dict[str, float] = field(default_factory=dict)  # what monitors watch


class Infrastructure(Exception):  # noqa: N818 - whose fault it is
    """The machinery failed, not the policy: the episode is excluded and counted, never scored as 0. Its text is the cause."""


class Arena(Protocol):
    """Plays episodes, many at once."""

    @property
    def items(self) -> Sequence[Item]:
        """Return all tasks."""
        ...

    async def play(self, item: str, policy: Policy, talk: Format, *, name: str, seed: int, memory: Path) -> Played:
        """Play one episode. `memory`: a file for what it may need after a kill; the same arguments then go on from it.

        Raise Infrastructure if the machinery fails. Cancelled, nothing it started is left behind.
        """
        ...
