"""What an episode's length costs: Composer 2's concave cost of effort.

    C(x) = ((1 + kx)^(1−q) − 1) / (k(1−q)),   C'(x) = (1 + kx)^−q

x adds up six kinds of effort. The slope is 1 at the beginning and falls: on an easy task every turn saved is felt, while a hard one
may take long, as the thousandth step hardly costs more. q = 0 is linear, q = 1 the logarithm ln(1 + kx)/k; above 1 the whole
cost stays below 1/(k(q−1)). With our k = 1 and q = 2 it is x/(1 + x): never 1, so that its weight is the most it can ever take
away, and no episode is too long to be worth solving. The report keeps k, q and the prices to itself; ours make x = 1 of an
ordinary repair: fifteen turns, twenty calls, five thousand tokens written, ten thousand read. Reading is cheaper than writing;
calls made together save turns. All that is said counts, not only the last message: what is free would become the place to think
in. Summaries do not count: memory that costs is made short, not good, and their length has a limit of its own. In groups that
nobody solves the cost teaches to give up soon; where a weak policy does that, lower `failed`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from collections.abc import Mapping

THOUSAND = 1000
COUNTED = {  # by price: what the harness calls it, and how many of it the price is for
    "thinking_tokens": ("tokens_thinking", THOUSAND),
    "call_tokens": ("tokens_calls", THOUSAND),
    "answer_tokens": ("tokens_answers", THOUSAND),
    "said_tokens": ("tokens_said", THOUSAND),
    "calls": ("calls", 1),
    "turns": ("turns", 1),
}


class LengthSettings(BaseModel):
    """Prices of effort, and how the cost bends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    k: float = Field(default=1.0, gt=0, description="how early the cost bends")
    q: float = Field(default=2.0, ge=0, description="how much it bends; 0: not at all; above 1 the cost is bounded")
    thinking_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens of thinking")
    call_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens of calls")
    answer_tokens: float = Field(default=0.01, ge=0, description="price of a thousand tokens that tools answer")
    said_tokens: float = Field(default=0.1, ge=0, description="price of a thousand tokens said to the user")
    calls: float = Field(default=0.01, ge=0, description="price of a call")
    turns: float = Field(default=0.02, ge=0, description="price of a turn, for which the user waits")
    failed: float = Field(default=1.0, ge=0, le=1, description="share of the cost that unsolved episodes pay")

    @model_validator(mode="after")
    def _has_a_price(self) -> LengthSettings:
        if not any(getattr(self, name) for name in COUNTED):
            raise ValueError("all prices of effort are 0; set the reward's weight of length to 0 instead")
        return self


def amounts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the six kinds of effort of a trace's counts."""
    return {name: counts.get(counted, 0) for name, (counted, _) in COUNTED.items()}


def effort(counts: Mapping[str, int], settings: LengthSettings) -> float:
    """Return x."""
    prices: dict[str, float] = settings.model_dump(include=set(COUNTED))
    return sum(price * counts.get(COUNTED[name][0], 0) / COUNTED[name][1] for name, price in prices.items())


def cost(x: float, k: float = 1.0, q: float = 2.0) -> float:
    """Return C(x) for x ≥ 0, precise also where q is almost 1."""
    growth, bend = math.log1p(k * x), 1.0 - q
    return (math.expm1(bend * growth) / bend if bend else growth) / k


def length(counts: Mapping[str, int], settings: LengthSettings, *, solved: bool) -> float:
    """Return the part: −C(x), for unsolved episodes the share of it that they pay."""
    return -cost(effort(counts, settings), settings.k, settings.q) * (1.0 if solved else settings.failed)


def penalty(faults: float) -> float:
    """Return −C(faults), bent as above: one costs a half, each more costs less, yet something, and all together less than 1."""
    return -cost(faults)
