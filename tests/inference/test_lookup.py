"""Drafts that are looked up in what a request has read and written: found as by hand, and never a change to what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.policy import Sampling
from etude.inference.sampler import certain, lookup
from tests.inference.engines import (
    Ask,
    assert_all_returned,
    assert_greedy,
    complete,
    engine_of,
    greedy,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
    run,
)
from tests.inference.test_speculative_decoding import chi_square, forgetful, forgetful_model, random_heads

GREEDY = Sampling(24, temperature=0)


def by_hand(tokens: list[int], drafts: int) -> list[int] | None:
    """Return what followed the last three tokens where they stood last, or else the last two, going on with what that gives."""
    for length in (3, 2):
        places = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if places:
            known = list(tokens)
            for _ in range(drafts):
                known.append(known[places[-1] + len(known) - len(tokens)])
            return known[len(tokens) :]
    return None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 5))
def test_what_is_found_is_what_a_search_by_hand_finds(tokens: list[int], drafts: int, beyond: int) -> None:
    rest = [tokens[-1]] * beyond  # of an answer that was refused: not to be found
    drafted, found = lookup(torch.tensor([tokens + rest]), torch.tensor([len(tokens) - 1]), drafts)
    expected = by_hand(tokens, drafts)
    assert found.tolist() == [expected is not None]
    if expected is not None:
        assert drafted[0].tolist() == expected


def test_a_draft_that_is_certain_has_all_the_weight() -> None:
    chances = certain(torch.tensor([[2, 0]]), 3).softmax(-1)
    assert chances.tolist() == [[[0, 0, 1], [1, 0, 0]]]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("family", "page"), [("llama", 16), ("qwen3_moe", None), ("deepseek_v3", 16)])
@pytest.mark.parametrize("beside_heads", [False, True])
def test_greedy_tokens_are_the_models_own(family: str, page: int | None, beside_heads: bool, late: int) -> None:
    model, prompts = model_of(family, vocab_size=5), prompts_of(1, 2, 7, 40, vocabulary=5)
    heads = random_heads(model) if beside_heads else None
    engine = engine_of(model, heads, page=page, speculate=True, chunk=16, lookup=4, late=late)
    for prompt, done in zip(prompts, complete(engine, prompts, GREEDY), strict=True):
        assert len(done.tokens) == 24
        assert_greedy(model, prompt, done)
    assert engine.counts.accepted > 0
    assert_all_returned(engine)


def test_what_repeats_is_written_at_once() -> None:
    """A model that looks at the last token only goes round in a circle; once it has, every draft is right."""
    model = forgetful()[0]
    prompt = prompts_of(5)[0]
    prompt += greedy(model, prompt, 60)
    engine = engine_of(model, speculate=True, lookup=4)
    done = complete(engine, [prompt], Sampling(21, temperature=0))[0]
    assert done.token_ids == greedy(model, prompt, 21)
    assert engine.counts.rounds == 4  # one token when the prompt is read, then five a round
    assert engine.counts.accepted == engine.counts.drafts == 16


def test_beside_heads_that_know_nothing_what_repeats_is_looked_up() -> None:
    model = forgetful()[0]
    prompt = prompts_of(5)[0]
    prompt += greedy(model, prompt, 60)
    counts = []
    for drafts in (0, 1):
        engine = engine_of(model, random_heads(model), speculate=True, lookup=drafts)
        assert complete(engine, [prompt], Sampling(21, temperature=0))[0].token_ids == greedy(model, prompt, 21)
        counts.append(engine.counts.accepted)
    assert counts[1] == 15  # five rounds of three, as many as the heads would have proposed
    assert counts[0] < counts[1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "top_k": 3}])
def test_drawn_texts_are_distributed_as_the_models_own(sampling: dict[str, Any]) -> None:
    model = forgetful_model(vocab_size=4, num_hidden_layers=1)
    model.get_output_embeddings().weight.data *= 0.6
    engine = engine_of(model, rows=500, context=24, speculate=True, lookup=2)
    prompt = [1, 2, 3, 1, 2, 0, 1, 2]
    draws = [Sampling(3, seed=seed, **sampling) for seed in range(2500)]
    done = [each.completion for each in run(engine, [Ask(prompt, each) for each in draws])]
    statistic, freedom = chi_square(model, prompt, draws[0], [tuple(each.token_ids) for each in done])
    assert freedom >= 4
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8
    assert 0 < engine.counts.accepted < engine.counts.drafts


def test_requests_that_are_set_back_and_rows_that_are_used_again_find_nothing_of_others() -> None:
    model = forgetful()[0]
    engine = engine_of(model, rows=2, page=8, pages=12, speculate=True, lookup=3)
    prompts = prompts_of(4, 18, 33, 9, 20)
    asks = [Ask(prompt, Sampling(20, temperature=0), comes=at) for at, prompt in enumerate(prompts)]
    for prompt, got in zip(prompts, run(engine, asks), strict=True):
        assert got.completion.token_ids == greedy(model, prompt, 20)
    assert_all_returned(engine)
