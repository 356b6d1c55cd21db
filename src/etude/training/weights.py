"""The weights an optimiser changes, and those a model computes with.

On a CPU, and under FSDP, they are the same. On one GPU the model computes in bf16 and the optimiser keeps float32 masters: a bf16
weight has eight bits of precision and would not move under a small update. Gradients are added up in float32.
"""

from __future__ import annotations

from typing import Any

import torch


class Weights:
    """Weights in one precision."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.masters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def collect(self) -> None:
        """Take the gradients of one backward pass; here they are in place already."""

    def publish(self) -> None:
        """Give the changed weights to the model and forget the gradients."""
        for weight in self.masters.values():
            weight.grad = None

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the weights to what will be saved, so that what is measured last is what is handed over."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.to(dtype))


class MixedWeights(Weights):
    """float32 masters of a model that computes in bf16."""

    def __init__(self, model: Any) -> None:
        masters = {
            name: weight.detach().float().clone() for name, weight in model.named_parameters() if weight.requires_grad
        }
        for weight in model.parameters():
            # Not the buffers: rotary frequencies in bf16 would blur positions.
            weight.data = weight.data.to(torch.bfloat16)
        super().__init__(model)
        self._computed = list(self.masters.values())
        self.masters = masters
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        self._gradients = [master.grad for master in masters.values()]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def collect(self) -> None:
        """Add the gradients of one backward pass to those of the masters."""
        used = [(total, weight) for total, weight in zip(self._gradients, self._computed, strict=True)
                if weight.grad is not None]  # fmt: skip
        torch._foreach_add_([total for total, _ in used], [weight.grad for _, weight in used])
        for _, weight in used:
            weight.grad = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Round the masters into the model and clear their gradients."""
        torch._foreach_copy_(self._computed, list(self.masters.values()))
        torch._foreach_zero_(self._gradients)

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the masters, then the model."""
        with torch.no_grad():
            for master in self.masters.values():
                master.copy_(master.to(dtype))
        self.publish()
