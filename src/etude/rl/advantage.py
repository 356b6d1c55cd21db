"""How much better an episode was than others of its task: its reward less the mean of the group's.

    A_i = R_i − (R_1 + … + R_n) / n

As Composer 2 has it: not divided by the standard deviation, which would blow up tiny differences between episodes that are all
right. The mean is over episodes, so one that summaries split into many branches counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantage of each valid episode of one group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
