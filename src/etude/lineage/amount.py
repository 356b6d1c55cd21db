"""A quantity with its interval, and with what is missing in it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """A value between `low` and `high`. With something unknown in it, it is a lower bound, and `high` is infinite."""

    value: float
    low: float
    high: float
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Amount) -> Amount:
        """Add worst cases: errors of one method are alike, so they do not cancel out."""
        return Amount(self.value + other.value, self.low + other.low, self.high + other.high, self._missing(other))

    def share_of_sum(self, other: Amount) -> Amount:
        """Return this as a share of both together, the most being where the other is least."""
        low = self.low / (self.low + other.high) if self.low else 0.0
        high = self.high / (self.high + other.low) if math.isfinite(self.high) else 1.0
        return Amount(self.value / (self.value + other.value), low, high, self._missing(other))

    def _missing(self, other: Amount) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.unknown, *other.unknown)))

    def __str__(self) -> str:
        """Return it for people, in FLOP."""
        if self.unknown:
            what = f"not known: {', '.join(self.unknown)}"
            return f"at least {self.low:.2e} FLOP ({what})" if self.low else what
        return f"{self.value:.2e} FLOP ({self.low:.1e} to {self.high:.1e})"


NOTHING = Amount(0.0, 0.0, 0.0)


def not_known(what: str) -> Amount:
    """Return an amount of which only the name is known."""
    return Amount(0.0, 0.0, math.inf, (what,))


def exactly(value: float) -> Amount:
    """Return an amount that is known to the last digit."""
    return Amount(value, value, value)
