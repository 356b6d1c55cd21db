"""Stop texts against the text as a whole, written with sprout's byte-level tokeniser."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.engine import Stop
from etude.inference.policy import Sampling
from etude.models.bases import resolve
from etude.models.load import load_tokeniser


@pytest.fixture(scope="module")
def tokeniser() -> Any:
    return load_tokeniser(resolve("sprout").folder)


def fed(
    tokeniser: Any, tokens: list[int], *texts: str, stop_tokens: tuple[int, ...] = ()
) -> tuple[int, int | str | None]:
    """Return how many tokens were taken, and what stopped them."""
    stop = Stop(Sampling(1, stop=texts, stop_tokens=frozenset(stop_tokens)), tokeniser.decode)
    for index, token in enumerate(tokens):
        if stop.feed(token):
            return index + 1, stop.by
    return len(tokens), None


def by_bytes(tokeniser: Any, text: str) -> list[int]:
    """Return a text as one token a byte, so that every character beyond ASCII is in pieces."""
    return [token for byte in text.encode() for token in [tokeniser.convert_tokens_to_ids(_name_of(byte))]]


def _name_of(byte: int) -> str:
    """Return how a byte-level tokeniser spells a byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in plain else 256 + [each for each in range(256) if each not in plain].index(byte))


def test_a_stop_text_may_begin_and_end_inside_tokens(tokeniser: Any) -> None:
    tokens = tokeniser.encode("    return left + right\n\nclass Other:\n    pass\n", add_special_tokens=False)
    text = tokeniser.decode(tokens)
    for begin in range(len(text) - 6):
        stop = text[begin : begin + 6]
        first = next(count for count in range(1, len(tokens) + 1) if stop in tokeniser.decode(tokens[:count]))
        assert fed(tokeniser, tokens, stop) == (first, stop)


@pytest.mark.parametrize("stop", ["é", "日本", "🌱", "👩‍💻", "a🌱b", "\u0301"])
def test_a_stop_text_of_characters_that_come_in_pieces(tokeniser: Any, stop: str) -> None:
    before, after = "naïve — ", " und so weiter 🌲"
    tokens = by_bytes(tokeniser, before + stop + after)
    assert tokeniser.decode(tokens) == before + stop + after
    assert fed(tokeniser, tokens, stop) == (len((before + stop).encode()), stop)  # with its last byte, not before


def test_half_a_character_is_not_taken_for_another(tokeniser: Any) -> None:
    """🌱 and 🌲 share three bytes of four; 'é' is a part of neither 'è' nor a cut-off text."""
    assert fed(tokeniser, by_bytes(tokeniser, "🌲🌳🌲" * 9), "🌱") == (108, None)
    assert fed(tokeniser, by_bytes(tokeniser, "è" * 40), "é") == (80, None)


def test_a_long_stop_text_in_the_smallest_pieces(tokeniser: Any) -> None:
    stop = "日本語🌱" * 8
    tokens = by_bytes(tokeniser, "日" * 50 + stop + "日")
    assert fed(tokeniser, tokens, stop) == (150 + len(stop.encode()), stop)


def test_of_several_the_first_in_the_text_counts(tokeniser: Any) -> None:
    tokens = tokeniser.encode("one two three", add_special_tokens=False)
    assert fed(tokeniser, tokens, "three", "two")[1] == "two"
    assert fed(tokeniser, tokens, "never", "o three", "o th")[1] in {"o three", "o th"}

    def whole(tokens: list[int]) -> str:
        return "".join("one two three" if token else "…" for token in tokens)

    stop = Stop(Sampling(1, stop=("three", "two", "one ")), whole)  # all in one token
    assert not stop.feed(0)
    assert stop.feed(1)
    assert stop.by == "one "


def test_a_stop_token_stops_and_is_named(tokeniser: Any) -> None:
    end = tokeniser.eos_token_id
    tokens = [*tokeniser.encode("some text", add_special_tokens=False), end, 5]
    assert fed(tokeniser, tokens, stop_tokens=(end, 17)) == (len(tokens) - 1, end)
    assert fed(tokeniser, tokens, "some", stop_tokens=(end,))[1] == "some"
    assert fed(tokeniser, tokens[:-2]) == (len(tokens) - 2, None)
    assert fed(tokeniser, tokens, stop_tokens=(0 if end else 1,)) == (len(tokens), None)  # token 0 is a token like any


def test_nothing_is_read_as_text_where_no_text_stops() -> None:
    def never(tokens: list[int]) -> str:
        raise AssertionError(tokens)

    stop = Stop(Sampling(1, stop_tokens=frozenset({3})), never)
    assert [stop.feed(token) for token in (1, 2, 3)] == [False, False, True]


@given(data=st.data())
def test_any_text_stops_where_the_whole_text_says(tokeniser: Any, data: st.DataObject) -> None:
    letters = st.text(alphabet="ab é日🌱", min_size=1, max_size=30)
    text = data.draw(letters)
    stops = data.draw(
        st.lists(st.text(alphabet="ab é日🌱", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)
    )
    tokens = by_bytes(tokeniser, text)
    expected: tuple[int, int | str | None] = (len(tokens), None)
    for count in range(1, len(tokens) + 1):
        written = tokeniser.decode(tokens[:count])
        if found := [stop for stop in stops if stop in written]:
            expected = (count, min(found, key=written.find))
            break
    assert fed(tokeniser, tokens, *stops) == expected
