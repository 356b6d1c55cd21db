"""Text to tokens, fast and exactly as the model's own tokeniser does it.

`tokenizers` is the reference; `fastokens` gives the same tokens several times as fast (benchmarks/corpus.py), for
the kinds of tokeniser it knows. It is trusted only after it has agreed with the reference on odd text and on the first
documents of the unit at hand; where it does not, the reference is used and the manifest says so.

Text that spells a special token, such as `<|endoftext|>` in a file about tokenisers, is encoded as ordinary text: no
document can forge a boundary.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]

CHECKED_BYTES = 100_000  # of each unit, encoded twice
MARKUP = re.compile(r"<.+>|\[[A-Z_]+\]|\{\{.+\}\}", re.DOTALL)
ODD_TEXTS = ("", " ", "\n\n  \n", "a\tb\f", "naïve e\u0301 Ａ\u3000漢字 \U0001f600\u200b", "x" * 2000,
             "0123456789 1,000.5e-3", "<|x|>")  # fmt: skip


class Encoder:
    """One tokeniser file."""

    def __init__(self, file: Path) -> None:
        try:
            written = _neutralised(file.read_text(encoding="utf-8"))
            self.reference = Tokenizer.from_str(written)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise UserError(f"{file} is not a tokeniser: {one_line(error)}") from None
        self.reference.encode_special_tokens = True
        self.reference.no_truncation()
        self.fast = _fast_tokeniser(written)
        self.added = {token.content: number for number, token in self.reference.get_added_tokens_decoder().items()}
        self.use_fast = self._agrees([*ODD_TEXTS, *(f"a{content}b" for content in self.added)])
        self._unchecked = CHECKED_BYTES

    @property
    def vocabulary(self) -> int:
        """How many ids there are, added tokens included."""
        return 1 + max(self.reference.get_vocab(with_added_tokens=True).values())

    def token(self, name: str) -> int | None:
        """Return the id of an added token by its name: one that no text is encoded to."""
        return self.added.get(name)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        if self.use_fast and self._unchecked > 0:
            before = accumulate(map(len, texts), initial=0)  # characters of the texts before each, and of all
            pairs = zip(texts, before, strict=False)
            some = [text[: self._unchecked] for text, size in pairs if size <= self._unchecked]
            self._unchecked -= sum(map(len, some))
            self.use_fast = self._agrees(some)
        return self._fast(texts) if self.use_fast else self._slow(texts)

    def _agrees(self, texts: Sequence[str]) -> bool:
        if self.fast is None:
            return False
        pairs = zip(self._fast(texts), self._slow(texts), strict=True)
        return all(np.array_equal(fast, slow) for fast, slow in pairs)

    def _fast(self, texts: Sequence[str]) -> list[Tokens]:
        assert self.fast is not None
        if not texts:
            return []  # numpy would split nothing into one part
        ids, offsets = self.fast.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.split(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)[1:-1].astype(np.int64))

    def _slow(self, texts: Sequence[str]) -> list[Tokens]:
        # One by one: the library keeps some twenty times the size of a text until it is done with all.
        encodings = (self.reference.encode(text, add_special_tokens=False) for text in texts)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def _neutralised(written: str) -> str:
    """Return a tokeniser in which all tokens that look like mark-up are special, so that text cannot spell them.

    Some tokenisers declare their tool and fill-in-the-middle tokens as ordinary. Runs of spaces are, and stay so.
    """
    tokeniser = json.loads(written)
    for token in tokeniser.get("added_tokens") or []:
        token["special"] = token["special"] or bool(MARKUP.fullmatch(token["content"]))
    return json.dumps(tokeniser)


def _fast_tokeniser(written: str) -> Any:
    import fastokens

    try:
        return fastokens.Tokenizer.from_json_str(written)
    except Exception:  # noqa: BLE001 - a kind of tokeniser it does not know: the reference serves
        return None
