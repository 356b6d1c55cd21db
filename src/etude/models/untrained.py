"""Special tokens that a base never learnt: found by their rows, and told apart before they are taught.

A token that no text of pretraining holds is never the answer, so each step moves its row of the output away from where the hidden
states are, and in the same way for all such tokens: they end up as one vector. Sprout's 27 have a cosine of 1.000 and a norm above
that of other rows, so `<tool_call>`, `</tool_call>` and the end of a turn are one to it, to read and to write, and SFT spends most of
its steps on pulling equal vectors apart (lab notes). Other bases with reserved tokens have the same.

Here such rows are drawn anew, each dimension as it is spread over the other tokens' rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

ALIKE = 0.9995  # cosine; sprout's are above 0.9997; SmolLM2 tells `<|im_start|>` and `<|im_end|>` apart at 0.9904, and must keep them
SMALL = 0.01  # of the usual norm: rows that were never drawn at all


def alike(rows: torch.Tensor, special: Collection[int]) -> list[int]:
    """Return the special tokens whose row is nearly that of another special token, or nearly nothing."""
    ids = sorted(special)
    own = rows[ids].float()
    norms = own.norm(dim=1)
    near = (own @ own.T).fill_diagonal_(-1.0) > ALIKE * (norms[:, None] * norms).clamp_min(1e-12)
    small = norms < SMALL * rows.float().norm(dim=1).median()
    return [token for token, found in zip(ids, (near.any(dim=1) | small).tolist(), strict=True) if found]


def tell_apart(
    model: Any, special: Collection[int], wanted: Collection[int], seed: int, *, draw: bool = True
) -> list[int]:
    """Draw anew the rows, of input and output, of the wanted special tokens that the model cannot tell apart; return which."""
    matrices = {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    found: set[int] = set()
    for weight in matrices.values():  # one matrix where input and output share it
        chosen = [token for token in alike(weight, special) if token in wanted]
        found.update(chosen)
        if chosen and draw:
            others = torch.ones(len(weight), dtype=torch.bool)
            others[sorted(special)] = False
            learnt = weight.detach()[others].float()
            noise = torch.randn(len(chosen), weight.shape[1], generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                weight[chosen] = (learnt.mean(dim=0) + learnt.std(dim=0) * noise).to(weight.dtype)
    return sorted(found)
