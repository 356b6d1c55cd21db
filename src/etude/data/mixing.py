"""What is seen when: the share of each source, whose turn it is, and which of its rows comes next.

All three are functions of a few integers, so a run can be resumed anywhere, and every rank works out the same order alone.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUNDING = 1e-9  # shares come from decimal fractions
ROUNDS = 6  # of the Feistel network; four suffice in theory, if the round function is random
WORD = (1 << 64) - 1


def shares(
    tokens: Mapping[str, int],
    domains: Mapping[str, str],
    weights: Mapping[str, float],
    domain_shares: Mapping[str, float],
    replay: tuple[str, float] | None,
) -> dict[str, float]:
    """Return the share of each source among the tokens seen; they add up to 1.

    A domain with a stated share gets exactly that, and so does the source of `replay`, which does not count to its domain.
    What is left goes to all other sources. Whatever several sources have together is split by tokens × weight.
    """
    mass = {source: count * weights.get(source, 1.0) for source, count in tokens.items()}
    mixed = [source for source in tokens if not (replay and source == replay[0])]
    stated = [
        (f"the domain {domain!r}", share, [source for source in mixed if domains[source] == domain])
        for domain, share in domain_shares.items()
    ]
    if replay:
        stated.append((f"replay of {replay[0]!r}", replay[1], [replay[0]]))
    rest = 1 - sum(share for _, share, _ in stated)
    assert rest >= -ROUNDING, "shares add up to more than 1"
    others = [source for source in mixed if domains[source] not in domain_shares]
    result = dict.fromkeys(tokens, 0.0)
    for what, share, sources in [*stated, ("all that has no stated share", rest if rest > ROUNDING else 0.0, others)]:
        total = sum(mass.get(source, 0) for source in sources)
        if share and not total:
            raise UserError(
                f"{what} is to be {share:.3g} of the tokens but has none left; change the shares or the sources"
            )
        result |= {source: share * mass[source] / total for source in sources if total}
    return result


class Mixer:
    """Takes turns between sources so that each keeps to its share of tokens, however long their rows are.

    The next row, taken as full, goes to the source with the largest share × tokens − taken. No source is then ever more
    than (1 − 1/n) rows ahead of its share, nor more than 1/2 + 1/3 + … + 1/n rows behind (the cup game), for n sources.
    """

    def __init__(self, shares: Mapping[str, float], length: int) -> None:
        assert abs(sum(shares.values()) - 1) < ROUNDING * 1000, f"shares add up to {sum(shares.values())}"
        self.shares = {source: share for source, share in sorted(shares.items()) if share > 0}
        self.length = length
        self.taken = dict.fromkeys(self.shares, 0)  # tokens: the whole state

    def turn(self) -> str:
        """Return the source to take a row from; of equals the first by name."""
        tokens = sum(self.taken.values()) + self.length
        return max(self.shares, key=lambda source: self.shares[source] * tokens - self.taken[source])

    def take(self, source: str, tokens: int) -> None:
        """Count a row."""
        self.taken[source] += tokens


def shuffled(position: int, size: int, key: int) -> int:
    """Return what stands at a position of a pseudo-random order of range(size); `key` has 64 bits.

    A Feistel network on pairs below √size, each round of which can be undone, so it is a bijection; a result outside of
    the range is put in again until it is inside (cycle walking; as the square is hardly larger, rarely needed).
    """
    width = isqrt(size - 1) + 1
    while True:
        left, right = divmod(position, width)
        for step in range(ROUNDS):
            left, right = right, (left + _mixed(key + right * ROUNDS + step)) % width
        position = left * width + right
        if position < size:
            return position


def _mixed(value: int) -> int:
    """Return 64 bits that look unrelated for related values: the output function of SplitMix64."""
    value = value * 0x9E3779B97F4A7C15 & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31
