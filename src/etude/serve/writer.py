"""What a client is shown of a completion: text and calls, out of tokens. The same whether it is streamed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from etude.serve.calls import CallReader
from etude.serve.text import StopCut

if TYPE_CHECKING:
    from etude.inference.policy import Completion, Sampling, Token
    from etude.serve.calls import Call
    from etude.serve.text import TokenTexts


class Piece(NamedTuple):
    """A part of a completion, or all of it."""

    text: str
    calls: list[Call]
    tokens: list[Token]  # without the stop token, which nobody is shown
    ids: list[int]  # of all that was sampled
    reason: str | None  # why it ended; None: it goes on


class Writer:
    """Writes one completion."""

    def __init__(self, texts: TokenTexts, sampling: Sampling, *, reads_calls: bool) -> None:
        self.reader, self.cut = texts.reader(), StopCut(sampling.stop)
        self.calls = CallReader() if reads_calls else None
        self.stop_tokens = sampling.stop_tokens
        self.seen = 0  # tokens

    def write(self, tokens: list[Token], completion: Completion | None = None) -> Piece:
        """Return what is certain after these tokens; with the whole completion, all that is left of it."""
        if completion is not None:
            tokens = completion.tokens[self.seen :]
        self.seen += len(tokens)
        shown = [token for token in tokens if token.id not in self.stop_tokens]
        text = "".join(self.reader.feed(token.id) for token in shown)
        text = self.cut.feed(text if completion is None else text + self.reader.flush())
        text += "" if completion is None else self.cut.flush()
        text, calls = self.calls.feed(text) if self.calls else (text, [])
        reason: str | None = None
        if completion is not None:
            text += self.calls.flush() if self.calls else ""
            reason = "stop" if self.cut.found else completion.finish_reason
            reason = "tool_calls" if self.calls and self.calls.found else reason
        return Piece(text, calls, shown, [token.id for token in tokens], reason)
