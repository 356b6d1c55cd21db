"""Policy gradient: make sampled tokens likelier by the advantage of their episode, each weighted for how it was sampled.

    loss = − Σ over learnt tokens of  w · log π(token),   w a function of the advantage and of π's own log-probs, detached

With a teacher T a token has an advantage of its own besides, from its log-ratio: share · clip(log T − log π, −bound, bound).

Every algorithm in `rl/algorithm.py` has this form: w is the derivative of its objective by the token's log-prob. The weights need
the log-probs and the gradient needs the weights. So the hidden states are computed once and the output head is applied twice:
without a gradient, for the log-probs, then for the loss. The logits of all positions never exist at once.

Shapes: B rows, T positions, N = B · T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from etude.lineage.compute import ComputeShape, forward_flops, training_flops
from etude.training import cross_entropy
from etude.training.objectives import Loss
from etude.training.objectives.next_token import NextToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.training.batch import Rows

    # log π now − log π when sampled, advantage, learnt, number of the branch it belongs to: each [N]
    Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], "Terms"]


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows of branches. Of `rows`, the weights are advantages: of the episode, where the target is learnt."""

    rows: Rows
    sampled_BT: torch.Tensor  # float32: log-prob that the target had when it was sampled
    learnt_BT: torch.Tensor  # bool
    routes_BTLK: torch.Tensor | None = None  # experts that each token was sampled with, layer by layer; −1: not known
    taught: Taught | None = None

    def to(self, device: torch.device) -> SampledRows:
        routes = None if self.routes_BTLK is None else self.routes_BTLK.to(device)
        taught = self.taught and Taught(*(each.to(device) for each in self.taught))
        return SampledRows(self.rows.to(device), self.sampled_BT.to(device), self.learnt_BT.to(device), routes, taught)

    def live(self) -> torch.Tensor:
        return self.rows.live(self.learnt_BT)


class Taught(NamedTuple):
    """What a teacher says of some rows, float32 [B, T]."""

    logprobs: torch.Tensor  # of the targets
    shares: torch.Tensor  # what the log-ratio weighs; 0 where nothing is learnt


class Terms(NamedTuple):
    """What an algorithm makes of some positions."""

    ratios: torch.Tensor  # π now / π when sampled, at the algorithm's level
    weights: torch.Tensor  # what −log π is multiplied with
    masked: torch.Tensor  # bool: beyond the algorithm's bounds


class Observed(NamedTuple):
    """What was computed of some rows, all [B, T]."""

    logprobs: torch.Tensor
    ratios: torch.Tensor
    masked: torch.Tensor
    gaps: torch.Tensor  # clipped log-ratio of teacher and π; 0 without a teacher


class PolicyGradient:
    """The loss of a model on sampled rows. `observed` has an entry for each call of `loss`, for the metrics of a step.

    π is the distribution that is sampled from: at `temperature`. `bound`: of the log-ratio of a teacher.
    """

    def __init__(self, model: Any, weigh: Weigh, temperature: float, bound: float = math.inf) -> None:
        self._next, self._weigh, self._bound = NextToken(model, temperature), weigh, bound
        self.nats = self._next.nats
        self.observed: list[Observed] = []

    def weight(self, rows: SampledRows) -> float:
        return float(rows.learnt_BT.sum())

    def flops(self, shape: ComputeShape, length: int) -> int:
        """Return the FLOPs of a step over one branch; a head that is not plain costs a forward pass more."""
        return training_flops(shape, length) + (0 if self._next.plain_head else forward_flops(shape, length))

    def loss(self, model: Any, sampled: SampledRows) -> Loss:
        """Return the loss of some rows, in nats times advantage."""
        rows, targets_N = sampled.rows, sampled.rows.targets_BT.flatten()
        if self._next.plain_head:
            hidden_ND, head_VD = self._next.hidden(model, rows).flatten(0, 1), model.get_output_embeddings().weight
            nats_N = cross_entropy.each(hidden_ND, head_VD, targets_N)
        else:
            nats_N = self._next.nats(model, rows).flatten()
        branch_N = (rows.positions_BT.flatten() == 0).cumsum(0) - 1
        change_N = -nats_N - sampled.sampled_BT.flatten()
        advantages_N, gaps_N = rows.weights_BT.flatten(), torch.zeros_like(nats_N)
        if sampled.taught:
            # Against π as it is now, not as it sampled: else it would be pushed on where it is at the teacher already.
            gaps_N = (sampled.taught.logprobs.flatten() + nats_N).clamp(-self._bound, self._bound)
            advantages_N = advantages_N + sampled.taught.shares.flatten() * gaps_N
        terms = self._weigh(change_N, advantages_N, sampled.learnt_BT.flatten(), branch_N)
        seen = (-nats_N, terms.ratios, terms.masked, gaps_N)
        self.observed.append(Observed(*(each.view_as(rows.tokens_BT) for each in seen)))
        if self._next.plain_head:
            return Loss(cross_entropy.weighted_sum(hidden_ND, head_VD, targets_N, terms.weights), {})
        return self._next.loss(model, replace(rows, weights_BT=terms.weights.view_as(rows.tokens_BT)))
