"""The algorithms of reinforcement learning, each a class of some lines: `[rl] algorithm = "composer2"`.

All make one update from a batch of groups, a group being several episodes of one task. What differs is

    advantages   how much better an episode was than the others of its group
    share        what a learnt token of an episode weighs, by the number of them
    divisor      what the sum over all tokens is divided by
    weigh        what becomes of a token that the policy would now sample with another probability: ρ = π now / π when sampled

`weigh` returns w, the derivative of the algorithm's objective by the token's log-prob: the loss − Σ w · log π has its gradient
(`training/objectives/policy_gradient.py`). A new algorithm is one class here; `uses` names the settings it reads, and others are
refused. Each is tested against its objective in float64 (tests/rl/test_algorithm.py).

Before that, and with any of them, β times the divergence from a reference may be taken from the reward of an episode (`[rl.kl]`).

Tensors are [N] positions, those of a branch in one piece. Free of torch's functions, so that a recipe is read at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from etude.rl.settings import RlSettings
    from etude.training.objectives.policy_gradient import Terms

    Numbers = npt.NDArray[np.floating[Any]]


class Algorithm:
    """What the trainer asks of an algorithm."""

    uses: ClassVar[frozenset[str]] = frozenset()  # of the settings that not all algorithms have
    window: ClassVar[tuple[float, float]] = (0.0, math.inf)  # default bounds of ρ

    def __init__(self, settings: RlSettings) -> None:
        self.settings = settings
        self.low, self.high = settings.window or self.window

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Return the advantage of each episode of one group: by default its reward less the mean."""
        mean = sum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]

    def share(self, tokens: int) -> float:  # noqa: ARG002 - for those that normalise by length
        """Return what each of an episode's learnt tokens weighs."""
        return 1.0

    def divisor(self, tokens: Sequence[int]) -> float:  # noqa: ARG002 - for those that count tokens
        """Return what the loss is divided by, given the learnt tokens of each episode of the batch."""
        return self.settings.groups * self.settings.group_size

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        """Return what the gradient is made of (see above); the advantages have their share in them."""
        raise NotImplementedError


class Composer2(Algorithm):
    """Composer 2 (arXiv 2603.24477): no division by a deviation or a length, each token corrected for staleness.

        1/(G · n · normaliser) Σ_i A_i Σ_t w(ρ_t) log π_t      A_i = R_i − mean R

    Divided by the group's standard deviation, tiny differences between episodes that are all right would be blown up; divided by
    its length, a token would weigh less in a long episode. The mean is over episodes: one that summaries split into many branches
    counts once. ρ is that of the token, its product over the branch or the geometric mean of that (`[rl.correction] level`), and
    w(ρ) is ρ inside the bounds and 0 outside (mask), min(ρ, high) (truncate), or 1 (off), constant for the gradient.
    """

    uses = frozenset({"correction", "normaliser"})

    def divisor(self, tokens: Sequence[int]) -> float:
        return super().divisor(tokens) * self.settings.normaliser

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        own = self.settings.correction
        rho = ratios(change, learnt, branch, own.level)
        if own.mode == "off":
            return _terms(rho, advantages, rho < 0)
        if own.mode == "truncate":
            return _terms(rho, advantages * rho.clamp(max=own.high), rho > own.high)
        outside = (rho > own.high) | (rho < own.low)
        return _terms(rho, advantages * rho.masked_fill(outside, 0), outside)


class Rloo(Composer2):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740): the baseline of an episode is the mean of the others.

        A_i = R_i − mean of R_j, j ≠ i  =  n/(n − 1) · (R_i − mean R)

    An unbiased baseline; all else as Composer 2.
    """

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        n = len(rewards)
        return [gain * n / max(1, n - 1) for gain in super().advantages(rewards)]


class Grpo(Algorithm):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

        1/(G · n) Σ_i 1/|o_i| Σ_t min(ρ_t A_i, clip(ρ_t, low, high) A_i)      A_i = (R_i − mean R) / (std R + 1e-6)

    |o_i| counts the learnt tokens of an episode, in all its branches; std is that of the group as it is. PPO's clip has no
    gradient where the policy has gone further than the bounds in the direction of the advantage already. Its KL term is not here:
    `[rl.kl]` takes a penalty from the reward instead.
    """

    uses = frozenset({"window"})
    window = (0.8, 1.2)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [gain / (float(np.std(rewards)) + 1e-6) for gain in super().advantages(rewards)]

    def share(self, tokens: int) -> float:
        return 1 / max(1, tokens)

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        return self._clipped(ratios(change, learnt, branch, "token"), advantages)

    def _clipped(self, rho: Tensor, advantages: Tensor) -> Terms:
        outside = ((advantages > 0) & (rho > self.high)) | ((advantages < 0) & (rho < self.low))
        return _terms(rho, advantages * rho.masked_fill(outside, 0), outside)


