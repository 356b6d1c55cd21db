from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import etude
from etude.errors import UserError
from etude.models.load import load_model, load_tokeniser
from etude.training import long_context
from etude.training.long_context import Retrieval, answer_nats, by_position, make_retrieval, score_retrieval

PLANTED = re.compile(r"^([A-Z]+_[A-Z]+_[A-Z]{2}\d) = (\d{5})$", re.MULTILINE)
QUESTION = re.compile(r"\n\n# constants used above\nassert (\w+) == (\d{5})\Z")
CODE = [path.read_text(encoding="utf-8") for path in sorted(Path(etude.__file__).parent.rglob("*.py"))[:40]]


def in_bytes(text: str) -> list[int]:
    return list(text.encode())


def in_words(text: str) -> list[int]:
    """A tokeniser that takes a space into the token after it and cuts digits in threes, as GPT-2's does."""
    return [
        int.from_bytes(piece.encode(), "big") for piece in re.findall(r" ?\d{1,3}| ?[^\W\d]+|.|\n", text, re.DOTALL)
    ]


def from_words(tokens: list[int]) -> str:
    return "".join(token.to_bytes((token.bit_length() + 7) // 8, "big").decode() for token in tokens)


@pytest.mark.parametrize(
    "bounds", [[0, 100], [0, 256], [0, 256, 257], [0, 256, 512, 1024, 2048], [0, 256, 512, 1024, 1500]]
)
def test_buckets_double(bounds: list[int]) -> None:
    assert long_context.bucket_bounds(bounds[-1]) == bounds


@given(st.integers(0, 2**32), st.integers(0, 12), st.booleans())
def test_loss_by_position_is_that_of_brute_force(seed: int, least: int, one_size: bool) -> None:
    rng, rows, length, bounds = np.random.default_rng(seed), 4, 24, [0, 3, 8, 24]
    documents, positions = np.full((rows, length), -1, np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        cuts = [0, *sorted(rng.choice(np.arange(1, length), size=rng.integers(1, 5), replace=False)), length]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            positions[row, begin:end] = np.arange(end - begin)
            documents[row, begin:end] = -1 if end == length and row % 2 else number
    nats, sizes = rng.exponential(size=(rows, length)), rng.integers(1, 6, size=(rows, length))
    expected: list[list[Any]] = [[], [], []]
    for row, t in np.ndindex(rows, length):
        document = documents[row, t]
        if t + 1 < length and documents[row, t + 1] == document >= 0 and (documents[row] == document).sum() >= least:
            bucket = max(index for index in range(3) if bounds[index] <= positions[row, t])
            expected[bucket].append((nats[row, t], 2.5 if one_size else sizes[row, t], (row, document)))
        else:
            nats[row, t] = math.nan  # must not be looked at
    found = by_position(nats, 2.5 if one_size else sizes, documents, positions, bounds, least)
    assert [(each["first"], each["last"]) for each in found] == [(0, 2), (3, 7), (8, 23)]
    for each, entries in zip(found, expected, strict=True):
        assert (each["tokens"], each["documents"]) == (len(entries), len({piece for *_, piece in entries}))
        assert ("nats" in each) == bool(entries)
        if entries:
            total, size = math.fsum(nats for nats, *_ in entries), sum(size for _, size, _ in entries)
            assert each["nats"] == pytest.approx(total / len(entries))
            assert each["bits_per_byte"] == pytest.approx(total / math.log(2) / size)


lines = st.lists(st.text(st.sampled_from("abc_ =(é世)\t12345"), max_size=40), min_size=30, max_size=60)


@settings(max_examples=60)
@given(
    st.lists(lines, min_size=1, max_size=3), st.integers(400, 900), st.integers(2, 6), st.integers(0, 99), st.booleans()
)
def test_what_is_asked_for_is_planted_once_among_others(
    texts: list[list[str]], length: int, keys: int, seed: int, words: bool
) -> None:
    encode, read = (in_words, from_words) if words else (in_bytes, lambda tokens: bytes(tokens).decode())
    code = ["\n".join(text) + "\n" + "pass\n" * 600 for text in texts]
    items = make_retrieval(encode, code, length, keys, 2, seed)
    assert items == make_retrieval(encode, code, length, keys, 2, seed)
    for item in items:
        assert length - length // 64 - 12 <= len(item.tokens) <= length  # a line of é and 世 may be left out as a whole
        text = read(item.tokens)
        question = QUESTION.search(text)
        assert question
        assert question.groups() == (item.name, item.value)
        assert text.count(item.name) == text.count(item.value) == 2
        planted = PLANTED.findall(text)
        assert (item.name, item.value) in planted
        assert len(planted) == len(dict(planted)) == len({value for _, value in planted}) == keys
        rest = re.sub(PLANTED.pattern + r"\n", "", text[: question.start()], flags=re.MULTILINE)
        assert rest in "".join(code) * 2
        assert read(item.tokens[item.answer_start :]).strip() == item.value
        assert read(item.tokens[: item.answer_start]).endswith("==" if words else "== ")


def test_real_code_fills_the_length_with_few_encodings_and_at_all_depths(tiny_base: Path) -> None:
    tokeniser, calls = load_tokeniser(tiny_base), []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return list(tokeniser(text)["input_ids"])

    items = make_retrieval(encode, CODE, 4096, 4, 40, seed=1)
    assert all(4096 - 64 <= len(item.tokens) <= 4096 for item in items)
    assert len(calls) < 8 * len(items)
    assert np.bincount([int(item.depth * 4) for item in items], minlength=4).min() >= 3
    for item in items:
        text = tokeniser.decode(item.tokens)
        assert text.index(item.name) / len(text) == pytest.approx(item.depth, abs=0.08)


@pytest.mark.parametrize(
    ("texts", "length", "said"),
    [
        (["x = 1\n"] * 9, 4096, "does not fill 4096 tokens"),
        ([], 4096, "does not fill"),
        (CODE, 80, "alone exceed 80 tokens"),
        (["".join(map(str, range(10_000, 100_000)))], 40_000, "so full of constants"),
    ],
)
def test_what_cannot_be_made_is_refused(texts: list[str], length: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_retrieval(in_bytes, texts, length, 4, 1, 0)


class Reader:
    """Answers with the constant asked for, with another one, or with nothing in particular."""

    device = torch.device("cpu")

    def __init__(self, answers: str) -> None:
        self.answers = answers

    def __call__(self, tokens: torch.Tensor, *, use_cache: bool, logits_to_keep: int) -> Any:
        assert not use_cache
        planted = dict(PLANTED.findall(text := bytes(tokens[0].tolist()).decode()))
        asked = QUESTION.search(text).group(1)  # type: ignore[union-attr]
        value = planted[asked] if self.answers == "right" else next(planted[name] for name in planted if name != asked)
        logits = torch.zeros(1, tokens.shape[1], 256)
        for place, digit in enumerate(value.encode(), start=tokens.shape[1] - 6):  # the space predicts the first digit
            logits[0, place, digit] = 50.0 if self.answers != "uniform" else 0.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_only_the_constant_asked_for_is_right() -> None:
    items = make_retrieval(in_bytes, CODE, 2000, 5, 6, seed=3)
    right, square = (
        score_retrieval(Reader("right"), items),
        1.959964**2,
    )  # Wilson's bounds at n of n: n / (n + z²) and 1
    assert right == {"exact": 1.0, "interval": pytest.approx((6 / (6 + square), 1)), "nats": pytest.approx(0)}
    other, uniform = score_retrieval(Reader("other"), items), score_retrieval(Reader("uniform"), items)
    assert other["exact"] == uniform["exact"] == 0
    assert other["nats"] > 10
    assert uniform["nats"] == pytest.approx(math.log(256))


def test_the_answer_is_scored_as_transformers_does(tiny_base: Path) -> None:
    model, tokeniser = load_model(tiny_base, torch.device("cpu")), load_tokeniser(tiny_base)
    items = make_retrieval(lambda text: list(tokeniser(text)["input_ids"]), CODE, 300, 2, 3, seed=0)
    losses, counts = [], []
    for item in items:
        tokens = torch.tensor([item.tokens])
        labels = tokens.clone()
        labels[:, : item.answer_start] = -100
        losses.append(model(tokens, labels=labels).loss.item())
        counts.append(len(item.tokens) - item.answer_start)
        assert np.mean(answer_nats(model, item)[0]) == pytest.approx(losses[-1], abs=1e-6)
    assert score_retrieval(model, items)["nats"] == pytest.approx(np.average(losses, weights=counts), abs=1e-6)


def test_what_the_model_writes_itself_is_exact(tiny_base: Path) -> None:
    model = load_model(tiny_base, torch.device("cpu"))
    prompt = torch.arange(1, 60)[None]
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    item = Retrieval(written[0].tolist(), prompt.shape[1], "", "", 0.0)
    assert answer_nats(model, item)[1]
    for place in range(1, 5):
        tokens = list(item.tokens)
        tokens[-place] = (tokens[-place] + 1) % 320
        assert not answer_nats(model, replace(item, tokens=tokens))[1]
