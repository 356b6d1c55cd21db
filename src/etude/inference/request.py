"""One request on its way through the engine, and what the engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from etude.inference.pages import Held
    from etude.inference.policy import Completion, Sampling, Token
    from etude.inference.stopping import Stop


@dataclass(eq=False)
class Request:
    """One request on its way."""

    number: int
    sampling: Sampling
    session: str | None
    seed: int
    tokens: list[int]  # prompt and completion, as far as the host knows
    stop: Stop
    on_tokens: Callable[[list[Token]], None] | None
    on_end: Callable[[Completion | Exception], None]
    held: Held | None = None
    row: int | None = None
    computed: int = 0  # positions in the cache, as of what was launched; while it runs, its row knows
    launched: int = 0  # tokens asked of the device before its row began
    found: int = -1  # positions that were in the cache when it began, this time; −1: it has not begun yet
    cached: int = 0  # the same, the first time
    written: list[Token] = field(default_factory=list)
    trail: torch.Tensor | None = None  # hidden states of the last positions read, for heads
    routed: list[Any] = field(default_factory=list)  # experts, pass by pass
    over: bool = False

    @property
    def cut(self) -> bool:
        """Whether it asks for top-k or top-p."""
        return self.sampling.temperature > 0 and (self.sampling.top_p < 1 or self.sampling.top_k > 0)

    @property
    def seeded(self) -> bool:
        """Whether it asks for tokens that can be had again: those of a round are drawn otherwise than those of a step."""
        return self.sampling.seed is not None and self.sampling.temperature > 0

    @property
    def alone(self) -> bool:
        """Whether it asks for what only single steps give."""
        return self.sampling.alternatives > 0 or self.sampling.experts


@dataclass(frozen=True)
class Launched:
    """A step that the device has been given."""

    of: list[Request | None]  # by index in the result
    result: torch.Tensor  # [3, R, written], on its way to the host
    event: Any
    version: int
    alternatives: list[torch.Tensor]  # log-probs and tokens, likeliest first, where anybody asked

    def alternatives_of(self, index: int, count: int) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens at a place, with their log-probs."""
        values, places = (each[index, :count].tolist() for each in self.alternatives)
        return tuple(zip(places, values, strict=True))


@dataclass
class Counts:
    """What happened so far."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    set_back: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    steps: int = 0
    rounds: int = 0
    guesses: int = 0
    kept: int = 0
