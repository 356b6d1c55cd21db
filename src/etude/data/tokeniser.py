"""Text to tokens, fast and exactly as the model's own tokeniser does it.

`tokenizers` is the reference; `fastokens` gives the same tokens several times as fast (benchmarks/corpus.py), for
the kinds of tokeniser it knows. It is trusted only after it has agreed with the reference on odd text and on the first
documents of the unit at hand; where it does not, the reference is used and the manifest says so.

Text that spells a special token, such as `<|endoftext|>` in a file about tokenisers, is encoded as ordinary text: no
document can forge a boundary.

The tokeniser of a corpus: the base's own, another folder's, or one trained here.

Trained ones are byte-level BPE, so that every text can be written: words with at most one sign before them, single digits,
runs of signs, indentation. The chat, tool and fill-in-the-middle tokens and some reserved ones come first in the vocabulary.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from etude.errors import UserError, one_line
from etude.files import publish_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]
    from collections.abc import Iterable

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


END = "<|endoftext|>"
NAMED_TOKENS = (
    END, "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
RESERVED_TOKENS = 16
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = "chat_template.jinja"


def train(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE and save it as a Hugging Face tokeniser with a ChatML template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*NAMED_TOKENS, *(f"<|reserved_{number}|>" for number in range(RESERVED_TOKENS))]
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    if (size := made.get_vocab_size()) < vocabulary:
        advice = "add text or lower data.tokeniser.vocabulary"
        raise UserError(f"this corpus gives a vocabulary of {size} tokens, not {vocabulary}; {advice}")
    saved = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=END, eos_token=END, pad_token=END, extra_special_tokens=special[1:]
    )
    saved.chat_template = resources.files("etude.models").joinpath("sprout", TEMPLATE).read_text(encoding="utf-8")
    work = folder.with_name(f"{folder.name}.work")
    saved.save_pretrained(work)
    publish_folder(work, folder)


def take_over(model: Path, folder: Path) -> None:
    """Place a model's tokeniser into a folder of its own, as tokenizer.json and what goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (model / "tokenizer.json").is_file():
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
        return
    from etude.models.load import load_tokeniser  # and torch with it

    tokeniser: Any = load_tokeniser(model)
    if not getattr(tokeniser, "is_fast", False):
        why = "has no tokenizer.json and none can be made of what it has"
        raise UserError(f"{model} {why}; convert its tokeniser first")
    tokeniser.save_pretrained(folder)
