"""When a request has written what it was to stop at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.inference.policy import Sampling


class Stop:
    """Watches one request. A stop text may begin or end anywhere in a token, so the last tokens are read as text together."""

    def __init__(self, sampling: Sampling, decode: Callable[[list[int]], str]) -> None:
        self._tokens, self._texts, self._decode = sampling.stop_tokens, sampling.stop, decode
        # A token may be part of a character only, and the text's first token too: some more than the longest has bytes.
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + 8
        self._last: list[int] = []
        self.by: int | str | None = None

    def feed(self, token: int) -> bool:
        """Take the next token; return whether this is the end."""
        if token in self._tokens:
            self.by = token
        elif self._texts:
            self._last = [*self._last[1 - self._tail :], token]
            written = self._decode(self._last)
            self.by = min((text for text in self._texts if text in written), key=written.find, default=None)
        return self.by is not None
