"""Whole conversations, each once an epoch, served by the loader with what is to be learnt."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.chat import Encoded, pack_chat
from etude.data.loader import Batch, Corpus, Loader
from etude.errors import UserError
from tests.lineage.refusals import one_line

LENGTH, SEPARATOR, VOCABULARY = 16, 0, 1000
Talk = tuple[tuple[int, ...], tuple[bool, ...]]  # tokens, learnt


def encoded(sizes: list[int], seed: int = 0) -> list[Encoded]:
    """Return conversations of random tokens, the last half of each learnt."""
    rng = np.random.default_rng(seed)
    return [Encoded(rng.integers(1, VOCABULARY, size), np.arange(size) >= (size + 1) // 2) for size in sizes]


def packed(sizes: list[int], too_long: Any = "drop", seed: int = 0) -> Corpus:
    return chat(encoded(sizes, seed), too_long)[0]


def chat(
    talks: list[Encoded], too_long: Any = "drop", **splits: list[Encoded]
) -> tuple[Corpus, dict[str, dict[str, int]]]:
    made = {"train": talks, **splits}
    return pack_chat(made, length=LENGTH, separator=SEPARATOR, vocabulary=VOCABULARY, too_long=too_long)


def as_talks(talks: list[Encoded], length: int = LENGTH) -> Counter[Talk]:
    return Counter((tuple(tokens[:length].tolist()), tuple(learnt[:length].tolist())) for tokens, learnt in talks)


def talks_in(batches: list[Batch]) -> Counter[Talk]:
    """Return the conversations of all rows, read token by token, and check what is between them."""
    found: Counter[Talk] = Counter()
    for batch in batches:
        assert batch.learnt is not None
        for row in zip(batch.tokens, batch.documents, batch.positions, batch.learnt, strict=True):
            begins = [at for at in range(LENGTH) if row[2][at] == 0]
            for number, (begin, end) in enumerate(itertools.pairwise([*begins, LENGTH])):
                tokens, documents, positions, learnt = (part[begin:end].tolist() for part in row)
                assert positions == list(range(end - begin))
                if documents[0] == -1:
                    assert (end, set(documents), set(tokens), any(learnt)) == (LENGTH, {-1}, {SEPARATOR}, False)
                else:
                    assert set(documents) == {number}
                    found[tuple(tokens), tuple(learnt)] += 1
    return found


SIZES = st.lists(st.integers(2, LENGTH), min_size=1, max_size=30)


@settings(max_examples=60)
@given(sizes=SIZES, epochs=st.integers(1, 3), seed=st.integers(0, 3))
def test_each_conversation_is_whole_and_comes_once_an_epoch(sizes: list[int], epochs: int, seed: int) -> None:
    corpus = packed(sizes, seed=seed)
    rows = len(corpus.splits["train"]["chat"])
    loader = Loader(corpus, batch=1, seed=seed)
    for _ in range(epochs):
        assert talks_in([next(loader) for _ in range(rows)]) == as_talks(encoded(sizes, seed))
    assert loader.achieved() == {"sources": {"chat": 1.0}, "domains": {"chat": 1.0}, "epochs": {"chat": epochs}}


def test_epochs_come_in_different_orders() -> None:
    loader = Loader(packed([16, 15, 14, 13, 12, 11]), batch=6)
    orders = [next(loader).tokens.tobytes() for _ in range(3)]
    assert len(set(orders)) == 3


@settings(max_examples=40)
@given(sizes=SIZES, stop=st.integers(0, 12), world=st.sampled_from([1, 2, 3, 6]))
def test_resumed_and_shared_by_ranks_it_is_the_same(sizes: list[int], stop: int, world: int) -> None:
    whole = list(itertools.islice(Loader(packed(sizes), batch=6), stop + 3))
    first = Loader(packed(sizes), batch=6)
    list(itertools.islice(first, stop))
    state = json.loads(json.dumps(first.state()))
    ranks = [Loader(packed(sizes), batch=6, rank=rank, world=world) for rank in range(world)]
    for loader in ranks:
        loader.load_state(state)
    for expected in whole[stop:]:
        parts = [next(loader) for loader in ranks]
        for field in ("tokens", "documents", "positions", "learnt"):
            assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(expected, field))


def test_a_state_of_other_conversations_is_refused() -> None:
    state = Loader(packed([5, 6])).state()
    other_mask = [Encoded(each.tokens, ~each.learnt) for each in encoded([5, 6])]
    for corpus in (
        packed([5, 7]),
        packed([5, 6], seed=1),
        chat(other_mask)[0],
        chat(encoded([5, 6]), heldout=encoded([3]))[0],
    ):
        with pytest.raises(UserError, match=one_line("its corpus is", "begin anew")):
            Loader(corpus).load_state(state)
    Loader(chat(encoded([5, 6]), heldout=[])[0]).load_state(state)


def test_those_too_long_are_dropped_or_cut_and_counted() -> None:
    talks = [*encoded([4, 20, 40, LENGTH]), Encoded(np.arange(1, 4), np.array([True, False, False]))]
    dropped, counts = chat(talks)
    assert talks_in([dropped.read([row]) for row in rows_of(dropped)]) == as_talks([talks[0], talks[3]])
    unlearnt = "nothing to learn within the length, dropped"
    assert counts["train"] == {
        "conversations": 5,
        "too long, dropped": 2,
        unlearnt: 1,
        "cut": 0,
        "tokens": 20,
        "learnt tokens": 10,
    }
    cut, counts = chat(talks, "cut")
    assert talks_in([cut.read([row]) for row in rows_of(cut)]) == as_talks([talks[0], talks[1], talks[3]])
    assert counts["train"] == {"conversations": 5, unlearnt: 2, "cut": 1, "tokens": 36, "learnt tokens": 16}


def rows_of(corpus: Corpus, split: str = "train") -> list[Any]:
    series = corpus.splits[split]["chat"]
    return [series[index] for index in range(len(series))]


def test_held_out_conversations_come_once_and_are_not_trained_on() -> None:
    corpus, counts = chat(encoded([9, 8, 7]), heldout=encoded([5, 12, 16, 40], seed=1))
    held = list(corpus.heldout("chat", batch=2))
    assert talks_in(held) == as_talks(encoded([5, 12, 16, 40], seed=1)[:3])
    assert counts["heldout"]["too long, dropped"] == 1
    assert talks_in([next(Loader(corpus, batch=2))]) == as_talks(encoded([9, 8, 7]))


def test_most_too_long_is_refused_and_half_is_not() -> None:
    most = one_line(
        "2 of 3 conversations are longer than a row of 16 tokens", "the median has 20", "raise length", "cut"
    )
    with pytest.raises(UserError, match=most):
        packed([4, 20, 30])
    assert packed([4, 20, 30], "cut").splits["train"]
    assert packed([4, 5, 20, 30]).splits["train"]


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(
        UserError, match=one_line("a mask that hides every token", "'too long, dropped': 2", f"over {LENGTH}", "cut")
    ):
        packed([20, 30])
    with pytest.raises(
        UserError, match=one_line("a mask that hides every token", "nothing to learn within the length")
    ):
        packed([40], "cut")
