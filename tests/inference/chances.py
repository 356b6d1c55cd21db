"""Whether what was drawn fits the chances it should have had."""

from __future__ import annotations

import torch

SURE = 1e-6  # a right sampler fails a test about once in a million; seeds are fixed, so it fails never or always


def surprise(drawn: torch.Tensor, chances: torch.Tensor) -> float:
    """Return how likely counts at least as odd are (chi-square), after seeing that nothing impossible was drawn.

    Outcomes expected fewer than five times are counted together.
    """
    chances = chances.double() / chances.double().sum()
    counts = torch.bincount(drawn.flatten(), minlength=len(chances)).double()
    assert len(counts) == len(chances), "drawn outside of what there is"
    assert counts[chances == 0].sum() == 0, "something impossible was drawn"
    expected = chances * counts.sum()
    often = expected >= 5
    seen, meant = (torch.cat([each[often], each[~often].sum()[None]]) for each in (counts, expected))
    seen, meant = seen[meant > 0], meant[meant > 0]
    if len(seen) < 2:
        return 1.0
    distance = ((seen - meant) ** 2 / meant).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), distance / 2))
