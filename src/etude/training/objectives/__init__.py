"""What is learnt, one objective a file; the loop knows only this seam.

An objective returns a sum over tokens. What it is divided by is the loop's affair: the weight of all rows of a step, on all
devices, or a constant that the source of the rows gives. So neither accumulation nor packing nor the number of ranks changes
the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from etude.lineage.compute import ComputeShape


class Loss(NamedTuple):
    """The loss of some rows. A plain tuple, for FSDP looks for tensors in what a module returns."""

    sum: torch.Tensor  # over tokens, to be minimised; a scalar
    metrics: dict[str, torch.Tensor]  # more such sums, divided as the loss is


class Objective(Protocol):
    """One thing to learn."""

    def weight(self, rows: Any) -> float:
        """Return the weight of some rows, in tokens, before anything is computed."""
        ...

    def flops(self, shape: ComputeShape, length: int) -> int:
        """Return the model FLOPs of a forward and a backward pass over one piece."""
        ...

    def loss(self, model: Any, rows: Any) -> Loss:
        """Return the loss of some rows."""
        ...

    def nats(self, model: Any, rows: Any) -> torch.Tensor:
        """Return −log p of every target of plain rows, [B, T]."""
        ...
