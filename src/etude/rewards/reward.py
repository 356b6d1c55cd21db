"""The reward of an episode: named parts that add up, each with a weight and logged by its name.

The outcome is from 0 to 1, every other part from −1 to 0, and their weights together are far below the outcome's. So a solved task is
always worth more than an unsolved one, whatever the manners; manners decide between episodes that are alike in outcome. Length and
conduct weigh more than style and communication: they are counted, while those are read by blunt rules, which a policy would
learn to please. Every episode is scored by all parts, failed and malformed ones too: what is not scored is a place to hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.errors import UserError, nearest
from etude.rewards.communication import communication, vague
from etude.rewards.conduct import conduct, terminal_share
from etude.rewards.interaction import final_message
from etude.rewards.length import LengthSettings, amounts, length
from etude.rewards.outcome import outcome
from etude.rewards.style import style

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.agent.trace import Trace
    from etude.rewards.diffs import Change
    from etude.rewards.interaction import Interaction
    from etude.rewards.quality import Quality

PARTS = ("outcome", "length", "style", "communication", "conduct")


class RewardSettings(BaseModel):
    """Weights of the parts, and what two of them need to know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    outcome: float = Field(default=1.0, ge=0, description="weight of tests passed")
    length: float = Field(default=0.1, ge=0, description="weight of the cost of effort")
    style: float = Field(default=0.05, ge=0, description="weight of lint, crowds of comments, things left behind")
    communication: float = Field(default=0.05, ge=0, description="weight of unproven claims, silence, vague last words")
    conduct: float = Field(default=0.1, ge=0, description="weight of malformed calls, open to-dos, terminal only")
    partial: float = Field(
        default=0.0, ge=0, le=0.5, description="outcome of an unsolved task, times its share of tests"
    )
    effort: LengthSettings = LengthSettings()

    @model_validator(mode="after")
    def _rewards_something(self) -> RewardSettings:
        if not any(weights(self).values()):
            raise ValueError(f"all weights of the reward are 0: nothing can be learnt; set one of {', '.join(PARTS)}")
        return self


@dataclass(frozen=True)
class Facts:
    """What is known of a finished episode."""

    trace: Trace
    outcome: Literal["pass", "fail"]
    fail_to_pass: float  # share of the failing tests that pass now
    pass_to_pass: float
    change: Change  # the files it changed, before and after; empty: none
    quality: Quality | None  # None: nothing was changed
    interaction: Interaction


def parts(facts: Facts, settings: RewardSettings) -> dict[str, float]:
    """Return every part without its weight, by the names of PARTS."""
    trace, solved = facts.trace, facts.outcome == "pass"
    return {
        "outcome": outcome(facts.fail_to_pass, facts.pass_to_pass, solved=solved, partial=settings.partial),
        "length": length(trace.counts, settings.effort, solved=solved),
        "style": style(facts.quality),
        "communication": communication(trace, facts.change, facts.interaction),
        "conduct": conduct(trace, facts.interaction),
    }


def behaviour(facts: Facts) -> dict[str, float]:
    """Return what monitors watch: numbers of one episode whose drift tells of a habit. What has no meaning here is left out."""
    trace, seen, quality, counts = facts.trace, facts.interaction, facts.quality, facts.trace.counts
    used = [name for name in trace.made_by.get("tools", ()) if f"calls_{name}" in counts]
    found: dict[str, float | None] = {
        **amounts(counts),
        "malformed": seen.malformed, "failed_calls": counts.get("failed_calls", 0), "open_todos": seen.open_todos,
        "unverified": seen.unverified, "silent": seen.silent, "vague": vague(trace, facts.change),
        "final_chars": len(final_message(trace)), "summaries": counts.get("restarts", 0),
        "calls_per_turn": counts.get("calls", 0) / counts["turns"] if counts.get("turns") else None,
        "shell_share": terminal_share(trace), "distinct_tools": len(used),
        "files_changed": len(facts.change), "lines_changed": quality.lines if quality else 0,
        "comment_density": quality.comment_density if quality else None, "lint": quality.lint if quality else None,
        "scratch_files": quality.scratch_files if quality else None,
    }  # fmt: skip
    return {name: float(value) for name, value in found.items() if value is not None}


def weights(settings: RewardSettings) -> dict[str, float]:
    """Return the weight of each part by its name."""
    return {name: getattr(settings, name) for name in PARTS}


def reweighted(now: Mapping[str, float], wished: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of a running run with those that a user wants changed; UserError if that cannot be."""
    for name in sorted(wished.keys() - set(PARTS)):
        raise UserError(f"the reward has no part {name!r}{nearest(name, PARTS)}")
    try:
        return weights(RewardSettings.model_validate({**now, **wished}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"reward weights {dict(wished)}: {first['msg'].removeprefix('Value error, ')}") from None


def total(found: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the reward."""
    return sum(weights[name] * value for name, value in found.items())
