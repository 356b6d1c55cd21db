"""Predict several tokens ahead: heads learn the model's own distribution (self-distillation).

Depth i at position t is scored at its target, position s = t + i of the same piece: there the model's output head says p of the
next token, all of it, and the heads should say the same one to k tokens earlier. So at depth i a position s counts as much as it does
for the next token, if its piece has begun at least i positions before it; what SFT does not learn, heads do not learn either.

    loss = Σ_i βⁱ⁻¹ / Σ_j βʲ⁻¹ · Σ_s weight_s · [place of s in its piece ≥ i] · KL(p_s ‖ qⁱ_s)

Alone, the trunk is not trained, and the loss is divided by the weights as they stand there. Jointly, `weight` times it is added to
the loss of the next token and divided as that is.

Shapes: B rows, T positions, D width, K depths; N = B · T.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import create_causal_mask

from etude.errors import UserError
from etude.lineage.compute import ComputeShape, forward_flops, training_flops
from etude.models.shape import routed_share
from etude.training import cross_entropy
from etude.training.attention import packed
from etude.training.objectives import Loss
from etude.training.objectives.next_token import NextToken, last_hidden

if TYPE_CHECKING:
    from etude.models.mtp_heads import MtpHeads
    from etude.training.batch import Rows
    from etude.training.settings import JointMtpSettings


class MultiToken:
    """Train the heads of a model (`model.mtp`): alone, or jointly with the model."""

    def __init__(self, model: Any, *, beta: float, joint: JointMtpSettings | None = None) -> None:
        self._next, self._joint = NextToken(model), joint
        if not self._next.plain_head:
            what = f"{type(model).__name__} scales or caps its logits, which MTP heads do not learn"
            raise UserError(f"{what}; take another base")
        self._detached = joint is None or joint.detach
        depths = [beta**index for index in range(model.mtp.depth)]
        self._shares = [each / sum(depths) for each in depths]
        self._step = _step_shape(model)

    def weight(self, rows: Rows) -> float:
        """Return what the loss of some rows is divided by."""
        return self._next.weight(rows) if self._joint else float(self._weights(rows).sum())

    def flops(self, shape: ComputeShape, length: int) -> int:
        """Return the FLOPs of a step over one piece: the trunk's, and a layer and the head for every depth."""
        trunk = training_flops(shape, length) if self._joint else forward_flops(shape, length)
        layer = ComputeShape(self._step[0], (replace(shape.attention[-1], window=None),))
        head = 2 * self._step[1] * length * (2 if self._detached else 3)  # a frozen head has half a backward pass
        return trunk + len(self._shares) * (training_flops(layer, length) + head)

    def loss(self, model: Any, rows: Rows) -> Loss:
        """Return the loss of some rows, in nats."""
        with contextlib.nullcontext() if self._joint else torch.no_grad():
            hidden_BTD = last_hidden(model, rows)
        head_VD = model.get_output_embeddings().weight
        drafts_KND = drafts(model, rows, hidden_BTD, detached=self._detached).flatten(1, 2)
        target_ND, fixed_VD = hidden_BTD.detach().flatten(0, 1), head_VD.detach() if self._detached else head_VD
        mtp = cross_entropy.distilled_sum(drafts_KND, target_ND, fixed_VD, self._weights(rows))
        if self._joint is None:
            return Loss(mtp, {})
        plain = cross_entropy.weighted_sum(
            hidden_BTD.flatten(0, 1), head_VD, rows.targets_BT.flatten(), rows.weights_BT.flatten()
        )
        return Loss(plain + self._joint.weight * mtp, {"next_token": plain, "mtp": mtp})

    def nats(self, model: Any, rows: Rows) -> torch.Tensor:
        """Return −log p(next token) of every position, [B, T]."""
        return self._next.nats(model, rows)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def accepted(self, model: Any, rows: Rows) -> torch.Tensor:
        """Return the expected acceptance by depth, summed over the positions that count, and their weight: [2, K]."""
        hidden_BTD = last_hidden(model, rows)
        drafts_KND = drafts(model, rows, hidden_BTD, detached=True).flatten(1, 2)
        head_VD = model.get_output_embeddings().weight
        accepted_KN = cross_entropy.accepted(drafts_KND, hidden_BTD.flatten(0, 1), head_VD)
        weights_KN = depth_weights(rows, [1.0] * len(self._shares))
        return torch.stack([(accepted_KN * weights_KN).sum(1), weights_KN.sum(1)])

    def _weights(self, rows: Rows) -> torch.Tensor:
        return depth_weights(rows, self._shares)


def depth_weights(rows: Rows, shares: list[float]) -> torch.Tensor:
    """Return how much each position counts as the target of each depth, times that depth's share: [K, N]."""
    weights, places = rows.weights_BT.flatten(), rows.positions_BT.flatten()
    return torch.stack([weights * (places >= depth) * share for depth, share in enumerate(shares, 1)])


def drafts(model: Any, rows: Rows, hidden_BTD: torch.Tensor, *, detached: bool) -> torch.Tensor:
    """Return hⁱ of every depth, each at the position whose distribution it should have: [K, B, T, D].

    Past the end of a piece, where there is no token ahead, a position's own stands in: of another piece nothing is ever seen.
    """
    heads: MtpHeads = model.mtp
    decoder, embedding, places = model.get_decoder(), model.get_input_embeddings(), rows.positions_BT
    hidden = hidden_BTD.detach() if detached else hidden_BTD
    mask = create_causal_mask(
        config=decoder.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=places
    )
    bounds = {
        name: value for name, value in packed(rows).items() if name in {"cu_seq_lens_q", "cu_seq_lens_k", "whole_rows"}
    }
    by_depth = []
    for ahead in range(1, heads.depth + 1):
        inside = places.roll(-ahead, 1) == places + ahead
        tokens = torch.where(inside, rows.tokens_BT.roll(-ahead, 1), rows.tokens_BT)
        hidden = heads.step(
            ahead - 1, hidden, tokens, places,
            embed=lambda ids: embedding(ids).detach() if detached else embedding(ids),
            rotary=decoder.rotary_emb, attention_mask=mask, **bounds,
        )  # fmt: skip
        by_depth.append(hidden.roll(ahead, 1))
    return torch.stack(by_depth)


def _step_shape(model: Any) -> tuple[int, int]:
    """Return the parameters that a token is multiplied with at one depth: in the layer, and in the output head."""
    share = routed_share(model.config.get_text_config())
    layer = sum(
        weight.numel() * (share if ".experts." in name else 1) for name, weight in model.mtp.layer(0).named_parameters()
    )
    return round(layer), model.get_output_embeddings().weight.numel()
