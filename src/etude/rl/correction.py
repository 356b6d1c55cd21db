"""Correction for tokens that the policy being trained would now sample with another probability than they were sampled with.

Weights moved since, and engine and trainer round differently. The ratio new / old says by how much, at one of three levels:

    token       of the token itself
    sequence    the product over the learnt tokens of its branch
    geometric   the geometric mean over them: the product, made independent of the length

and what becomes of a token with ratio ρ is one of

    mask        ρ inside the bounds, 0 outside: what is too far off says nothing of the policy as it is
    truncate    min(ρ, high)
    off         1

N positions, those of a branch in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from etude.rl.settings import CorrectionSettings


def ratios(change: torch.Tensor, learnt: torch.Tensor, branch: torch.Tensor, level: str) -> torch.Tensor:
    """Return ρ of every position. `change`: log new − log old; `branch`: the number of the branch it belongs to; all [N]."""
    change = torch.where(learnt, change, 0)
    if level == "token":
        return change.exp()
    count = int(branch[-1]) + 1
    total = change.new_zeros(count).index_add_(0, branch, change)
    if level == "geometric":
        total /= change.new_zeros(count).index_add_(0, branch, learnt.to(change.dtype)).clamp_(min=1)
    return total.exp()[branch]


def outside(ratio: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """Return whether each ratio is beyond the bounds that the mode has."""
    if settings.mode == "off":
        return torch.zeros_like(ratio, dtype=torch.bool)
    beyond = ratio > settings.high
    return beyond | (ratio < settings.low) if settings.mode == "mask" else beyond


def factors(ratio: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """Return what the gradient of each token is multiplied with."""
    if settings.mode == "off":
        return torch.ones_like(ratio)
    if settings.mode == "truncate":
        return ratio.clamp(max=settings.high)
    return torch.where(outside(ratio, settings), 0, ratio)
