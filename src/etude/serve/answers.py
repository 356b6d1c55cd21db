"""Answers in the shapes of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from etude.serve.wire import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.inference.policy import Completion
    from etude.serve.prepare import Job
    from etude.serve.text import TokenTexts
    from etude.serve.writer import Piece

LEAST = -9999.0  # what clients expect for a log-prob of minus infinity, which JSON cannot say


class Answer:
    """The answer to one job. Log-probs are the model's own: at temperature 1, with nothing cut off."""

    def __init__(self, job: Job, model: str, texts: TokenTexts) -> None:
        self.job, self.model, self.texts, self.created = job, model, texts, int(time.time())
        self.chat = isinstance(job.request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.called: dict[int, int] = {}  # calls in chunks so far, by choice

    def whole(self, pieces: Sequence[Piece], completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for index, piece in enumerate(pieces):
            content = piece.text if piece.text or not piece.calls else None
            calls = {"tool_calls": _calls(piece)} if piece.calls else {}
            said = (
                {"message": {"role": "assistant", "content": content, **calls}} if self.chat else {"text": piece.text}
            )
            choices.append(self._choice(index, piece, said, first=True))
        return self._envelope("chat.completion", choices) | {"usage": self.usage(completions)}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Return one chunk of a stream; None if there is nothing to tell."""
        request, first, before = self.job.request, index not in self.called, self.called.get(index, 0)
        self.called[index] = before + len(piece.calls)
        about_tokens = piece.ids and (request.return_token_ids or request.alternatives is not None)
        if not (piece.text or piece.calls or about_tokens or piece.reason or (first and self.chat)):
            return None
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        delta |= {"content": piece.text} if piece.text else {}
        delta |= {"tool_calls": _calls(piece, before)} if piece.calls else {}
        choice = self._choice(index, piece, {"delta": delta} if self.chat else {"text": piece.text}, first=first)
        no_usage = {"usage": None} if request.stream_options.include_usage else {}
        return self._envelope("chat.completion.chunk", [choice]) | no_usage

    def last_chunk(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """Return the chunk that tells what was used, if it is wanted."""
        if not self.job.request.stream_options.include_usage:
            return None
        return self._envelope("chat.completion.chunk", []) | {"usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return how many tokens went in and came out."""
        into, out = self.job.prompt_tokens, sum(len(completion.tokens) for completion in completions)
        cached = min(into, sum(completion.cached for completion in completions))
        usage = {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, piece: Piece, said: dict[str, Any], *, first: bool) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": self._logprobs(piece), "finish_reason": piece.reason}
        if self.job.request.return_token_ids:
            choice |= {"token_ids": piece.ids} | ({"prompt_token_ids": self.job.orders[index].prompt} if first else {})
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        wanted, tokens = self.job.request.alternatives, piece.tokens
        if wanted is None:
            return None
        likely = [token.alternatives[:wanted] for token in tokens]
        if self.chat:
            told = [self._token(token.id, token.raw_logprob) for token in tokens]
            others = [[self._token(*other) for other in each] for each in likely]
            return {"content": [one | {"top_logprobs": top} for one, top in zip(told, others, strict=True)]}
        return {
            "tokens": [self._word(token.id) for token in tokens],
            "token_logprobs": [max(token.raw_logprob, LEAST) for token in tokens],
            "top_logprobs": [{self._word(number): max(value, LEAST) for number, value in each} for each in likely],
        }

    def _token(self, number: int, logprob: float) -> dict[str, Any]:
        written = list(self.texts.bytes_of(number))
        return {"token": self._word(number), "logprob": max(logprob, LEAST), "bytes": written}

    def _word(self, number: int) -> str:
        return self.texts.bytes_of(number).decode(errors="replace")


def _calls(piece: Piece, before: int | None = None) -> list[dict[str, Any]]:
    """Return the calls of a piece; in a chunk they are numbered from `before`."""
    told = []
    for place, call in enumerate(piece.calls):
        number = {} if before is None else {"index": before + place}
        function = {"name": call.name, "arguments": call.arguments}
        told.append(number | {"id": call.id, "type": "function", "function": function})
    return told
