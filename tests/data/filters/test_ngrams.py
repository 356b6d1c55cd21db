"""Runs of words as numbers, against words cut by regular expressions."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from etude.data.filters.contamination import ngram_runs

WORDS = re.compile(rb"[\w\x80-\xff]+")
CODE = re.compile(rb"[\w\x80-\xff]+|[^\w\s\x80-\xff\x00]+")
texts = st.text(alphabet=st.sampled_from("abAB_09 \n\t.(),=é漢"), max_size=60)


def reference(text: str, n: int, *, signs: bool) -> list[tuple[bytes, ...]]:
    words = (CODE if signs else WORDS).findall(text.encode().lower())
    n = min(n, len(words))
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)] if n else []


@given(text=texts, n=st.integers(1, 6), signs=st.booleans())
def test_equal_runs_have_equal_numbers_and_others_do_not(text: str, n: int, signs: bool) -> None:
    expected = reference(text, n, signs=signs)
    found = ngram_runs(text.encode(), n, signs=signs)
    assert len(found.hashes) == len(expected) == len(found.starts) == len(found.ends)
    numbers: dict[tuple[bytes, ...], int] = dict(zip(expected, found.hashes.tolist(), strict=True))
    assert [numbers[run] for run in expected] == found.hashes.tolist()
    assert len(set(numbers.values())) == len(numbers)


@given(text=texts, n=st.integers(1, 6))
def test_spans_are_where_the_runs_stand(text: str, n: int) -> None:
    content = text.encode()
    found = ngram_runs(content, n, signs=True)
    spans = [CODE.findall(content[start:end].lower()) for start, end in zip(found.starts, found.ends, strict=True)]
    assert [tuple(words) for words in spans] == reference(text, n, signs=True)


@given(before=texts, text=texts)
def test_a_run_has_the_same_number_wherever_it_stands(before: str, text: str) -> None:
    alone = ngram_runs(text.encode(), 2, signs=True)
    if len(alone.hashes) > 1:
        together = ngram_runs(f"{before} \n {text}".encode(), 2, signs=True)
        assert together.hashes[-len(alone.hashes) :].tolist() == alone.hashes.tolist()


def test_numbers_are_the_same_on_every_machine() -> None:
    assert ngram_runs(b"def add(left, right):", 5, signs=True).hashes.tolist() == [
        109539545018883306,
        14709257187198211308,
        4669689398273240327,
    ]
