"""Policy gradient: make sampled tokens likelier by the advantage of their episode, each weighted for how it was sampled.

    loss = − Σ over learnt tokens of  w · log π(token),   w a function of the advantage and of π's own log-probs, detached

Every algorithm in `rl/algorithm.py` has this form: w is the derivative of its objective by the token's log-prob. The weights need
the log-probs and the gradient needs the weights. So the hidden states are computed once and the output head is applied twice:
without a gradient, for the log-probs, then for the loss. The logits of all positions never exist at once.

Shapes: B rows, T positions, N = B · T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.lineage.compute import ComputeShape, forward_flops, training_flops
from etude.training import cross_entropy
from etude.training.objectives import Loss
from etude.training.objectives.next_token import NextToken

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

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

    def to(self, device: torch.device) -> SampledRows:
        routes = None if self.routes_BTLK is None else self.routes_BTLK.to(device)
        return SampledRows(self.rows.to(device), self.sampled_BT.to(device), self.learnt_BT.to(device), routes)

    def live(self) -> torch.Tensor:
        return self.rows.live(self.learnt_BT)


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


class PolicyGradient:
    """The loss of a model on sampled rows. `observed` has an entry for each call of `loss`, for the metrics of a step.

    π is the distribution that is sampled from: at `temperature`.
    """

    def __init__(self, model: Any, weigh: Weigh, temperature: float) -> None:
        self._next, self._weigh = NextToken(model, temperature), weigh
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
        terms = self._weigh(change_N, rows.weights_BT.flatten(), sampled.learnt_BT.flatten(), branch_N)
        self.observed.append(
            Observed(*(each.view_as(rows.tokens_BT) for each in (-nats_N, terms.ratios, terms.masked)))
        )
        if self._next.plain_head:
            return Loss(cross_entropy.weighted_sum(hidden_ND, head_VD, targets_N, terms.weights), {})
        return self._next.loss(model, replace(rows, weights_BT=terms.weights.view_as(rows.tokens_BT)))