class Gspo(Grpo):
    """Group sequence policy optimisation (Qwen, arXiv 2507.18071): one ratio for all tokens of a sequence, a branch here.

        1/(G · n) Σ_i Σ_b |b|/|o_i| · min(s_b A_i, clip(s_b, low, high) A_i)      s_b = (Π_t ρ_t)^(1/|b|)

    b are the branches of episode i; with one, the paper's formula. By each log-prob the derivative is s_b A_i / |o_i|. A geometric
    mean stays near 1, so the bounds are close.
    """

    window = (1 - 3e-4, 1 + 4e-4)

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        return self._clipped(ratios(change, learnt, branch, "geometric"), advantages)


class IcePop(Grpo):
    """IcePop (Ant Group, ringtech.notion.site/icepop; GLM-5, arXiv 2602.15763): drop what engine and trainer see differently.

        1/(G · n) Σ_i 1/|o_i| Σ_t A_i · pop(ρ_t) · log π_t      pop(ρ) = ρ if low ≤ ρ ≤ high, else 0, constant for the gradient

    A two-sided mask whatever the sign of the advantage, which is GRPO's. The paper clips the change since the batch was begun
    besides; with one update a batch there is none.
    """

    window = (0.5, 5.0)

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        rho = ratios(change, learnt, branch, "token")
        outside = (rho > self.high) | (rho < self.low)
        return _terms(rho, advantages * rho.masked_fill(outside, 0), outside)


class Kimi(Algorithm):
    """Kimi K2.5 and K3 (arXiv 2602.02276, 2607.24653): a clip window and a quadratic pull back to the sampler.

        1/N Σ_i Σ_t clip(ρ_t, low, high) (R_i − mean R) − τ (log ρ_t)²      N: learnt tokens of the batch

    Outside the window the first term has no gradient, whatever the sign of the advantage; the second always has. Bounds and τ are
    not published: these are ours.
    """

    uses = frozenset({"window", "tau"})
    window = (0.5, 2.0)

    def divisor(self, tokens: Sequence[int]) -> float:
        return max(1, sum(tokens))

    def weigh(self, change: Tensor, advantages: Tensor, learnt: Tensor, branch: Tensor) -> Terms:
        rho = ratios(change, learnt, branch, "token")
        outside = (rho > self.high) | (rho < self.low)
        pull = 2 * self.settings.tau * change.masked_fill(~learnt, 0)
        return _terms(rho, advantages * rho.masked_fill(outside, 0) - pull, outside)


ALGORITHMS: dict[str, type[Algorithm]] = {
    "composer2": Composer2, "grpo": Grpo, "rloo": Rloo, "gspo": Gspo, "icepop": IcePop, "kimi": Kimi
}  # fmt: skip


def ratios(change: Tensor, learnt: Tensor, branch: Tensor, level: str) -> Tensor:
    """Return ρ of every position, 1 where nothing is learnt: of the token, or the product or geometric mean over its branch.

    `change`: log π now − log π when sampled; `branch`: the number of the branch a position belongs to.
    """
    change = change.masked_fill(~learnt, 0)
    if level == "token":
        return change.exp()
    count = int(branch[-1]) + 1
    total = change.new_zeros(count).index_add_(0, branch, change)
    if level == "geometric":
        total /= change.new_zeros(count).index_add_(0, branch, learnt.to(change.dtype)).clamp_(min=1)
    return total.exp()[branch]


def _terms(rho: Tensor, weights: Tensor, outside: Tensor) -> Terms:
    from etude.training.objectives.policy_gradient import Terms

    return Terms(rho, weights, outside)


def divergence(policy: Numbers, reference: Numbers, estimator: str) -> Numbers:
    """Return how far each token is from the reference, in nats, from its log-probs: with r = p(token) / q(token), q having sampled,

    k1 = −log r             unbiased for KL(q ‖ p); may be negative
    k2 = (log r)² / 2       biased
    k3 = (r − 1) − log r    unbiased and never negative, but where p and q diverge r has a heavy tail, and its variance explodes

    Composer 2 takes k1. It goes into the reward, that is in front of the gradient of log q. Differentiated itself, as a plain term
    of the loss, k1 gives ∇ log q, whose mean over what q samples is zero: it would do nothing but add noise.
    """
    log_ratio = reference.astype(np.float64) - policy
    if estimator == "k1":
        return -log_ratio
    return log_ratio**2 / 2 if estimator == "k2" else np.expm1(log_ratio) - log_ratio
