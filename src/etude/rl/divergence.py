"""How far the policy has gone from a reference, estimated from what it sampled, and the reference itself.

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
    from collections.abc import Mapping

    import numpy.typing as npt

    from etude.rl.settings import KlSettings

    Numbers = npt.NDArray[np.floating[Any]]


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
