from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.document import Document
from etude.data.filters.content import alphanumeric, compresses, quality, repeated_share
from etude.data.settings import FilterSettings

WORDS = ["alpha", "beta", "gamma", "delta", "order", "price", "queue", "graph", "node", "edge"]


def code(lines: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(f"{rng.choice(WORDS)}_{rng.randrange(10**6)} = {rng.choice(WORDS)}[{n}]\n" for n in range(lines))


def why(text: str, **settings: Any) -> str | None:
    return quality(Document("repository", "a.py", text), FilterSettings(**settings))


def test_ordinary_code_stays() -> None:
    assert why(code(400)) is None


def test_length() -> None:
    assert (why("x = 1234\n" * 3, max_compression=99.0), why("x" * 31), why("x y " * 8)) == (
        "too short",
        "too short",
        None,
    )
    assert (why(code(10), max_bytes=100), why(code(10), max_bytes=len(code(10)))) == ("too long", None)


def test_lines() -> None:
    wide = "".join(f"{code(20, seed).replace(chr(10), ' ')}\n" for seed in range(3))
    assert why(wide) == "long lines on average"
    assert why(wide, max_mean_line=5000.0) is None
    one_line = code(500) + code(20, 1).replace("\n", " ") + "\n"
    assert why(one_line, max_line=300) == "a very long line"
    assert why(one_line, max_line=3000) is None


def test_few_letters() -> None:
    table = "".join(f"|{'-' * 30}|{number}|\n" for number in range(15))
    assert why(table, max_compression=99.0) == "few letters and digits"
    assert why(table, max_compression=99.0, min_alphanumeric=0.01) is None
    assert why(table + code(60)) is None, "letters in the second half count"


def test_repeated_lines() -> None:
    rows = "".join(f"{number % 5} = {WORDS[number % 5]}\n" for number in range(40))
    assert why(rows, max_compression=99.0) == "repeated lines"
    assert why(rows, max_compression=99.0, max_repeated_lines=0.9) is None
    assert why("".join(rows.splitlines(keepends=True)[:15]), max_compression=99.0) is None, "too few to say"


def test_blank_lines_are_no_repetition() -> None:
    assert why(code(30).replace("\n", "\n\n   \n")) is None


def test_repetitive_within_lines() -> None:
    text = "".join(f"{number} {'na ' * 40}\n" for number in range(100))
    assert why(text) == "repetitive"
    assert why(text, max_compression=1000.0) is None


@given(st.text())
def test_letters_and_digits_of_any_script_are_counted(text: str) -> None:
    assert alphanumeric(text) == sum(character.isalnum() for character in text)


@given(st.lists(st.sampled_from(["a", "b", "  b", "c", "", "  "]), max_size=30))
def test_repeated_share_by_brute_force(lines: list[str]) -> None:
    written = [line for line in lines if line.strip()]
    again = sum(line in written[:index] for index, line in enumerate(written))
    assert repeated_share(lines) == pytest.approx(again / len(written) if written else 0)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*WORDS, "\n", " = "]), min_size=200, max_size=1500), st.sampled_from([2.0, 4.0, 8.0]))
def test_compression_by_compressing_all(words: list[str], ratio: float) -> None:
    text = "".join(words)
    true = len(text) / len(zlib.compress(text.encode(), 1))
    if not 0.97 < true / ratio < 1.03:  # the short cut may differ at the very limit
        assert compresses(text, ratio) == (true > ratio)


@pytest.mark.parametrize("repeated_first", [True, False])
def test_a_text_of_two_kinds_is_judged_as_a_whole(repeated_first: bool) -> None:
    halves = ["na " * 20_000, code(40)]
    text = "".join(halves if repeated_first else reversed(halves))
    assert compresses(text, 12.0) == (len(text) / len(zlib.compress(text.encode(), 1)) > 12)
