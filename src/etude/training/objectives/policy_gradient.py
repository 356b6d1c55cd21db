"""Policy gradient: make sampled tokens likelier by the advantage of their episode, each corrected for how it was sampled.

    loss = − Σ over learnt tokens of  advantage · factor · log π(token),   the factor being a function of π's own log-probs, detached

The factors need the log-probs and the gradient needs the factors. So the hidden states are computed once and the output head is
applied twice: without a gradient, for the log-probs, then for the loss, with the weight of every position known. The logits of all
positions never exist at once.

Shapes: B rows, T positions, N = B · T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from etude.lineage.compute import forward_flops, training_flops
from etude.training import cross_entropy
from etude.training.objectives.next_token import NextToken, last_hidden

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from etude.lineage.compute import ComputeShape
    from etude.training.batch import Rows

    # log new − log old, learnt, number of the branch, all [N] → ratio, factor, both [N]
    Correct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows of branches. Of `rows`, the weights are advantages: of the episode, where the target is learnt."""

    rows: Rows
    sampled_BT: torch.Tensor  # float32: log-prob that the target had when it was sampled
    learnt_BT: torch.Tensor  # bool

    def to(self, device: torch.device) -> SampledRows:
        """Return the rows on a device."""
        return SampledRows(self.rows.to(device), self.sampled_BT.to(device), self.learnt_BT.to(device))


@dataclass(frozen=True)
class PolicyLoss:
    """What the objective says of some rows."""

    sum: torch.Tensor  # to be made small; a scalar
    now_BT: torch.Tensor  # log-prob of every target under the policy as it is
    ratios_BT: torch.Tensor


class PolicyGradient:
    """The loss of a model on sampled rows."""

    def __init__(self, model: Any, correct: Correct) -> None:
        self.next, self._correct = NextToken(model), correct

    def flops(self, shape: ComputeShape, length: int) -> int:
        """Return the model FLOPs of a step over one branch; a head that is not plain costs a forward pass more."""
        return training_flops(shape, length) + (0 if self.next.plain_head else forward_flops(shape, length))

    def loss(self, model: Any, given: SampledRows) -> PolicyLoss:
        """Return the loss of some rows, in nats times advantage."""
        rows, targets_N = given.rows, given.rows.targets_BT.flatten()
        if self.next.plain_head:
            hidden_ND, head_VD = last_hidden(model, rows).flatten(0, 1), model.get_output_embeddings().weight
            nats_N = cross_entropy.each(hidden_ND, head_VD, targets_N)
        else:
            nats_N = self.next.nats(model, rows).flatten()
        branch_N = (rows.positions_BT.flatten() == 0).cumsum(0) - 1
        change_N = -nats_N - given.sampled_BT.flatten()
        ratios_N, factors_N = self._correct(change_N, given.learnt_BT.flatten(), branch_N)
        weights_N = rows.weights_BT.flatten() * factors_N
        if self.next.plain_head:
            total = cross_entropy.weighted_sum(hidden_ND, head_VD, targets_N, weights_N)
        else:
            total = self.next.loss(model, replace(rows, weights_BT=weights_N.view_as(rows.tokens_BT))).sum
        return PolicyLoss(total, -nats_N.view_as(rows.tokens_BT), ratios_N.view_as(rows.tokens_BT))
