"""What samples: the seam between whoever wants text and whatever writes it.

Token ids go in and come out, because text that is tokenised again is not always the tokens that were sampled. A completion says of
every token under which weights it was sampled, and how likely it was: under the distribution it was drawn from (after temperature,
top-k and top-p), and under the model itself (temperature 1, nothing cut off), which is what a trainer computes.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, Protocol

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FinishReason = Literal["stop", "length"]
OnTokens = Optional["Callable[[list[Token]], None]"]  # called on the event loop as tokens come


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. Temperature 0 takes the likeliest token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None  # the same seed gives the same tokens, whatever else is in the batch
    stop_tokens: frozenset[int] = frozenset()  # the one sampled is part of the completion
    stop: tuple[str, ...] = ()  # texts; the tokens that wrote one are part of the completion
    alternatives: int = 0  # likeliest tokens to return at each place, with their log-probs at temperature 1
    experts: bool = False  # return which experts each token went to
    experts_from: int = 0  # the first position to tell them of: those before it may come from the cache
    score: bool = False  # return the log-probs of the prompt's tokens, too
    # Makes what limits one completion: `allowed()` gives a bit for every token that may come next, `take(token)` goes on.
    constraint: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.max_tokens < 1:
            raise UserError(f"max_tokens = {self.max_tokens}: ask for at least one token")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature = {self.temperature}: must be 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k}: must be 0 (all tokens) or more")
        if any(not text for text in self.stop):
            raise UserError("a stop text is empty; every text contains it")
        if not 0 <= self.alternatives <= 20:
            raise UserError(f"alternatives = {self.alternatives}: 0 to 20 can be returned")


class Token(NamedTuple):  # there are hundreds of thousands a second
    """One sampled token."""

    id: int
    logprob: float  # under the distribution it was drawn from
    raw_logprob: float  # at temperature 1 with nothing cut off
    version: int  # of the weights
    alternatives: tuple[tuple[int, float], ...] = ()  # (id, raw log-prob), likeliest first


@dataclass(frozen=True)
class Completion:
    """What was written after a prompt."""

    tokens: list[Token]
    finish_reason: FinishReason
    stopped_by: int | str | None = None  # the stop token or the stop text
    cached: int = 0  # tokens of the prompt that were not computed again
    experts: Any = (
        None  # where asked for: int16 [positions of prompt and completion but the last, layers, experts a token]
    )
    prompt: list[Token] = field(default_factory=list)  # where asked for; the first has no log-prob (NaN)

    @property
    def token_ids(self) -> list[int]:
        """Return the ids."""
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probs under the distribution sampled from."""
        return [token.logprob for token in self.tokens]

    @property
    def raw_logprobs(self) -> list[float]:
        """Return the log-probs at temperature 1 with nothing cut off."""
        return [token.raw_logprob for token in self.tokens]

    @property
    def versions(self) -> list[int]:
        """Return the version of the weights each token was sampled from."""
        return [token.version for token in self.tokens]


@dataclass(frozen=True)
class PolicyInfo:
    """What a caller may want to know beforehand."""

    name: str
    context: int  # tokens of prompt and completion together, at most
    vocabulary: int
    details: dict[str, Any] = field(default_factory=dict)

    def check(self, prompt: Sequence[int], sampling: Sampling, others: Iterable[int] = ()) -> None:
        """Refuse what cannot be sampled; `others`: further tokens that must be in the vocabulary."""
        if not prompt or {*map(type, prompt)} != {int}:
            raise UserError("a prompt is token ids, whole numbers, at least one; this one is empty or holds others")
        for token in (min(prompt), max(prompt), *others):
            if not 0 <= token < self.vocabulary:
                raise UserError(f"token id {token} is outside the vocabulary of {self.vocabulary}")
        if len(prompt) + sampling.max_tokens > self.context:
            asked = f"{len(prompt)} tokens of prompt and max_tokens = {sampling.max_tokens}"
            raise UserError(f"{asked} are more than the context of {self.context} tokens; shorten one or the other")


class Busy(Exception):  # noqa: N818 - a state, not a mistake
    """The policy has as many requests as it may hold; try again in `after` seconds."""

    def __init__(self, after: float) -> None:
        super().__init__(f"the queue is full; try again in {after:.0f} s")
        self.after = after


class EngineStopped(RuntimeError):  # noqa: N818 - a state, not a mistake
    """The engine will answer nothing more; another one may take its requests over."""


class Policy(Protocol):
    """Anything that samples. `generate` may be called many times at once; cancelling its task cancels the request."""

    @property
    def info(self) -> PolicyInfo:
        """Return what a caller may want to know beforehand."""
        ...

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return a completion. UserError: the request is wrong. Busy: not now.

        Requests of one session extend each other: what was computed is kept. `on_tokens` is called on the event loop.
        """
        ...

    async def close(self) -> None:
        """Let go of everything; requests under way end with an error."""
        ...


def to_npy(array: Any) -> str:
    """Return an array as vLLM sends those of experts: base64 of a .npy file."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def from_npy(text: str) -> Any:
    import numpy as np

    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
