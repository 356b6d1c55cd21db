"""Do gate rows and up rows of two models pair off alike? This finds a copy whose units were shuffled.

Unit i of a gated feed-forward layer owns row i of the gate and row i of the up-projection. Pair the gate rows of two models,
and the up rows apart from them: of unrelated models the two pairings have nothing to do with each other; of a copy they agree,
in whatever order its units stand. The null is not exact, since features both models learnt could tie the pairings together:
it is calibrated by measurement (benchmarks/audit.py). Given this test's result φ_U is still uniform under its own null
(shuffling the units changes the one and not the other), which is what makes the two independent witnesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from etude.lineage.audit.neurons import combined
from etude.lineage.audit.pvalues import spearman

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.lineage.audit.neurons import RowMatch
    from etude.lineage.audit.pvalues import Test

MATCHING = "gate/up matching"


def matching_test(matches: Sequence[tuple[int, RowMatch, RowMatch]]) -> Test:
    """Test (layer, match of the up rows, match of the gate rows), both matches made with the same seed."""
    scored, alike, units = [], 0, 0
    for layer, up, gate in matches:
        _, in_up, in_gate = np.intersect1d(up.rows, gate.rows, return_indices=True)  # a wider A leaves some rows alone
        by_up, by_gate = up.partners[in_up], gate.partners[in_gate]
        scored.append((layer, *spearman(by_up, by_gate)))
        alike, units = alike + int((by_up == by_gate).sum()), units + len(by_up)
    return combined(
        MATCHING, scored, f"{alike / max(1, units):.1%} of units paired alike", [up for _, up, _ in matches]
    )
