"""Model FLOPs of a piece of work, counted from the shape of the model, attention as causal.

For a model with N multiplied parameters (every weight that meets every token: experts count by the share that is
routed to, the input embedding is a lookup and does not count, a tied head does) one token costs

    2 N  +  Σ over layers  2 · heads · (d_qk + d_v) · keys

floating-point operations forward, where `keys` is how many positions the token attends to: position i of a causal
sequence sees i + 1, a sliding window w sees min(i + 1, w). Training costs three times the forward pass.
The common short cut `6 N D` leaves attention out, which is wrong by a factor of up to six in long-context training.
Masked-out positions are not counted, though a dense kernel may compute them: these are the model's FLOPs, not the chip's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """The attention of one layer."""

    heads: int
    qk_dim: int  # width of a head's queries and keys
    v_dim: int  # width of a head's values
    window: int | None = None  # keys seen at most; None: all before


@dataclass(frozen=True)
class ComputeShape:
    """What the FLOPs of a model depend on."""

    multiplied_parameters: int
    attention: tuple[Attention, ...]


def attended_keys(start: int, length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs for the positions start … start + length − 1 of a causal sequence."""
    end = start + length
    if window is None or end <= window:
        return _triangle(end) - _triangle(start)
    growing = max(min(window, end) - start, 0)  # positions that still see all before them
    before = _triangle(start + growing) - _triangle(start) if growing else 0
    return before + (length - growing) * window


def forward_flops(shape: ComputeShape, length: int, start: int = 0) -> int:
    """Return the FLOPs to process `length` tokens of one sequence whose first `start` are already cached."""
    attention = sum(
        2 * layer.heads * (layer.qk_dim + layer.v_dim) * attended_keys(start, length, layer.window)
        for layer in shape.attention
    )
    return 2 * shape.multiplied_parameters * length + attention


def training_flops(shape: ComputeShape, length: int) -> int:
    """Return the FLOPs of a forward and a backward pass over one sequence."""
    return 3 * forward_flops(shape, length)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
