"""What is learnt, one objective a file; the loop knows only this seam.

An objective returns a sum over tokens. What it is divided by is the loop's affair: the weight of all rows of a step, on all
devices. So neither accumulation nor packing nor the number of ranks changes the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from etude.lineage.compute import ComputeShape
    from etude.training.batch import Rows


@dataclass(frozen=True)
class Loss:
    """What an objective says of some rows."""

    sum: torch.Tensor  # to be made small; a scalar
    weight: torch.Tensor  # what it adds up over, in tokens; a scalar
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # sums over the same weight


class Objective(Protocol):
    """One thing to learn."""

    def weight(self, rows: Rows) -> float:
        """Return the weight of some rows before anything is computed."""
        ...

    def flops(self, shape: ComputeShape, length: int) -> int:
        """Return the model FLOPs of a forward and a backward pass over one piece."""
        ...

    def loss(self, model: Any, rows: Rows) -> Loss:
        """Return the loss of some rows."""
        ...
