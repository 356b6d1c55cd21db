"""A policy that says what it was told to: for tests, demonstrations and attacks on the scoring.

Each turn is a text, or a function of the trace's text so far. It is encoded as a model would have to sample it, end of turn included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.inference.policy import Completion, PolicyInfo, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from etude.inference.policy import Sampling


class ScriptedPolicy:
    """Says one line a request; an empty turn when there are no more."""

    def __init__(
        self,
        lines: Iterable[str | Callable[[str], str]],
        encode: Callable[[str], list[int]],
        text: Callable[[Sequence[int]], str],
        end: int,
        *,
        context: int = 1 << 20,
    ) -> None:
        self._lines, self._encode, self._text, self._end = iter(lines), encode, text, end
        self.prompts: list[list[int]] = []  # what was asked, for tests
        self.info = PolicyInfo("scripted", context, 1 << 31)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,  # noqa: ARG002 - nothing is kept
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:
        """Return the next line."""
        self.prompts.append(list(prompt))
        line = next(self._lines, "")
        said = line if isinstance(line, str) else line(self._text(prompt))
        ids = [*self._encode(said), self._end]
        cut = len(ids) > sampling.max_tokens
        tokens = [Token(each, 0.0, 0.0, 0) for each in ids[: sampling.max_tokens]]
        if on_tokens is not None:
            on_tokens(tokens)
        return Completion(tokens, "length" if cut else "stop", None if cut else self._end)

    async def close(self) -> None:
        """There is nothing to let go of."""
