"""Predict the next token: pretraining, continued pretraining, long context, and SFT, which differ in weights only."""

from __future__ import annotations

from typing import Any

import torch

from etude.lineage.compute import ComputeShape, training_flops
from etude.training import cross_entropy
from etude.training.attention import packed
from etude.training.batch import Rows
from etude.training.objectives import Loss


class NextToken:
    """Σ over positions of weight · −log p(next token).

    Most models are a decoder and a head without bias, so that the loss can be had without all logits at once. Some scale or cap
    their logits; whether one does is found out by trying, not from a list of names.
    """

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        known = getattr(model, "plain_head", None)  # a rank without weights is told
        self.plain_head, self._temperature = has_plain_head(model) if known is None else known, temperature

    def hidden(self, model: Any, rows: Rows) -> torch.Tensor:
        """Return what the matrix of a plain head makes logits of, divided by the temperature: [B, T, D]."""
        hidden = last_hidden(model, rows)
        return hidden if self._temperature == 1 else hidden / self._temperature

    def _own_nats(self, model: Any, rows: Rows) -> torch.Tensor:
        logits_NV = model(**packed(rows)).logits.float().flatten(0, 1) / self._temperature
        nats_N = torch.nn.functional.cross_entropy(logits_NV, rows.targets_BT.flatten(), reduction="none")
        return nats_N.view_as(rows.tokens_BT)

    def weight(self, rows: Rows) -> float:
        return float(rows.weights_BT.sum())

    def flops(self, shape: ComputeShape, length: int) -> int:
        return training_flops(shape, length)

    def loss(self, model: Any, rows: Rows) -> Loss:
        """Return the loss of some rows, in nats."""
        if not self.plain_head:
            return Loss((self._own_nats(model, rows) * rows.weights_BT).sum(), {})
        hidden_ND, head_VD = self.hidden(model, rows).flatten(0, 1), model.get_output_embeddings().weight
        targets_N, weights_N = rows.targets_BT.flatten(), rows.weights_BT.flatten()
        return Loss(cross_entropy.weighted_sum(hidden_ND, head_VD, targets_N, weights_N), {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def nats(self, model: Any, rows: Rows) -> torch.Tensor:
        """Return −log p(next token) of every position, [B, T]; only those with a weight mean something."""
        if not self.plain_head:
            return self._own_nats(model, rows)
        hidden = self.hidden(model, rows)
        head = model.get_output_embeddings().weight
        return cross_entropy.each(hidden.flatten(0, 1), head, rows.targets_BT.flatten()).view_as(rows.tokens_BT)


def last_hidden(model: Any, rows: Rows) -> torch.Tensor:
    """Return what a model's output head is given, [B, T, D]."""
    return model.get_decoder()(**packed(rows)).last_hidden_state


@torch.no_grad()  # type: ignore[untyped-decorator]
def has_plain_head(model: Any) -> bool:
    """Return whether a model's logits are its decoder's output times the matrix of its head, found out on eight tokens."""
    head, device = model.get_output_embeddings(), next(model.parameters()).device
    if getattr(head, "bias", None) is not None:
        return False
    ids = torch.arange(1, 9, device=device)[None] % len(head.weight)
    places = torch.arange(8, device=device)[None]
    rows = Rows(ids, ids, torch.ones_like(ids), places, torch.tensor([0, 8], dtype=torch.int32, device=device))
    logits = model(**packed(rows)).logits
    product = last_hidden(model, rows) @ head.weight.T
    return bool(torch.allclose(logits.float(), product.float(), rtol=1e-2, atol=1e-3 * float(logits.abs().max())))
