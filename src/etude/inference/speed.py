"""What heads are worth on this machine: one request at a time, with guessing ahead and without, the same texts."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from etude.inference.local import build
from etude.inference.policy import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.inference.engine import Engine


@dataclass(frozen=True)
class Guessing:
    """Tokens a second, and how the guesses fared."""

    plain: float
    guessing: float
    kept: float  # of the guesses
    tokens_a_round: float

    @property
    def lines(self) -> list[str]:
        """Return what a person wants to know."""
        gain = self.guessing / self.plain
        pays = "" if gain > 1 else "; it does not pay here, so the engine will leave it"
        return [
            f"decoding one request: {self.guessing:,.0f} tokens/s with guessing, {self.plain:,.0f} without: {gain:.2f} times"
            f" as fast{pays}",
            f"{self.kept:.0%} of the guesses were kept, {self.tokens_a_round:.2f} tokens a round",
        ]

    def as_dict(self) -> dict[str, float]:
        """Return the figures."""
        return asdict(self)


def measure_guessing(model: Any, heads: Any, prompts: Sequence[Sequence[int]], new: int) -> Guessing:
    """Write after each prompt, one by one and greedily, in turns with and without; the first pair warms up."""
    engine = build(
        model, heads, str, rows=1, context=max(map(len, prompts)) + new, compiled=model.device.type == "cuda"
    )
    seconds = {True: 0.0, False: 0.0}
    guessed = kept = 0
    for index, prompt in enumerate([prompts[0], *prompts]):
        for ahead in (False, True):
            engine.pace.wish = ahead
            before = (engine.counts.guesses, engine.counts.kept)
            took = _write(engine, prompt, new)
            if index:
                seconds[ahead] += took
                guessed += engine.counts.guesses - before[0]
                kept += engine.counts.kept - before[1]
    tokens, share = len(prompts) * new, kept / max(1, guessed)
    return Guessing(tokens / seconds[False], tokens / seconds[True], share, 1 + share * heads.depth)


def _write(engine: Engine, prompt: Sequence[int], new: int) -> float:
    """Return the seconds one request takes, its prompt included, which is as long in both ways."""
    engine.submit(prompt, Sampling(new, temperature=0), None, None, lambda _: None)
    began = time.perf_counter()
    while engine.busy():
        engine.step()
    return time.perf_counter() - began
