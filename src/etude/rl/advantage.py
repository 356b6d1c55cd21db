"""How much better an episode was than others of its task: its reward less the mean of the group's.

    A_i = R_i − (R_1 + … + R_n) / n

As Composer 2 has it: not divided by the standard deviation, which would blow up tiny differences between episodes that are all
right. The mean is over episodes, so one that summaries split into many branches counts once.

Advantages below zero can be weighed less. To make what failed rarer is most of what RL can do for a large model; a tiny one, whose
failures differ from its successes by a token, unlearns what both have in common when a step sees a few dozen episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def advantages(rewards: Sequence[float], worse: float = 1.0) -> list[float]:
    """Return the advantage of each valid episode of one group; `worse` is the weight of those below the mean."""
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) * (1.0 if reward > mean else worse) for reward in rewards]
