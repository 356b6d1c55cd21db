"""Tokens are exactly those of the model's own tokeniser."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import etude
from etude.data import tokenise
from etude.data.tokenise import Encoder
from etude.errors import UserError
from tests import tiny

SPROUT = Path(etude.__file__).parent / "models" / "sprout" / "tokenizer.json"


@pytest.fixture(scope="module")
def sprout() -> Encoder:
    return Encoder(SPROUT)


@cache
def reference() -> Tokenizer:
    loaded = Tokenizer.from_file(str(SPROUT))
    loaded.encode_special_tokens = True
    return loaded


@given(texts=st.lists(st.text(max_size=40), max_size=4))
def test_tokens_equal_the_reference(sprout: Encoder, texts: list[str]) -> None:
    expected = [reference().encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokens.tolist() for tokens in sprout.encode(texts)] == expected


def test_the_fast_tokeniser_is_used_for_sprout(sprout: Encoder) -> None:
    assert sprout.use_fast


def test_spelled_special_tokens_are_ordinary_text(sprout: Encoder) -> None:
    tokens = sprout.encode(["<|endoftext|><|fim_prefix|><tool_call>"])[0]
    assert tokens.min() > 27  # special and reserved tokens come first in sprout's vocabulary
    assert sprout.reference.decode(tokens.tolist()) == "<|endoftext|><|fim_prefix|><tool_call>"


def test_a_fast_tokeniser_that_disagrees_is_not_used() -> None:
    encoder = Encoder(SPROUT)

    class Wrong:
        def encode_batch_flat(self, texts: list[str], **_: object) -> tuple[bytes, bytes]:
            return b"", np.zeros(len(texts) + 1, np.uint64).tobytes()

    encoder.fast = Wrong()
    assert encoder.encode(["some text"])[0].tolist() == sprout_tokens("some text")
    assert not encoder.use_fast


def sprout_tokens(text: str) -> list[int]:
    return list(reference().encode(text, add_special_tokens=False).ids)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokeniser"):
        Encoder(tmp_path / "tokenizer.json")


def test_a_trained_tokeniser_writes_everything_and_has_the_chat_tokens(tmp_path: Path) -> None:
    source = Path(tokenise.__file__).read_text()
    tokenise.train_tokeniser([source] * 20, 512, tmp_path)
    encoder = Encoder(tmp_path / "tokenizer.json")
    assert encoder.vocabulary == 512
    text = "naïve\t漢字 \U0001f600\n\n  def f(x):\r\n    return 1_000\n"
    assert encoder.reference.decode(encoder.encode([text])[0].tolist()) == text
    assert [encoder.added[name] for name in tokenise.NAMED_TOKENS] == list(range(len(tokenise.NAMED_TOKENS)))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_training_on_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lower data\.tokeniser\.vocabulary"):
        tokenise.train_tokeniser(["a b c"], 1000, tmp_path)


def test_a_tokeniser_is_taken_over_from_a_model(tiny_base: Path, tmp_path: Path) -> None:
    tokenise.copy_tokeniser(tiny_base, tmp_path / "tokeniser")
    taken = Encoder(tmp_path / "tokeniser" / "tokenizer.json")
    assert taken.vocabulary == len(tiny.tokeniser())
    assert taken.encode(["def add"])[0].tolist() == tiny.tokeniser()("def add")["input_ids"]


def test_tokens_that_are_declared_ordinary_cannot_be_spelled_either(tmp_path: Path) -> None:
    written = json.loads(SPROUT.read_text())
    for token in written["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    encoder = Encoder(tmp_path / "tokenizer.json")
    assert (
        encoder.encode(["a<|fim_middle|>b<|endoftext|>"])[0].tolist()
        == Encoder(SPROUT).encode(["a<|fim_middle|>b<|endoftext|>"])[0].tolist()
    )
    assert encoder.added["<|fim_middle|>"] == 4
    assert "the" not in encoder.added  # an ordinary token is no separator
