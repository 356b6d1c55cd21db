"""Tokens to text while they come: what is written is never taken back, and in the end all of it is there.

A character may be spread over several tokens, and a stop text over several characters: what could still become either is held
back until it is known. How the tokens are split over calls makes no difference to the text.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers.decoders import ByteLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

MARKS = {"<tool_call>", "</tool_call>", "<think>", "</think>"}  # special tokens that are part of the text
HELD = 16  # tokens held back for one character, where the tokeniser does not tell their bytes
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
# Byte-level tokenisers write each byte as a character of its own; this is the way back.
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


class Reader(Protocol):
    """Turns the tokens of one completion into text, one by one."""

    def feed(self, token: int) -> str:
        """Return the text that is certain now."""
        ...

    def flush(self) -> str:
        """Return what was held back, at the end."""
        ...


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

    def reader(self) -> Reader:
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
        self.found = False

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a stop text."""
        if self.found:
            return ""
        self.held += text
        ends = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if ends:
            self.found = True
        certain = min(ends)[1] if ends else len(self.held) - max((begun(self.held, s) for s in self.stops), default=0)
        out, self.held = self.held[:certain], "" if self.found else self.held[certain:]
        return out

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return "" if self.found else self.held


def begun(text: str, word: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `word`."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)
