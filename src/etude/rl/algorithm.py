"""How much better an episode was than others of its task: its reward less the mean of the group's.

    A_i = R_i − (R_1 + … + R_n) / n

As Composer 2 has it: not divided by the standard deviation, which would blow up tiny differences between episodes that are all
right. The mean is over episodes, so one that summaries split into many branches counts once.

Correction for tokens that the policy being trained would now sample with another probability than they were sampled with.

Weights moved since, and engine and trainer round differently. The ratio new / old says by how much, at one of three levels:

    token       of the token itself
    sequence    the product over the learnt tokens of its branch
    geometric   the geometric mean over them: the product, made independent of the length

and what becomes of a token with ratio ρ is one of

    mask        ρ inside the bounds, 0 outside: what is too far off says nothing of the policy as it is
    truncate    min(ρ, high)
    off         1

N positions, those of a branch in one piece.

How far the policy has gone from a reference, estimated from what it sampled, and the reference itself.

Of a token that q sampled, with r = p(token) / q(token), p the reference:

    k1 = −log r             unbiased for KL(q ‖ p); may be negative
    k2 = (log r)² / 2       biased
    k3 = (r − 1) − log r    unbiased and never negative, but where p and q diverge r has a heavy tail, and its variance explodes

Composer 2 takes k1. It goes into the reward, that is in front of the gradient of log q. Differentiated itself, as a plain term of the
loss, k1 gives ∇ log q, whose mean over what q samples is zero: it would do nothing but add noise (tests/rl/test_divergence.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from etude.rl.settings import CorrectionSettings, KlSettings

    Numbers = npt.NDArray[np.floating[Any]]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantage of each valid episode of one group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


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


def divergence(policy: Numbers, reference: Numbers, estimator: str) -> Numbers:
    """Return the estimate of each token in nats, from its log-probs."""
    log_ratio = reference.astype(np.float64) - policy
    if estimator == "k1":
        return -log_ratio
    return log_ratio**2 / 2 if estimator == "k2" else np.expm1(log_ratio) - log_ratio


class Reference:
    """A model that stays as it is, or the exponential average of what it is told of, kept in float32."""

    def __init__(self, model: Any, settings: KlSettings) -> None:
        self.model, self._decay = model.requires_grad_(requires_grad=False), settings.decay
        moving = settings.reference == "average"
        self.average = {name: weight.float().clone() for name, weight in model.named_parameters() if moving}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Move a step towards the policy's weights."""
        for name, kept in self.average.items():
            kept.lerp_(weights[name], 1 - self._decay)
            self.model.get_parameter(name).copy_(kept)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load(self, average: Mapping[str, torch.Tensor]) -> None:
        """Take over an average."""
        for name, kept in self.average.items():
            kept.copy_(average[name])
            self.model.get_parameter(name).copy_(kept)
