"""Compaction: when the context grows too long, the policy writes a summary and continues from it.

The request is very short, as in Composer 2: what a good summary holds is learnt, not prompted. The policy may think, then writes; its
context begins anew with the system prompt, the task, its summary and the state of the conversation (plan, open items, how many
summaries there were). Two baselines to compare with: a long prompted summary, and dropping the oldest turns.
This file decides; the harness acts.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field, model_validator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from etude.agent.trace import Node

PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8"))
KINDS = "on a full context: summary (self: short prompt; prompted: long), truncate the oldest turns, or end (none)"


class SummarySettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """When and how a context begins anew."""

    kind: Literal["self", "prompted", "truncate", "none"] = Field(default="self", description=KINDS)
    trigger: int = Field(default=8192, ge=64, description="context length in tokens that triggers compaction")
    trigger_to: int | None = Field(default=None, description="upper end of a random trigger; none: always `trigger`")
    tokens: int = Field(default=1024, ge=1, description="limit of tokens in a summary, thinking included")
    most: int = Field(default=20, ge=0, description="limit of compactions in an episode")
    keep: float = Field(default=0.5, gt=0, lt=1, description="truncate: share of the trigger that remains")

    @model_validator(mode="after")
    def _is_a_range(self) -> SummarySettings:
        if self.trigger_to is not None and self.trigger_to < self.trigger:
            raise ValueError(f"trigger_to = {self.trigger_to} is below trigger = {self.trigger}")
        return self

    @property
    def request(self) -> str:
        return PROMPTS["summarise_in_sections" if self.kind == "prompted" else "summarise"]

    def due(self, length: int, trigger: int, context: int) -> bool:
        """Whether a context of this length begins anew: it has reached the trigger drawn for it, or leaves no room to sum up."""
        return self.kind != "none" and length >= min(trigger, context - self.tokens)

    def draw(self, random: Random) -> int:
        """Return the number of tokens at which the context begins anew next time."""
        return self.trigger if self.trigger_to is None else random.randint(self.trigger, self.trigger_to)


def state_text(plan: str, restarts: int) -> str:
    """Return the message after a summary: the plan is the harness's, so no summary can lose it."""
    state = f"This is your summary of the work so far (number {restarts}). The files are as you left them.\n\n"
    return state + (f"Your to-do list:\n{plan}\n\n" if plan else "") + "Go on."


def kept_from(nodes: Sequence[Node], path: Sequence[int], budget: int) -> int:
    """Return from which place of the path on turns are kept when the oldest are dropped: whole turns, as many as fit, at least one.

    What is kept begins with a sampled turn, so that it can follow the opening.
    """
    places = [place for place in range(1, len(path)) if nodes[path[place]].kind == "turn"]
    sizes = {place: sum(len(nodes[each].tokens) for each in path[place:]) for place in places}
    return next((place for place in places if sizes[place] <= budget), places[-1])
