"""Where compute stands to the thresholds of the EU AI Act for general-purpose models.

From the Commission's guidelines of 18 July 2025: a model is taken to be general-purpose from 10^23 FLOP up, and to carry systemic
risk from 10^25 up; whoever modifies such a model becomes the provider of the modified one if that took more than a third of the
original's compute. Where that is not known, a third of the threshold stands in for it. Training compute includes rollouts and
the writing of synthetic data. Facts for engineering, not legal advice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from etude.lineage.amount import NOTHING, Amount, exactly

if TYPE_CHECKING:
    from collections.abc import Mapping

GENERAL = 1e23
SYSTEMIC = 1e25


@dataclass(frozen=True)
class Standing:
    """One rule: `undecided` where the intervals overlap, or a part is not known."""

    rule: str
    verdict: Literal["above", "below", "undecided"]
    sentence: str


def standings(own: Amount, bases: Mapping[str, Amount]) -> tuple[Standing, ...]:
    """Compare. `bases`: the base's compute by convention, the first for the totals; empty: there is no base."""
    total = own + next(iter(bases.values()), NOTHING)
    known = {f"a third of the base, {convention}": base for convention, base in bases.items() if base.value}
    stand_ins = {
        "a third of the base, which is not known: if it is general-purpose, of 1e23": exactly(GENERAL),
        "a third of the base, which is not known: if it carries systemic risk, of 1e25": exactly(SYSTEMIC),
    }
    thirds = known or (stand_ins if bases else {})
    limits = {"general-purpose model, 1e23 FLOP": GENERAL, "systemic risk, 1e25 FLOP": SYSTEMIC}
    return (
        *(_standing(rule, "own compute", own, base, 1 / 3) for rule, base in thirds.items()),
        *(_standing(rule, "all compute", total, exactly(limit)) for rule, limit in limits.items()),
    )


def _standing(rule: str, what: str, amount: Amount, whole: Amount, part: float = 1.0) -> Standing:
    limit = Amount(whole.value * part, whole.low * part, whole.high * part, whole.unknown)
    verdict: Literal["above", "below", "undecided"] = "undecided"
    if amount.low > limit.high:
        verdict = "above"
    elif amount.high <= limit.low:
        verdict = "below"
    return Standing(
        rule, verdict, f"{what} {amount}, limit {limit if limit.low < limit.high else f'{limit.value:.2e}'}"
    )
