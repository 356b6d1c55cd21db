"""What happens when the context grows too long: the policy sums up for itself, and goes on from its summary.

The request is very short, as in Composer 2: what a good summary holds is learnt, not prompted. The policy may think, then writes; its
context begins anew with the system prompt, the task, its summary and the state of the conversation (plan, open items, how many
summaries there were). Two baselines to compare with: a long prompted summary, and dropping the oldest turns.
This file decides; the harness acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from etude.agent.trace import Node

SHORT = "Summarise the conversation so far. You will continue from your summary alone."
LONG = """Your context is full. Write a summary that lets another engineer finish the work without seeing this conversation.
Use these sections, in this order, and leave none out:
1. Request: what the user asked for, word for word where the wording matters.
2. Constraints: what must not change, what was ruled out, and why.
3. Repository: layout, languages, how it is built and tested.
4. Files read: each path, and what in it matters here.
5. Files changed: each path, what was changed, and the reason.
6. Commands run: each command, and what its output showed.
7. Failing tests and errors: exact names and messages.
8. Findings: the cause of the trouble, or the hypotheses that are left.
9. Tried and given up: what did not work, and why.
10. Plan: the steps that remain, in order.
11. Open items: everything promised and not yet done.
12. Next step: the very next command or edit.
Quote names, paths, line numbers and messages exactly. Do not call tools."""


class SummarySettings(BaseModel):
    """When and how a context begins anew."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["self", "prompted", "truncate", "none"] = Field(
        default="self",
        description="on a full context: summary (self: short prompt; prompted: long), truncate the oldest turns, or end",
    )
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
        return LONG if self.kind == "prompted" else SHORT

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
