"""The loss of a language-model head without its logits: matrix product, softmax and both gradients, some positions at a time.

The logits of 65,536 positions over 49,152 tokens take 6 GB in bf16 and 13 GB in float32, twice that with their gradient. Here they
exist for `CHUNK` of them at a time. The weight of every position is known beforehand, so the gradient is made in the forward
pass, while the logits are there: nothing is computed twice, and the backward pass only scales it.
torch has such a function from 2.13 on; we also run on 2.11.

`distilled_sum` is the same for heads that learn another distribution whole instead of one token (multi-token prediction).

Shapes: N positions, D width, V vocabulary, K depths of prediction.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.training.memory import LOGITS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

CHUNK = LOGITS_AT_ONCE


def _losses(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32:  # a CPU's product cannot keep what it added up
        logits_NV = torch.mm(hidden_ND, head_VD.T, out_dtype=torch.float32)
    else:
        logits_NV = (hidden_ND @ head_VD.T).float()
    return F.cross_entropy(logits_NV, targets_N, reduction="none")


def _losses_and_slopes(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses and its gradient by the logits, in the dtype of the head."""
    logits_NV = (hidden_ND @ head_VD.T).float()
    log_sum_N = logits_NV.logsumexp(-1)
    losses_N = log_sum_N - logits_NV.gather(1, targets_N[:, None])[:, 0]
    hit_NV = torch.arange(logits_NV.shape[1], device=targets_N.device) == targets_N[:, None]
    slopes_NV = ((logits_NV - log_sum_N[:, None]).exp() - hit_NV.float()) * weights_N[:, None]
    return (losses_N * weights_N).sum(), slopes_NV.to(head_VD.dtype)


def _losses_and_slopes_in_place(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same without a compiler: each operation is a pass over the logits, so as few of them as possible."""
    logits_NV = (hidden_ND @ head_VD.T).float()
    log_sum_N = logits_NV.logsumexp(-1)
    places = torch.arange(len(targets_N), device=targets_N.device)
    total = ((log_sum_N - logits_NV[places, targets_N]) * weights_N).sum()
    slopes_NV = logits_NV.sub_(log_sum_N[:, None]).exp_()
    slopes_NV[places, targets_N] -= 1
    return total, slopes_NV.mul_(weights_N[:, None]).to(head_VD.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


class _Sum(torch.autograd.Function):
    """Σ over chunks and depths of what `step` says of (hidden, head, target of the chunk, weights): a loss and its slopes."""

    @staticmethod
    def forward(
        ctx: Any, hidden_KND: Tensor, head_VD: Tensor, weights_KN: Tensor, step: Step, target: Callable[[slice], Tensor]
    ) -> Tensor:
        total = torch.zeros((), device=hidden_KND.device)
        by_hidden = torch.empty_like(hidden_KND)
        by_head = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for here in _chunks(hidden_KND.shape[1], len(head_VD)):
            target_N = target(here)
            for depth, hidden_ND in enumerate(hidden_KND[:, here]):
                part, slopes_NV = step(hidden_ND, head_VD, target_N, weights_KN[depth, here])
                total += part
                by_hidden[depth, here] = slopes_NV @ head_VD
                if by_head is not None:
                    by_head += slopes_NV.T @ hidden_ND
        ctx.save_for_backward(by_hidden, by_head)
        ctx.dtype = head_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        by_hidden, by_head = ctx.saved_tensors
        head = None if by_head is None else (by_head * scale).to(ctx.dtype)
        return by_hidden * scale, head, None, None, None  # a scalar does not change the dtype, and keeps its precision


def _chunks(positions: int, vocabulary: int) -> list[slice]:
    """Cut positions into equal parts (one compiled shape), the last possibly smaller."""
    parts = max(1, -(-positions * vocabulary // CHUNK))
    size = -(-positions // parts)
    return [slice(begin, begin + size) for begin in range(0, positions, size)]


def weighted_sum(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return Σ weight · −log p(target), in nats, float32."""
    step = _compiled(_losses_and_slopes) if hidden_ND.is_cuda else _losses_and_slopes_in_place
    return _Sum.apply(hidden_ND[None], head_VD, weights_N[None], step, lambda here: targets_N[here])


@torch.no_grad()  # type: ignore[untyped-decorator]
def each(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return −log p(target) of every position, in nats, float32."""
    step = _compiled(_losses) if hidden_ND.is_cuda else _losses
    parts = _chunks(len(hidden_ND), len(head_VD))
    return torch.cat([step(hidden_ND[here], head_VD, targets_N[here]) for here in parts])


def _divergences_and_slopes(
    draft_ND: Tensor, head_VD: Tensor, log_target_NV: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Σ weight · KL(target ‖ draft) and its gradient by the draft's logits, in the dtype of the head."""
    log_draft_NV = (draft_ND @ head_VD.T).float().log_softmax(-1)
    target_NV = log_target_NV.exp()
    total = ((log_target_NV - log_draft_NV).mul_(target_NV).sum(-1) * weights_N).sum()
    return total, log_draft_NV.exp_().sub_(target_NV).mul_(weights_N[:, None]).to(head_VD.dtype)


def distilled_sum(drafts_KND: Tensor, target_ND: Tensor, head_VD: Tensor, weights_KN: Tensor) -> Tensor:
    """Return Σ weight · KL(p ‖ q), in nats, float32: p is what the head makes of the target, which learns nothing, q of the draft."""
    step = _compiled(_divergences_and_slopes) if drafts_KND.is_cuda else _divergences_and_slopes
    target = lambda here: (target_ND[here] @ head_VD.T).float().log_softmax(-1)  # noqa: E731
    return _Sum.apply(drafts_KND, head_VD, weights_KN, step, target)


@torch.no_grad()  # type: ignore[untyped-decorator]
def accepted(drafts_KND: Tensor, target_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Return Σ min(p, q) of every depth and position, [K, N]: the chance that a token drafted by q stands where p decides."""
    accepted_KN = drafts_KND.new_empty(drafts_KND.shape[:2], dtype=torch.float32)
    for here in _chunks(len(target_ND), len(head_VD)):
        target_NV = (target_ND[here] @ head_VD.T).float().softmax(-1)
        for depth, draft_ND in enumerate(drafts_KND[:, here]):
            accepted_KN[depth, here] = torch.minimum((draft_ND @ head_VD.T).float().softmax(-1), target_NV).sum(-1)
    return accepted_KN
