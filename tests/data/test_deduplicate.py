"""Duplicates against brute force: exact Jaccard similarity over all pairs."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data import deduplicate
from etude.data.deduplicate import EXACT, NEAR, band_keys, find_duplicates, signatures, text_hash
from etude.data.filters.contamination import without_notice
from etude.data.settings import DuplicateSettings

DEFAULT = DuplicateSettings()


def found_in(texts: list[str], how: DuplicateSettings = DEFAULT) -> deduplicate.Duplicates:
    matrix = signatures(texts, how)
    hashes = np.array([text_hash(text) for text in texts], np.uint64).reshape(-1, 2)
    return find_duplicates(hashes, band_keys(matrix, how).T, matrix, how.similarity)


def jaccard(left: str, right: str, n: int = 5) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}

    one, other = shingles(left), shingles(right)
    return len(one & other) / len(one | other)


def prose(rng: random.Random, words: int) -> list[str]:
    return [f"w{rng.randrange(5000)}" for _ in range(words)]


def altered(words: list[str], changes: int, rng: random.Random) -> list[str]:
    changed = list(words)
    for place in rng.sample(range(len(words)), changes):
        changed[place] = f"x{rng.randrange(10**6)}"
    return changed


def test_signatures_estimate_the_jaccard_similarity() -> None:
    rng = random.Random(0)
    errors = []
    for _ in range(60):
        words = prose(rng, 400)
        pair = [" ".join(words), " ".join(altered(words, rng.randrange(60), rng))]
        matrix = signatures(pair, DEFAULT)
        errors.append(float((matrix[0] == matrix[1]).mean()) - jaccard(pair[0], pair[1]))
    # The standard error of one estimate from 112 hashes is at most 0.047; of the mean of 60, 0.006.
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.06


def test_near_duplicates_are_found_and_distinct_texts_stay() -> None:
    rng = random.Random(1)
    texts, close = [], []
    for _ in range(40):
        words = prose(rng, 300)
        texts += [" ".join(words), " ".join(altered(words, 4, rng)), " ".join(altered(words, 120, rng))]
        close += [False, True, False]
    assert min(jaccard(texts[index - 1], texts[index]) for index in range(1, len(texts), 3)) > 0.85
    assert max(jaccard(texts[index - 2], texts[index]) for index in range(2, len(texts), 3)) < 0.3
    found = found_in(texts)
    assert (found.kind == NEAR).tolist() == close
    assert [int(found.original[index]) for index in np.flatnonzero(found.kind)] == list(range(0, len(texts), 3))


def test_what_is_dropped_is_close_to_what_stays_and_what_stays_is_not_close_to_another() -> None:
    rng = random.Random(2)
    chain = [prose(rng, 200)]
    for _ in range(30):  # each close to the one before, the last far from the first
        chain.append(altered(chain[-1], 6, rng))
    texts = [" ".join(words) for words in chain]
    found = found_in(texts)
    matrix = signatures(texts, DEFAULT)
    stay = np.flatnonzero(found.kind == 0)
    assert 1 < len(stay) < len(texts)
    for gone in np.flatnonzero(found.kind):
        original = int(found.original[gone])
        assert original < gone
        assert found.kind[original] == 0
        assert (matrix[gone] == matrix[original]).mean() >= DEFAULT.similarity
    keys = band_keys(matrix, DEFAULT)
    for one, other in itertools.combinations(stay.tolist(), 2):
        if (keys[one] == keys[other]).any():
            assert (matrix[one] == matrix[other]).mean() < DEFAULT.similarity


def test_exact_duplicates_are_found_without_bands() -> None:
    texts = ["a", "b", "a", "c", "b", "a"]
    hashes = np.array([text_hash(text) for text in texts], np.uint64)
    found = find_duplicates(hashes, np.zeros((0, 6), np.uint64), np.zeros((6, 0), np.uint32), 0.7)
    assert found.kind.tolist() == [0, 0, EXACT, 0, EXACT, EXACT]
    assert found.original.tolist() == [0, 1, 0, 3, 1, 0]


def test_texts_whose_first_half_hash_collides_are_not_taken_for_equal() -> None:
    hashes = np.array([[1, 1], [1, 2], [1, 1]], np.uint64)
    found = find_duplicates(hashes, np.zeros((0, 3), np.uint64), np.zeros((3, 0), np.uint32), 0.7)
    assert found.kind.tolist() == [0, 0, EXACT]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 12), max_size=40), st.integers(1, 9))
def test_slices_change_nothing(values: list[int], size: int) -> None:
    keys = np.array(values, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    whole = pairs_of(keys)
    before = deduplicate.SLICE
    deduplicate.SLICE = size
    try:
        assert pairs_of(keys) == whole
    finally:
        deduplicate.SLICE = before
    groups = {(values.index(value), index) for index, value in enumerate(values) if values.index(value) != index}
    assert groups <= whole


def pairs_of(keys: Any) -> set[tuple[int, int]]:
    found = deduplicate._equal_pairs(keys, np.arange(len(keys)))
    return {pair for first, later in found for pair in zip(first.tolist(), later.tolist(), strict=True)}


NOTICE = "# Licensed under the licence:\n# " + " ".join(f"clause{number}" for number in range(60)) + "\n"


def test_a_common_notice_does_not_make_short_files_alike() -> None:
    texts = [
        f"{NOTICE}\ndef {name}(value):\n    return {name}_table[value] + {name}_offset\n"
        for name in ("load", "store", "erase")
    ]
    assert jaccard(texts[0], texts[1]) > 0.7
    assert found_in(texts).kind.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("# Copyright 2020 Me\n# All rights\nx = 1\n", "x = 1\n"),
        ("/* Copyright\n * Me */\nint x;\n", "int x;\n"),
        ("# just a comment\nx = 1\n", "# just a comment\nx = 1\n"),
        ("x = 1  # copyright\n", "x = 1  # copyright\n"),
    ],
)
def test_only_a_notice_at_the_top_is_left_out(text: str, left: str) -> None:
    assert without_notice(text) == left


def test_nothing_at_all_is_fine() -> None:
    assert found_in([]).kind.tolist() == []


def test_files_that_are_all_comments_are_not_alike() -> None:
    texts = [f"# Copyright Somebody\n# {' '.join(prose(random.Random(seed), 50))}\n" for seed in range(3)]
    assert found_in(texts).kind.tolist() == [0, 0, 0]


def test_a_document_does_not_go_for_the_sake_of_one_that_is_gone() -> None:
    """Whatever happens in later rounds, what is dropped is close to something that stays."""
    rng = random.Random(5)
    texts = []
    for _ in range(6):
        chain = [prose(rng, 120)]
        for _ in range(12):
            chain.append(altered(chain[-1], rng.randrange(2, 8), rng))
        rng.shuffle(chain)
        texts += [" ".join(words) for words in chain]
    found, matrix = found_in(texts), signatures(texts, DEFAULT)
    for gone in np.flatnonzero(found.kind):
        assert found.kind[found.original[gone]] == 0
        assert (matrix[gone] == matrix[found.original[gone]]).mean() >= DEFAULT.similarity
