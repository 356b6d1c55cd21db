"""Text out of tokens, piece by piece: always a prefix of the whole, in the end all of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from etude.serve.replies import BYTE_OF, StopCut, TokenTexts
from tests import tiny

TEXTS = st.text(st.sampled_from("ab€😀é \ufffd\n") | st.characters(exclude_categories=["Cs"]), max_size=30)


def read(texts: TokenTexts, tokens: list[int]) -> list[str]:
    reader = texts.reader()
    return [*(reader.feed(token) for token in tokens), reader.flush()]


@given(st.lists(st.integers(0, 6143), max_size=40))
def test_any_tokens_give_the_text_of_all_of_them(tokeniser: Any, tokens: list[int]) -> None:
    texts = TokenTexts(tokeniser)
    assert texts.tells_bytes
    heard = [token for token in tokens if token not in texts.silent]
    assert "".join(read(texts, tokens)) == tokeniser.decode(heard, skip_special_tokens=False)


@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xA0, 0xC0, 0x41]), max_size=12))
def test_bytes_that_are_no_characters(tokeniser: Any, raw: list[int]) -> None:
    symbols = {byte: symbol for symbol, byte in BYTE_OF.items()}
    tokens = [tokeniser.convert_tokens_to_ids(symbols[byte]) for byte in raw]
    assert [TokenTexts(tokeniser).bytes_of(token) for token in tokens] == [bytes([byte]) for byte in raw]
    assert (
        "".join(read(TokenTexts(tokeniser), tokens)) == tokeniser.decode(tokens) == bytes(raw).decode(errors="replace")
    )


@given(TEXTS)
def test_no_piece_has_half_a_character(tokeniser: Any, text: str) -> None:
    tokens = tokeniser.encode(text, add_special_tokens=False)
    pieces = read(TokenTexts(tokeniser), tokens)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_a_character_comes_when_it_is_whole(tokeniser: Any) -> None:
    tokens = tokeniser.encode("😀", add_special_tokens=False)
    assert len(tokens) > 1
    assert read(TokenTexts(tokeniser), tokens) == [""] * (len(tokens) - 1) + ["😀", ""]


def test_special_tokens_are_silent_but_for_marks(tokeniser: Any) -> None:
    tokens = tokeniser.encode("a<|im_start|><tool_call>b<|endoftext|>", add_special_tokens=False)
    assert "".join(read(TokenTexts(tokeniser), tokens)) == "a<tool_call>b"


def test_a_token_the_tokeniser_does_not_have_writes_nothing(tokeniser: Any) -> None:
    assert read(TokenTexts(tokeniser), [10**6]) == ["", ""]


def test_a_token_added_with_characters_that_stand_for_no_byte() -> None:
    made = tiny.tokeniser()
    made.add_tokens(["two words", "日本"])
    tokens = made.encode("xtwo words日本y", add_special_tokens=False)
    assert "".join(read(TokenTexts(made), tokens)) == made.decode(tokens) == "xtwo words日本y"


@pytest.fixture(scope="module")
def spaced() -> Any:
    """A tokeniser as Llama 2 has it: spaces before words, bytes as tokens of their own."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁b", "c"]
    vocabulary = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made)


@given(TEXTS)
def test_a_tokeniser_that_puts_spaces_before_words(spaced: Any, text: str) -> None:
    tokens = spaced.encode(text, add_special_tokens=False)
    texts = TokenTexts(spaced)
    assert not texts.tells_bytes
    assert "".join(read(texts, tokens)) == spaced.decode(tokens, clean_up_tokenization_spaces=False)


def first_stop(text: str, stops: list[str]) -> str:
    """Brute force: read on a character at a time until a stop text is complete; of several, take the longest away."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


WORDS = st.text("abc", max_size=12)


@given(st.lists(WORDS, max_size=6), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_ends_the_text_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    cut = StopCut(stops)
    shown = [cut.feed(piece) for piece in pieces]
    for place in range(len(shown)):  # nothing that is shown is ever taken back
        assert first_stop("".join(pieces), stops).startswith("".join(shown[: place + 1]))
    assert "".join(shown) + cut.flush() == first_stop("".join(pieces), stops)
    assert cut.met == any(stop in "".join(pieces) for stop in stops)


def test_only_what_may_be_a_stop_text_is_held_back() -> None:
    cut = StopCut(["\n\nEND"])
    assert [cut.feed(piece) for piece in ("a\n", "\nE", "N", "d\n", "x")] == ["a", "", "", "\n\nENd", "\nx"]
