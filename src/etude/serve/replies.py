"""Replies in the shapes of OpenAI's API, whole and in chunks: text, reasoning and calls, out of tokens.

What is sent is never taken back, and in the end all of it is there, the same whether it is streamed or not. A character may be spread
over several tokens, a stop text over several characters, a call over many: what could still become any of them is held back until
it is known.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers.decoders import ByteLevel

from etude.agent.formats import begun
from etude.inference.server import LEAST, usage
from etude.serve.openai_schema import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.agent.calls import Call
    from etude.agent.formats import TurnReader
    from etude.inference.http import Order
    from etude.inference.policy import Completion, Sampling, Token
    from etude.serve.requests import Job


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
        for index, piece in enumerate(map(self._echoed, pieces, self.job.orders, completions)):
            content = piece.text if piece.text or not piece.calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content}
            message |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
            message |= {"tool_calls": _calls(piece)} if piece.calls else {}
            said = {"message": message} if self.chat else {"text": piece.text}
            choices.append(self._choice(index, piece, said, first=True))
        return self._envelope("chat.completion", choices) | {"usage": usage(self.job.prompt_tokens, completions)}

    def _echoed(self, piece: Piece, order: Order, done: Completion) -> Piece:
        if isinstance(self.job.request, ChatRequest) or not self.job.request.echo:
            return piece
        return piece._replace(text=self.texts.decode(order[0]) + piece.text, tokens=[*done.prompt, *done.tokens])

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Return one chunk of a stream; None if there is nothing to tell."""
        request, first, before = self.job.request, index not in self.called, self.called.get(index, 0)
        self.called[index] = before + len(piece.calls)
        about_tokens = piece.ids and (request.return_token_ids or request.alternatives is not None)
        if not (piece.text or piece.reasoning or piece.calls or about_tokens or piece.reason or (first and self.chat)):
            return None
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        delta |= {"content": piece.text} if piece.text else {}
        delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        delta |= {"tool_calls": _calls(piece, before)} if piece.calls else {}
        choice = self._choice(index, piece, {"delta": delta} if self.chat else {"text": piece.text}, first=first)
        no_usage = {"usage": None} if request.stream_options.include_usage else {}
        return self._envelope("chat.completion.chunk", [choice]) | no_usage

    def last_chunk(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """Return the chunk that tells what was used, if it is wanted."""
        if not self.job.request.stream_options.include_usage:
            return None
        return self._envelope("chat.completion.chunk", []) | {"usage": usage(self.job.prompt_tokens, completions)}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, piece: Piece, said: dict[str, Any], *, first: bool) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": self._logprobs(piece), "finish_reason": piece.reason}
        if self.job.request.return_token_ids:
            choice |= {"token_ids": piece.ids} | ({"prompt_token_ids": self.job.orders[index][0]} if first else {})
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        wanted, tokens = self.job.request.alternatives, piece.tokens
        if wanted is None:
            return None
        likely = [token.alternatives[:wanted] for token in tokens]
        if self.chat:
            sampled = [self._token(token.id, token.raw_logprob) for token in tokens]
            others = [[self._token(*other) for other in each] for each in likely]
            return {"content": [one | {"top_logprobs": top} for one, top in zip(sampled, others, strict=True)]}
        return {
            "tokens": [self._word(token.id) for token in tokens],
            "token_logprobs": [None if isnan(token.raw_logprob) else max(token.raw_logprob, LEAST) for token in tokens],
            "top_logprobs": [
                None
                if isnan(token.raw_logprob)
                else {self._word(number): max(value, LEAST) for number, value in reversed(each)}
                for token, each in zip(tokens, likely, strict=True)
            ],
        }

    def _token(self, number: int, logprob: float) -> dict[str, Any]:
        written = list(self.texts.bytes_of(number))
        return {"token": self._word(number), "logprob": max(logprob, LEAST), "bytes": written}

    def _word(self, number: int) -> str:
        return self.texts.bytes_of(number).decode(errors="replace")


