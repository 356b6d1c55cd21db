"""Guessing ahead without changing what is written (Leviathan et al., 2023; Chen et al., 2023).

Heads guess k tokens, the model reads them all in one pass, and as many are kept as the model itself would have written. A guess drawn
from q is kept with probability min(1, p / q); at the first one refused a token is drawn from what p has more than q. So whatever
the heads guess, each token is distributed as the model's own; with temperature 0 it is the model's own.

Shapes: R requests, k guesses, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from etude.inference.sampler import draw, uniform

if TYPE_CHECKING:
    from etude.inference.sampler import Choice

GUESS, KEEP = 1, 2  # streams of random numbers; 0 is for the token that is drawn from the model


@dataclass
class Round:
    """What one round wrote: the guesses kept, and one token more."""

    tokens_Rk1: torch.Tensor  # the first `kept` + 1 count
    logprobs_Rk1: torch.Tensor
    kept_R: torch.Tensor


def guess(scaled_RV: torch.Tensor, choice: Choice, position_R: torch.Tensor) -> torch.Tensor:
    """Return a guess for each request from a head's distribution, given as logits."""
    weights = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp()
    drawn = draw(weights, uniform(choice.seed, position_R, GUESS))
    return torch.where(choice.temperature == 0, scaled_RV.argmax(-1), drawn)


def judge(
    model_Rk1V: torch.Tensor, head_RkV: torch.Tensor, guess_Rk: torch.Tensor, choice: Choice, position_R: torch.Tensor
) -> Round:
    """Keep what the model would have written.

    Both distributions are given as logits, scaled and cut; `position_R` is that of the first guess.
    """
    guesses = guess_Rk.shape[1]
    greedy_R1 = choice.temperature[:, None] == 0
    best_Rk1 = model_Rk1V.argmax(-1)
    # A vocabulary is long: what is needed of it is looked up, and only the row of the last token is gone through as a whole.
    sums_Rk1, head_sums_Rk = model_Rk1V.logsumexp(-1), head_RkV.logsumexp(-1)
    place_Rk = position_R[:, None] + torch.arange(guesses, device=guess_Rk.device)
    likelier = _of(model_Rk1V[:, :-1], guess_Rk) - sums_Rk1[:, :-1] - _of(head_RkV, guess_Rk) + head_sums_Rk
    lucky = uniform(choice.seed[:, None], place_Rk, KEEP) < likelier.exp()
    kept_R = torch.where(greedy_R1, guess_Rk == best_Rk1[:, :-1], lucky).long().cumprod(1).sum(1)
    p_RV = (_row(model_Rk1V, kept_R) - sums_Rk1.gather(1, kept_R[:, None])).exp()
    refused_R = kept_R.clamp(max=guesses - 1)
    q_RV = (_row(head_RkV, refused_R) - head_sums_Rk.gather(1, refused_R[:, None])).exp()
    # After the last guess there is nothing to subtract; what rounding alone refused is drawn from p.
    more_RV = (p_RV - q_RV * (kept_R < guesses)[:, None]).clamp(min=0)
    more_RV = torch.where(more_RV.sum(-1, keepdim=True) > 0, more_RV, p_RV)
    drawn_R = draw(more_RV, uniform(choice.seed, position_R + kept_R))
    last_R1 = torch.where(greedy_R1, best_Rk1.gather(1, kept_R[:, None]), drawn_R[:, None])
    place_Rk1 = torch.arange(guesses + 1, device=guess_Rk.device)[None]
    tokens_Rk1 = torch.where(place_Rk1 == kept_R[:, None], last_R1, F.pad(guess_Rk, (0, 1)))
    return Round(tokens_Rk1, torch.where(greedy_R1, 0.0, _of(model_Rk1V, tokens_Rk1) - sums_Rk1), kept_R)


def _row(values_RkV: torch.Tensor, which_R: torch.Tensor) -> torch.Tensor:
    return values_RkV.gather(1, which_R[:, None, None].expand(-1, 1, values_RkV.shape[2]))[:, 0]


def _of(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]
