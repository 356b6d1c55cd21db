"""The negative log-likelihood of a long text under a model, by a rolling window.

Every token is scored once. The first window scores all its tokens; each later one moves on by `stride` and scores only
the tokens that are new, so they have at least `window − stride` tokens before them. The sum is in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Window:
    """One pass over tokens[start:end] that scores tokens[score_from:end]."""

    start: int
    score_from: int
    end: int


def rolling_windows(tokens: int, window: int, stride: int) -> list[Window]:
    """Return the windows that score the tokens 1 … tokens − 1 once each; token 0 has nothing before it."""
    assert 0 < stride <= window - 1, (stride, window)
    windows = []
    scored = 1
    while scored < tokens:
        end = min(window if scored == 1 else scored + stride, tokens)
        windows.append(Window(max(0, end - window), scored, end))
        scored = end
    return windows


@torch.inference_mode()  # type: ignore[untyped-decorator]
def token_nlls(model: Any, ids: Sequence[int], window: Window) -> torch.Tensor:
    """Return the negative log-likelihoods of a window's scored tokens, in nats, float32 on the CPU."""
    inputs = torch.tensor([ids[window.start : window.end]], device=model.device)
    scored = window.end - window.score_from
    # The logits at position i predict token i + 1: the last `scored` targets need the positions just before them.
    logits = model(inputs, use_cache=False, logits_to_keep=scored + 1).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, inputs[0, -scored:], reduction="none").cpu()