def _calls(piece: Piece, before: int | None = None) -> list[dict[str, Any]]:
    """Return the calls of a piece; in a chunk they are numbered from `before`."""
    calls = []
    for place, call in enumerate(piece.calls):
        number = {} if before is None else {"index": before + place}
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        calls.append(number | {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls


MARKS = {"<tool_call>", "</tool_call>", "<think>", "</think>"}  # special tokens that are part of the text
HELD = 16  # tokens held back for one character, where the tokeniser does not tell their bytes
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
# Byte-level tokenisers write each byte as a character of its own; this is the way back.
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


class TokenTexts:
    """What the tokens of a tokeniser write. Special tokens write nothing, but for those that mark calls and thoughts."""

    def __init__(self, tokeniser: Any) -> None:
        self.tokeniser = tokeniser
        added = tokeniser.added_tokens_decoder.items()
        self.silent = frozenset(number for number, token in added if token.special and token.content not in MARKS)
        backend = getattr(tokeniser, "backend_tokenizer", None)
        self.tells_bytes = isinstance(getattr(backend, "decoder", None), ByteLevel)

    def bytes_of(self, token: int) -> bytes:
        """Return what a token writes when it stands alone."""
        if not self.tells_bytes:
            return self.decode([token]).encode()
        word = self.tokeniser.convert_ids_to_tokens(token) or ""  # a model may have more tokens than its tokeniser
        try:
            return bytes(BYTE_OF[character] for character in word)
        except KeyError:  # a token added as it stands
            return str(word).encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, marks included."""
        return str(self.tokeniser.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def reader(self) -> _ByteReader | _WindowReader:
        """Return a reader for one completion."""
        return _ByteReader(self) if self.tells_bytes else _WindowReader(self)


class _ByteReader:
    """Exact for any sequence of tokens."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return "" if token in self.texts.silent else self.decoder.decode(self.texts.bytes_of(token))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class _WindowReader:
    """For tokenisers that put spaces between words: a token is read behind the one before it."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.before: list[int] = []
        self.window: list[int] = []

    def feed(self, token: int) -> str:
        if token in self.texts.silent:
            return ""
        self.window.append(token)
        text = self.flush()
        if text.endswith("\ufffd") and len(self.window) < HELD:
            return ""
        self.before = self.window if text else self.before + self.window
        self.window = []
        return text

    def flush(self) -> str:
        before = self.texts.decode(self.before)
        return self.texts.decode(self.before + self.window)[len(before) :]


class StopCut:
    """Ends a text before the stop text that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""
        self.met = False

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a stop text."""
        if self.met:
            return ""
        self.held += text
        ends = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        self.met = bool(ends)
        certain = min(ends)[1] if ends else len(self.held) - max((begun(self.held, s) for s in self.stops), default=0)
        out, self.held = self.held[:certain], "" if self.met else self.held[certain:]
        return out

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.met else self.held


class Piece(NamedTuple):
    """A part of a completion, or all of it."""

    text: str
    reasoning: str
    calls: list[Call]
    tokens: list[Token]  # without the stop token, which nobody is shown
    ids: list[int]  # of all that was sampled
    reason: str | None  # why it ended; None: it goes on


class Writer:
    """Writes one completion."""

    def __init__(self, texts: TokenTexts, sampling: Sampling, turn: TurnReader | None) -> None:
        self.reader, self.cut, self.turn = texts.reader(), StopCut(sampling.stop), turn
        self.stop_tokens = sampling.stop_tokens
        self.seen = self.calls = 0  # tokens; calls

    def write(self, tokens: list[Token], completion: Completion | None = None) -> Piece:
        """Return what is certain after these tokens; with the whole completion, all that is left of it."""
        over = completion is not None
        if completion:
            tokens = completion.tokens[self.seen :]
        self.seen += len(tokens)
        shown = [token for token in tokens if token.id not in self.stop_tokens]
        text = "".join(self.reader.feed(token.id) for token in shown)
        text = self.cut.feed(text + self.reader.flush() if over else text)
        text += self.cut.flush() if over else ""
        reasoning, calls = "", list["Call"]()
        if self.turn:
            text, reasoning, calls = self.turn.feed(text, final=over)
        self.calls += len(calls)
        reason: str | None = completion.finish_reason if completion else None
        if completion and (self.calls or self.cut.met):
            reason = "tool_calls" if self.calls else "stop"
        return Piece(text, reasoning, calls, shown, [token.id for token in tokens], reason)
