"""Text to tokens, fast and exactly as the model's own tokeniser does it.

`tokenizers` is the reference; `fastokens` gives the same tokens seven to twenty times as fast (benchmarks/corpus.py), for
the kinds of tokeniser it knows. It is trusted only after it has agreed with the reference on odd text and on the first
documents of the unit at hand; where it does not, the reference is used and the manifest says so.

Text that spells a special token, such as `<|endoftext|>` in a file about tokenisers, is encoded as ordinary text: no
document can forge a boundary.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]

CHECKED_BYTES = 100_000  # of each unit, encoded twice
ODD_TEXTS = (
    "",
    " ",
    "\n\n  \n",
    "a\tb\f",
    "naïve e\u0301 Ａ\u3000漢字 \U0001f600\u200b",
    "x" * 2000,
    "0123456789 1,000.5e-3",
    "<|x|>",
)


class Encoder:
    """One tokeniser file."""

    def __init__(self, file: Path) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the build has a process a core already
        os.environ["RAYON_NUM_THREADS"] = "1"
        try:
            self.reference = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise UserError(f"{file} is not a tokeniser: {one_line(error)}") from None
        self.reference.encode_special_tokens = True
        self.reference.no_truncation()
        self.fast = _fast_tokeniser(file)
        spelled = [f"a{token.content}b" for token in self.reference.get_added_tokens_decoder().values()]
        self.use_fast = self._agrees([*ODD_TEXTS, *spelled])

    @property
    def vocabulary(self) -> int:
        """How many ids there are, added tokens included."""
        return 1 + max(self.reference.get_vocab(with_added_tokens=True).values())

    def token(self, name: str) -> int | None:
        """Return the id of a token by its name."""
        found = self.reference.token_to_id(name)
        return int(found) if found is not None else None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        if self.use_fast and self._agrees(_first(texts, CHECKED_BYTES)):
            return self._fast(texts)
        self.use_fast = False
        return self._slow(texts)

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
        encodings = self.reference.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def _fast_tokeniser(file: Path) -> Any:
    import fastokens

    try:
        return fastokens.Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - a kind of tokeniser it does not know: the reference serves
        return None


def _first(texts: Sequence[str], most_bytes: int) -> list[str]:
    chosen: list[str] = []
    size = 0
    for text in texts:
        if size > most_bytes:
            break
        chosen.append(text[:most_bytes])
        size += len(text)
    return chosen
