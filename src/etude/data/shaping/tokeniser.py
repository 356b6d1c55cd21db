"""The tokeniser of a corpus: the base's own, another folder's, or one trained here.

Trained ones are byte-level BPE, so that every text can be written: words with at most one sign before them, single digits,
runs of signs, indentation. The chat, tool and fill-in-the-middle tokens and some reserved ones come first in the vocabulary.
"""

from __future__ import annotations

import shutil
from importlib import resources
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import publish_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
