"""From logits to a token, for many requests at once, each with its own settings.

The random number of a token is a hash of its request's seed and its position, so that a request with a seed gets the same numbers
whatever else is in the batch, on any device, before and after it was set back.

Speculative decoding writes several tokens a pass without changing what is written (Leviathan et al., 2023; Chen et al., 2023). MTP
heads propose k draft tokens, the model reads them all in one pass, and as many are accepted as the model itself would have
written. A draft from q is accepted with probability min(1, p / q); at the first rejection a token is drawn from what p has more
than q. So whatever the heads propose, each token is distributed as the model's own; with temperature 0 it is the model's own.

Without heads, or beside them, drafts can be looked up (prompt lookup, Saxena 2023): what followed the last tokens where they stood
before, for an agent's calls copy from what it has read. Such a draft is certain: its q is 1.

Shapes: R requests, k draft tokens, V tokens of the vocabulary, W blocks of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

DRAFT, ACCEPT = 1, 2  # streams of random numbers; 0 is for the token that is drawn from the model
BLOCK = 128  # of the vocabulary, for drawing in two steps
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # SplitMix64


class Choice(NamedTuple):
    """How each request is sampled, as tensors [R]."""

    temperature: Tensor  # float32; 0: the likeliest token
    top_p: Tensor  # float32
    top_k: Tensor  # int64; 0: all
    seed: Tensor  # int64

    def rows(self, rows: Tensor | slice) -> Choice:
        """Return some of them."""
        return Choice(*(each[rows] for each in self))


def uniform(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """Return numbers in (0, 1), float32, that depend on seed, position and stream only.

    Never 0: it would draw the first token that has any weight, be it 1e-30.
    """
    mixed = seed + (position * 4 + stream + 1) * _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    mixed = mixed ^ _shifted(mixed, 31)
    return (_shifted(mixed, 41).float() + 0.5) * 2.0**-23


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shift right as if unsigned, which torch's int64 is not."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def draw(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return a token for each row, drawn in proportion to its weights: first a block of the vocabulary, then a token in it.

    A running sum over all of a vocabulary is slow on a GPU, and in float32 its end would be coarse.
    """
    weights_RWB = F.pad(weights_RV, (0, -weights_RV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums_RW = weights_RWB.sum(-1)
    ends_RW = sums_RW.cumsum(-1)
    goal_R1 = uniform_R[:, None] * ends_RW[:, -1:]
    block_R1 = _first_above(goal_R1, ends_RW, sums_RW)
    within_R1 = goal_R1 - (ends_RW.gather(1, block_R1) - sums_RW.gather(1, block_R1))
    chosen_RB = weights_RWB.gather(1, block_R1[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block_R1 * BLOCK + _first_above(within_R1, chosen_RB.cumsum(-1), chosen_RB))[:, 0]


def _first_above(goal_R1: Tensor, ends_RX: Tensor, weights_RX: Tensor) -> Tensor:
    """Return the first place whose running sum is above the goal; the last if none is. Never one without weight.

    A GPU adds up in another order for each place, so that a running sum may rise where there is nothing to add.
    """
    place, real_RX = torch.arange(ends_RX.shape[1], device=ends_RX.device), weights_RX > 0
    last_R1 = (real_RX * place).amax(-1, keepdim=True)
    return torch.where(real_RX & (ends_RX > goal_R1), place, last_R1).amin(-1, keepdim=True)


def truncated(logits_RV: Tensor, choice: Choice) -> Tensor:
    """Return the logits with what top-k, then top-p leave out at −∞; the likeliest token always stays."""
    ordered_RV, places_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    keep_RV = (rank < choice.top_k[:, None]) | (choice.top_k[:, None] == 0)
    shares_RV = ordered_RV.masked_fill(~keep_RV, -torch.inf).softmax(-1)
    before_RV = shares_RV.cumsum(-1) - shares_RV
    keep_RV &= (before_RV < choice.top_p[:, None]) | (choice.top_p[:, None] >= 1) | (rank == 0)
    return logits_RV.masked_fill(~torch.zeros_like(keep_RV).scatter(1, places_RV, keep_RV), -torch.inf)


def distribution(logits_RV: Tensor, choice: Choice, *, cut: bool) -> Tensor:
    """Return what each request draws from, as logits: scaled and, where any asks for it, cut; for temperature 0 see `sample`."""
    # Divided by next to nothing, two logits may become one, and the likeliest token another.
    scale_R = torch.where(choice.temperature == 0, 1.0, choice.temperature.clamp(min=1e-6))
    scaled_RV = logits_RV.float() / scale_R[:, None]
    return truncated(scaled_RV, choice) if cut else scaled_RV


def sample(
    logits_RV: Tensor, choice: Choice, position: Tensor, *, cut: bool, bits_RW: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, log-prob as sampled and raw log-prob for each request. `cut`: some has top-k or top-p (it costs a sort).

    `bits_RW`: which tokens each may draw, int32, a bit a token, the lowest first.
    """
    raw_RV = open_RV = logits_RV.float()
    if bits_RW is not None:
        allowed = (bits_RW[..., None] >> torch.arange(32, device=bits_RW.device, dtype=torch.int32)) & 1
        open_RV = raw_RV.masked_fill(allowed.flatten(1)[:, : raw_RV.shape[1]] == 0, -torch.inf)
    greedy = choice.temperature == 0
    scaled_RV = distribution(open_RV, choice, cut=cut)
    weights_RV = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp()
    drawn = draw(weights_RV, uniform(choice.seed, position))
    token = torch.where(greedy, open_RV.argmax(-1), drawn)
    logprob = weights_RV.gather(1, token[:, None])[:, 0].log() - weights_RV.sum(-1).log()
    return token, torch.where(greedy, 0.0, logprob), raw_logprobs(raw_RV, token)


def sample_packed(
    logits_RV: Tensor, choice: Choice, position: Tensor, *, cut: bool, bits_RW: Tensor | None = None
) -> Tensor:
    """Return token, log-prob and raw log-prob as one tensor, [3, R], which one copy brings to the host; float64 holds any token."""
    return torch.stack([each.double() for each in sample(logits_RV, choice, position, cut=cut, bits_RW=bits_RW)])


def raw_logprobs(logits_RV: Tensor, token: Tensor) -> Tensor:
    """Return the log-probs of some tokens at temperature 1."""
    raw_RV = logits_RV.float()
    return raw_RV.gather(1, token[:, None])[:, 0] - raw_RV.logsumexp(-1)


def draft(scaled_RV: Tensor, choice: Choice, position_R: Tensor) -> Tensor:
    """Return a draft for each request from a head's distribution, given as logits."""
    weights = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp()
    drawn = draw(weights, uniform(choice.seed, position_R, DRAFT))
    return torch.where(choice.temperature == 0, scaled_RV.argmax(-1), drawn)


def lookup(history_RT: Tensor, position_R: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    """Return what followed the last tokens of each request when they stood there before, [R, k], and whether they did, [R].

    The last three tokens if they can be found, else the last two; where they stood last. What goes on beyond the end repeats.
    """
    place_T = torch.arange(history_RT.shape[1], device=history_RT.device)
    last = [history_RT.gather(1, (position_R - back).clamp(min=0)[:, None]) for back in range(3)]
    before = [history_RT.roll(back, 1) == last[back] for back in range(3)]
    # `roll` brings the row's end to its beginning: a place has two tokens before it, or it does not count.
    pair_RT = before[0] & before[1] & (place_T >= 1) & (place_T < position_R[:, None])
    three_RT = pair_RT & before[2] & (place_T >= 2)
    rank_RT = torch.where(pair_RT, place_T + 1 + three_RT * history_RT.shape[1], 0)
    best_R, where_R = rank_RT.max(-1)
    period_R1 = (position_R - where_R).clamp(min=1)[:, None]
    following_Rk = where_R[:, None] + 1 + torch.arange(drafts, device=history_RT.device) % period_R1
    return history_RT.gather(1, following_Rk.clamp(max=history_RT.shape[1] - 1)), best_R > 0


def certain(tokens_Rk: Tensor, vocabulary: int) -> Tensor:
    """Return the logits of a distribution that draws these tokens and no others, [R, k, V]."""
    nowhere_RkV = torch.full((*tokens_Rk.shape, vocabulary), -torch.inf, device=tokens_Rk.device)
    return nowhere_RkV.scatter(-1, tokens_Rk[..., None], 0.0)


def judge(
    model_Rk1V: Tensor, head_RkV: Tensor, draft_Rk: Tensor, choice: Choice, position_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep what the model would have written: return tokens [R, k + 1], their log-probs, and how many drafts are accepted [R].

    The first `accepted` + 1 tokens count. Both distributions are given as logits, scaled and cut; `position_R` is that of the
    first draft.
    """
    drafts = draft_Rk.shape[1]
    greedy_R1 = choice.temperature[:, None] == 0
    best_Rk1 = model_Rk1V.argmax(-1)
    # A vocabulary is long: what is needed of it is looked up, and only the row of the last token is gone through as a whole.
    sums_Rk1, head_sums_Rk = model_Rk1V.logsumexp(-1), head_RkV.logsumexp(-1)
    place_Rk = position_R[:, None] + torch.arange(drafts, device=draft_Rk.device)
    likelier = _of(model_Rk1V[:, :-1], draft_Rk) - sums_Rk1[:, :-1] - _of(head_RkV, draft_Rk) + head_sums_Rk
    lucky = uniform(choice.seed[:, None], place_Rk, ACCEPT) < likelier.exp()
    accepted_R = torch.where(greedy_R1, draft_Rk == best_Rk1[:, :-1], lucky).long().cumprod(1).sum(1)
    p_RV = (_row(model_Rk1V, accepted_R) - sums_Rk1.gather(1, accepted_R[:, None])).exp()
    refused_R = accepted_R.clamp(max=drafts - 1)
    q_RV = (_row(head_RkV, refused_R) - head_sums_Rk.gather(1, refused_R[:, None])).exp()
    # After the last draft there is nothing to subtract; what rounding alone refused is drawn from p.
    more_RV = (p_RV - q_RV * (accepted_R < drafts)[:, None]).clamp(min=0)
    more_RV = torch.where(more_RV.sum(-1, keepdim=True) > 0, more_RV, p_RV)
    drawn_R = draw(more_RV, uniform(choice.seed, position_R + accepted_R))
    last_R1 = torch.where(greedy_R1, best_Rk1.gather(1, accepted_R[:, None]), drawn_R[:, None])
    place_Rk1 = torch.arange(drafts + 1, device=draft_Rk.device)[None]
    tokens_Rk1 = torch.where(place_Rk1 == accepted_R[:, None], last_R1, F.pad(draft_Rk, (0, 1)))
    logprobs_Rk1 = torch.where(greedy_R1, 0.0, _of(model_Rk1V, tokens_Rk1) - sums_Rk1)
    return tokens_Rk1, logprobs_Rk1, accepted_R


def _row(values_RkV: Tensor, which_R: Tensor) -> Tensor:
    return values_RkV.gather(1, which_R[:, None, None].expand(-1, 1, values_RkV.shape[2]))[:, 0]


def _of(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]
