"""Speculative decoding: several tokens a pass without changing what is written (Leviathan et al., 2023; Chen et al., 2023).

MTP heads propose k draft tokens, the model reads them all in one pass, and as many are accepted as the model itself would have
written. A draft from q is accepted with probability min(1, p / q); at the first rejection a token is drawn from what p has more
than q. So whatever the heads propose, each token is distributed as the model's own; with temperature 0 it is the model's own.

With few requests a pass over k + 1 tokens of each costs what a pass over one costs, and accepted drafts are gained. With many it
costs more than it gains. Where that turns depends on device, model, heads and text, so `SpeculationSwitch` times both ways now and
then, for each size of batch.

Shapes: R requests, k draft tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from etude.inference.sampler import draw, uniform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from etude.inference.sampler import Choice

DRAFT, ACCEPT = 1, 2  # streams of random numbers; 0 is for the token that is drawn from the model


@dataclass
class Round:
    """What one round wrote: the drafts accepted, and one token more."""

    tokens_Rk1: Tensor  # the first `accepted` + 1 count
    logprobs_Rk1: Tensor
    accepted_R: Tensor


def draft(scaled_RV: Tensor, choice: Choice, position_R: Tensor) -> Tensor:
    """Return a draft for each request from a head's distribution, given as logits."""
    weights = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp()
    drawn = draw(weights, uniform(choice.seed, position_R, DRAFT))
    return torch.where(choice.temperature == 0, scaled_RV.argmax(-1), drawn)


def judge(model_Rk1V: Tensor, head_RkV: Tensor, draft_Rk: Tensor, choice: Choice, position_R: Tensor) -> Round:
    """Keep what the model would have written.

    Both distributions are given as logits, scaled and cut; `position_R` is that of the first draft.
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
    return Round(tokens_Rk1, torch.where(greedy_R1, 0.0, _of(model_Rk1V, tokens_Rk1) - sums_Rk1), accepted_R)


def _row(values_RkV: Tensor, which_R: Tensor) -> Tensor:
    return values_RkV.gather(1, which_R[:, None, None].expand(-1, 1, values_RkV.shape[2]))[:, 0]


def _of(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]


FIRST = 8  # steps tried of each way at the beginning
AGAIN, EVERY = 3, 200  # so many steps of the slower way in so many of both
MEMORY = 16  # steps
MARGIN = 1.05  # times faster the other way must be: what is equal would change sides all the time


@dataclass
class Way:
    """One way of going on, for one size of batch."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))  # of the last steps
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))  # a request and step
    steps: int = 0

    def note(self, seconds: float, tokens: float, *, counts: bool) -> None:
        """Take one more step into account; what does not count is better than nothing."""
        self.steps += 1
        if counts or not self.seconds:
            self.seconds.append(seconds)
            self.tokens.append(tokens)

    @property
    def rate(self) -> float:
        """Tokens a second of one request. The median: a step may have to compile something, or record a graph, first."""
        return statistics.fmean(self.tokens) / max(statistics.median(self.seconds), 1e-9)


@dataclass
class SpeculationSwitch:
    """Chooses, and says when it changes its mind."""

    say: Callable[[str], None]
    able: bool
    wish: bool | None = None  # True, False: always, never
    clock: Callable[[], float] = time.perf_counter
    _ways: dict[tuple[int, bool], Way] = field(default_factory=lambda: defaultdict(Way))
    _chosen: dict[int, bool] = field(default_factory=dict)
    _last: tuple[int, bool] | None = None

    def ahead(self, requests: int) -> bool:
        """Return whether to use draft tokens with so many requests."""
        if not self.able or not requests:
            return False
        if self.wish is not None:
            return self.wish
        size = requests.bit_length()
        drafting, plain = self._ways[size, True], self._ways[size, False]
        for way, ahead in ((drafting, True), (plain, False)):
            if way.steps < FIRST:
                return ahead
        gain, before = drafting.rate / plain.rate, self._chosen.get(size, True)
        faster = gain * MARGIN > 1 if before else gain > MARGIN
        if before != faster:
            many = f"{1 << (size - 1)} to {(1 << size) - 1} requests at once" if size > 1 else "one request at a time"
            self.say(
                f"speculative decoding is {'on again' if faster else 'off'} at {many}:"
                f" {gain:.2f} times the speed of one token at a time"
            )
        self._chosen[size] = faster
        return faster if (drafting.steps + plain.steps) % EVERY >= AGAIN else not faster

    @contextlib.contextmanager
    def timed(self, requests: int, *, ahead: bool, written: Callable[[], int]) -> Iterator[None]:
        """Time one step; `written` counts the tokens so far, of all requests.

        On a GPU what is read meanwhile is the step before, so the first one after a change does not count.
        """
        if not self.able:
            yield
            return
        began, before = self.clock(), written()
        yield
        way, tokens = (requests.bit_length(), ahead), (written() - before) / requests if ahead else 1.0
        self._ways[way].note(self.clock() - began, tokens, counts=way == self._last)
        self._last = way
