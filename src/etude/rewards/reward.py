"""The reward of an episode: named parts that add up, each with a weight and logged by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.agent.trace import Trace
    from etude.rewards.interaction import Interaction
    from etude.rewards.quality import Quality

PARTS = ("outcome", "length", "style", "communication", "conduct")


class RewardSettings(BaseModel):
    """Weights of the parts."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    outcome: float = Field(default=1.0, ge=0, description="weight of tests passed")


@dataclass(frozen=True)
class Facts:
    """What is known of a finished episode."""

    trace: Trace
    outcome: Literal["pass", "fail"]
    fail_to_pass: float  # share of the failing tests that pass now
    pass_to_pass: float
    quality: Quality | None  # None: nothing was changed
    interaction: Interaction


def parts(facts: Facts, settings: RewardSettings) -> dict[str, float]:
    """Return every part without its weight, by the names of PARTS."""
    raise NotImplementedError


def behaviour(facts: Facts) -> dict[str, float]:
    """Return what monitors watch: numbers of one episode whose drift tells of a bad habit."""
    raise NotImplementedError


def total(found: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the reward."""
    return sum(weights[name] * value for name, value in found.items())
