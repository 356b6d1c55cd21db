"""Each request gets what it would have got alone, from transformers itself, whatever else is going on."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig, Phi3Config

import etude.models
from etude.errors import UserError
from etude.inference.decoding import bucket
from etude.inference.local import build
from etude.inference.policy import Completion, Sampling
from etude.models.load import load_model, load_tokeniser
from etude.training.batch import Rows
from etude.training.objectives.next_token import NextToken
from tests import tiny
from tests.inference.engines import (
    FAMILIES,
    Ask,
    assert_all_returned,
    assert_greedy,
    complete,
    engine_of,
    greedy,
    logits_after,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
    run,
)

GREEDY = Sampling(24, temperature=0)
SPROUT = Path(etude.models.__file__).parent / "sprout"


def trainer_nats(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return −log p of every token but the first, as a trainer computes it."""
    ids = torch.tensor([tokens])
    rows = Rows(
        ids[:, :-1], ids[:, 1:], torch.ones_like(ids[:, 1:]), torch.arange(len(tokens) - 1)[None],
        torch.tensor([0, len(tokens) - 1], dtype=torch.int32),
    )  # fmt: skip
    return NextToken(model).nats(model, rows)[0]


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_transformers_own_and_log_probs_the_trainers(family: str, page: int | None) -> None:
    model, prompts = model_of(family), prompts_of(1, 7, 30, 55)
    for prompt, done in zip(prompts, complete(engine_of(model, page=page, chunk=40), prompts, GREEDY), strict=True):
        assert_greedy(model, prompt, done)
        assert (len(done.tokens), done.finish_reason) == (24, "length")
        assert done.logprobs == [0.0] * 24  # it could only be this one
        nats = trainer_nats(model, prompt + done.token_ids)[len(prompt) - 1 :]
        assert torch.tensor(done.raw_logprobs).add(nats).abs().max() < 1e-4


@pytest.mark.parametrize("page", [None, 16])
def test_sprout_writes_what_it_writes_in_transformers(page: int | None) -> None:
    model, tokeniser = load_model(SPROUT, torch.device("cpu")), load_tokeniser(SPROUT)
    prompts = [
        tokeniser(text)["input_ids"]
        for text in ("import os\n\ndef main(", "class Shape:\n    def __init__(self, a, b):\n", "x")
    ]
    expected = [greedy(model, prompt, 24) for prompt in prompts]
    assert [each.token_ids for each in complete(engine_of(model, page=page), prompts, GREEDY)] == expected


def kept_by_hand(logits: list[float], top_k: int, top_p: float) -> dict[int, float]:
    """Return the tokens that top-k, then top-p leave, with their share of the weight, the slow and plain way."""
    weights = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    total, kept, before = sum(weights[token] for token in order), {}, 0.0
    for token in order:
        if before / total >= top_p:
            break
        kept[token] = weights[token]
        before += weights[token]
    return {token: weight / before for token, weight in kept.items()}


@pytest.mark.parametrize(
    "settings_",
    [{}, {"temperature": 0.4}, {"temperature": 2.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.9, "top_k": 9}],
)
def test_log_probs_are_those_of_the_distribution_drawn_from(settings_: dict[str, Any]) -> None:
    model, prompts = model_of(), prompts_of(3, 20)
    sampling = Sampling(30, seed=3, **settings_)
    others = [Ask(prompts[0], Sampling(30, temperature=0)), Ask(prompts[1], Sampling(30, top_k=3, seed=1))]
    done = run(engine_of(model, page=16), [*others, Ask(prompts[1], sampling)])[-1].completion
    logits = logits_after(model, prompts[1] + done.token_ids)[len(prompts[1]) - 1 : -1]
    assert len(set(done.token_ids)) > 5
    for token, scores in zip(done.tokens, logits, strict=True):
        kept = kept_by_hand((scores / sampling.temperature).tolist(), sampling.top_k, sampling.top_p)
        assert token.logprob == pytest.approx(torch.tensor(kept[token.id]).log().item(), abs=1e-4)
        assert token.raw_logprob == pytest.approx(float(scores.log_softmax(0)[token.id]), abs=1e-4)


def test_alternatives_are_the_likeliest_tokens() -> None:
    model, (prompt, other) = model_of(vocab_size=16), prompts_of(9, 4, vocabulary=16)
    asks = [Ask(prompt, Sampling(6, seed=1, alternatives=20)), Ask(other, Sampling(9, seed=2))]
    done, plain = (each.completion for each in run(engine_of(model), asks))
    assert [token.alternatives for token in plain.tokens] == [()] * 9
    for token, scores in zip(done.tokens, logits_after(model, prompt + done.token_ids)[8:-1], strict=True):
        expected = scores.log_softmax(0).sort(descending=True)
        assert [each for each, _ in token.alternatives] == expected.indices.tolist()  # all sixteen there are
        assert [each for _, each in token.alternatives] == pytest.approx(expected.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 7])
def test_a_scored_prompt_has_the_models_own_log_probs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.engine.SCORED", 5)
    model, (prompt, other, one) = model_of(vocab_size=32), prompts_of(40, 23, 1, vocabulary=32)
    engine = engine_of(model, chunk=chunk, page=8)
    wish = Sampling(3, temperature=0, score=True, alternatives=2)
    for _ in range(2):  # the second time its keys and values are in the cache
        asks = [Ask(prompt, wish), Ask(other, Sampling(3, temperature=0)), Ask(prompt[:9], wish), Ask(one, wish)]
        scored, plain, short, single = (each.completion for each in run(engine, asks))
        assert plain.prompt == []
        for text, done in ((prompt, scored), (prompt[:9], short), (one, single)):
            assert [token.id for token in done.prompt] == text
            assert math.isnan(done.prompt[0].raw_logprob)
            chances = logits_after(model, text).log_softmax(-1)[:-1]
            for token, row in zip(done.prompt[1:], chances, strict=True):
                assert token.raw_logprob == pytest.approx(float(row[token.id]), abs=1e-4)
                assert [each for each, _ in token.alternatives] == row.topk(2).indices.tolist()
                assert (token.raw_logprob == token.alternatives[0][1]) == (token.id == token.alternatives[0][0])
            assert_greedy(model, text, done)


def test_a_prompt_scored_under_pressure_is_scored_once() -> None:
    model, prompts = model_of(vocab_size=32), prompts_of(30, 30, 30, vocabulary=32)
    engine = engine_of(model, chunk=8, page=8, pages=10)
    done = complete(engine, prompts, Sampling(20, temperature=0, score=True))
    assert engine.counts.preempted > 0
    for prompt, each in zip(prompts, done, strict=True):
        assert [token.id for token in each.prompt] == prompt
        expected = logits_after(model, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert [token.raw_logprob for token in each.prompt[1:]] == pytest.approx(expected.tolist(), abs=1e-4)


class Only:
    """Lets a request write some tokens only, other ones at even and odd places."""

    def __init__(self, even: list[int], odd: list[int]) -> None:
        self.sets, self.place = (even, odd), 0

    def allowed(self) -> bytes:
        return sum(1 << token for token in self.sets[self.place % 2]).to_bytes(4, "little")

    def take(self, token: int) -> None:
        assert token in self.sets[self.place % 2]
        self.place += 1


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_constraint_limits_its_own_request_alone(temperature: float, late: int) -> None:
    model, (prompt, other) = model_of(vocab_size=32), prompts_of(9, 12, vocabulary=32)
    sets = [3, 5, 17, 31], [0, 9]
    wish = Sampling(12, temperature=temperature, seed=3, stop_tokens=frozenset([9]), constraint=lambda: Only(*sets))
    plain = Sampling(12, temperature=temperature, seed=3)
    engine = engine_of(model, page=8, pages=8, late=late)
    limited, free, again = (
        each.completion for each in run(engine, [Ask(prompt, wish), Ask(other, plain), Ask(prompt, wish)])
    )
    assert limited.token_ids == again.token_ids
    assert free.token_ids == complete(engine_of(model), [other], plain)[0].token_ids
    scores = logits_after(model, prompt + limited.token_ids)[len(prompt) - 1 : -1]
    for place, (token, row) in enumerate(zip(limited.tokens, scores, strict=True)):
        allowed = sets[place % 2]
        assert token.id in allowed
        assert token.raw_logprob == pytest.approx(float(row.log_softmax(0)[token.id]), abs=1e-4)
        if temperature:
            within = (row[allowed] / temperature).log_softmax(0)[allowed.index(token.id)]
            assert token.logprob == pytest.approx(float(within), abs=1e-4)
        else:
            assert token.id == allowed[int(row[allowed].argmax())]
    assert_all_returned(engine)


# ---- any batch, any order, any pressure

SHARED = prompts_of(40, seed=5)[0]
PROMPTS = [*prompts_of(1, 5, 17, 33, 64), *(SHARED + each for each in prompts_of(1, 9, 30, seed=6)), SHARED]
WAYS = (Sampling(20, temperature=0), Sampling(20, seed=7), Sampling(20, temperature=0.8, top_p=0.9, seed=11))


@lru_cache
def the_model() -> Any:
    return model_of(num_hidden_layers=1)


@lru_cache
def alone(prompt: int, way: int) -> Completion:
    """Return what one request gets by itself in an engine of its own."""
    return complete(engine_of(the_model(), rows=1), [PROMPTS[prompt]], WAYS[way])[0]


@st.composite
def asks(draw: st.DrawFn) -> list[tuple[int, int, Ask]]:
    made = []
    for _ in range(draw(st.integers(1, 10))):
        prompt, way = draw(st.integers(0, len(PROMPTS) - 1)), draw(st.integers(0, len(WAYS) - 1))
        comes = draw(st.integers(0, 30))
        sampling = Sampling(**vars(WAYS[way]) | {"max_tokens": draw(st.integers(1, 20))})
        cancelled = draw(st.none() | st.integers(comes, comes + 25))
        made.append((prompt, way, Ask(PROMPTS[prompt], sampling, comes, cancelled)))
    return made


@settings(max_examples=60)
@given(asks(), st.sampled_from([8, 16]), st.integers(0, 8), st.integers(1, 4), st.integers(7, 90), st.integers(0, 1))
def test_whatever_comes_and_goes_each_gets_what_it_gets_alone(
    given_: list[tuple[int, int, Ask]], page: int, spare: int, rows: int, chunk: int, late: int
) -> None:
    needed = max(len(ask.prompt) + ask.sampling.max_tokens for *_, ask in given_)
    pages = max(-(-needed // page), 3) + spare
    engine = engine_of(the_model(), rows=rows, page=page, pages=pages, chunk=chunk, late=late)
    for (prompt, way, ask), got in zip(given_, run(engine, [ask for *_, ask in given_]), strict=True):
        expected = alone(prompt, way).token_ids[: ask.sampling.max_tokens]
        if ask.cancelled is None:
            assert got.completion.token_ids == expected
            assert got.streamed == got.completion.tokens
        else:
            assert [token.id for token in got.streamed] == expected[: len(got.streamed)]
            assert len(got.ends) <= 1
    assert_all_returned(engine)


def test_under_pressure_the_oldest_goes_on_and_all_finish() -> None:
    model, prompts = the_model(), prompts_of(20, 21, 22, 23, 24)
    engine = engine_of(model, page=8, pages=10)  # each needs up to eight
    order: list[int] = []
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, Sampling(40, temperature=0), None, partial(lambda it, _: order.append(it), number))
    while engine.busy():
        engine.step()
    assert order == [0, 1, 2, 3, 4]
    assert engine.counts.preempted > 0
    assert engine.counts.prompt_tokens == sum(map(len, prompts))  # once each, however often they were read


@pytest.mark.parametrize("page", [None, 16])
def test_a_session_is_not_read_again(page: int | None) -> None:
    model, engine = the_model(), engine_of(the_model(), page=page)
    text, cached = prompts_of(50)[0], []
    for turn in prompts_of(20, 20, 20, seed=8):
        done = complete(engine, [text], GREEDY)[0]
        assert_greedy(model, text, done)
        cached.append(done.cached)
        text = text + done.token_ids + turn
    # All but the last token written, which was never read; five positions of a page are not worth a copy.
    assert cached == [0, 73, 117 if page is None else 112]
    assert engine.counts.cached_tokens == sum(cached)


def test_a_prefix_that_is_being_read_is_read_once_where_pages_are_shared() -> None:
    engine = engine_of(the_model(), page=16)
    prefix = prompts_of(100)[0]
    done = complete(engine, [[*prefix, number] for number in range(4)], GREEDY)
    assert [each.cached for each in done] == [0, 96, 96, 96]
    for number, each in enumerate(done):
        assert_greedy(the_model(), [*prefix, number], each)


def test_where_nothing_would_be_shared_nobody_waits() -> None:
    engine = engine_of(the_model(), page=None)  # a page is a context: it is shared once its request has ended
    got: list[list[Any]] = [[], [], []]
    for each in got:
        engine.submit(prompts_of(100)[0], GREEDY, each.extend, each.append)
    engine.step()
    assert all(got)


def test_the_cached_part_of_a_request_that_was_set_back_is_what_it_found_first() -> None:
    engine = engine_of(the_model(), page=8, pages=9, chunk=8)
    asks = [Ask(prompts_of(20)[0], Sampling(40, temperature=0)), Ask(prompts_of(40, seed=2)[0], GREEDY)]
    done = [each.completion for each in run(engine, asks)]
    assert engine.counts.preempted > 0
    assert [each.cached for each in done] == [0, 0]


# ---- ends


def test_a_stop_token_ends_a_request_and_is_part_of_it() -> None:
    prompt = prompts_of(10)[0]
    free = greedy(the_model(), prompt, 24)
    place = next(index for index in range(5, 24) if free[index] not in free[:index])
    for late in (0, 1):
        engine = engine_of(the_model(), late=late)
        stops = frozenset({free[place]})
        stopped, other = (
            each.completion
            for each in run(engine, [Ask(prompt, Sampling(24, temperature=0, stop_tokens=stops)), Ask(prompt, GREEDY)])
        )
        assert stopped.token_ids == free[: place + 1]
        assert (stopped.finish_reason, stopped.stopped_by) == ("stop", free[place])
        assert other.token_ids == free
        assert_all_returned(engine)


def test_a_stop_text_ends_a_request_where_it_is_complete() -> None:
    tokeniser, prompt = tiny.tokeniser(), prompts_of(10)[0]
    free = greedy(the_model(), prompt, 24)
    texts = [tokeniser.decode(free[: end + 1]) for end in range(24)]
    stop = texts[12][len(texts[9]) :]
    first = next(end for end, text in enumerate(texts) if stop in text)
    done = complete(
        engine_of(the_model(), decode=tokeniser.decode), [prompt], Sampling(24, temperature=0, stop=("\0no", stop))
    )[0]
    assert done.token_ids == free[: first + 1]
    assert (done.finish_reason, done.stopped_by) == ("stop", stop)


def test_the_whole_context_can_be_used() -> None:
    prompt = prompts_of(40)[0]
    done = complete(engine_of(the_model(), context=64, page=16), [prompt], GREEDY)[0]
    assert done.token_ids == greedy(the_model(), prompt, 24)


# ---- what is refused, and what goes wrong


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], GREEDY, "empty"),
        ([1, tiny.VOCABULARY], GREEDY, f"token id {tiny.VOCABULARY} is outside"),
        ([1, -1], GREEDY, "token id -1 is outside"),
        ([1, 2.5], GREEDY, "whole numbers"),
        ([1, "a"], GREEDY, "whole numbers"),
        ([1] * 41, GREEDY, "41 tokens of prompt and max_tokens = 24 are more than the context of 64"),
        ([1] * 30, GREEDY, "the cache holds 48 positions, this request needs 54"),
        ([1], Sampling(2, experts=True), "no routers"),
    ],
)
def test_what_cannot_be_done_is_refused_and_others_are_unharmed(
    prompt: list[Any], sampling: Sampling, says: str
) -> None:
    engine = engine_of(the_model(), context=64, page=16, pages=3)
    box: list[Any] = []
    engine.submit([5, 6], GREEDY, None, box.append)
    engine.step()
    with pytest.raises(UserError, match=says):
        engine.submit(prompt, sampling, None, box.append)
    while engine.busy():
        engine.step()
    assert [done.token_ids for done in box] == [greedy(the_model(), [5, 6], 24)]


def test_settings_beyond_any_number_of_the_device_are_taken_for_what_they_mean() -> None:
    done = complete(engine_of(the_model()), [[5, 6]], Sampling(8, top_k=10**30, temperature=1e300, seed=-(10**30)))[0]
    assert done.logprobs == pytest.approx([-torch.tensor(tiny.VOCABULARY).log().item()] * 8, abs=1e-4)  # all as likely


@pytest.mark.parametrize(("page", "pages"), [(None, 3), (16, 9)])
def test_a_request_whose_output_is_no_number_fails_and_others_do_not(page: int | None, pages: int) -> None:
    model = model_of()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    short, long = [[5, 6], *prompts_of(50)]
    expected = [complete(engine_of(model), [prompt], GREEDY)[0].token_ids for prompt in (short, long)]
    model.get_input_embeddings().weight.data[9] = torch.nan
    engine = engine_of(model, page=page, pages=pages)
    got = run(engine, [Ask(short, GREEDY), Ask([9] * 40, GREEDY)])
    assert got[0].completion.token_ids == expected[0]
    assert "not a number" in str(got[1].ends[0])
    # PrefixCache it wrote to are used again, beside longer ones.
    again = complete(engine, [short, [7, *short], long], GREEDY)
    assert [again[0].token_ids, again[2].token_ids] == [expected[0], expected[1]]


@pytest.mark.parametrize("late", [0, 1])
def test_an_engine_that_failed_has_told_everybody(late: int) -> None:
    engine = engine_of(the_model(), rows=2, late=late)
    ends: list[list[Any]] = [[] for _ in range(4)]
    for each in ends:
        engine.submit([5, 6], Sampling(2 + len(ends), temperature=0), None, each.append)
    ends.append([])
    engine.submit([5, 6], Sampling(2, temperature=0), None, ends[-1].append)
    engine.waiting.rotate(1)  # it comes first: its last token is on its way when the next step fails
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    engine.runner.model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="lost") as lost:
        engine.step()
    engine.fail(lost.value)
    assert [len(each) for each in ends] == [1] * 5
    assert all(each[0] is lost.value for each in ends[:4])


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2),
        Gemma2Config(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    ],
    ids=["state space", "capped scores"],
)  # fmt: skip
def test_a_model_whose_memory_is_of_another_kind_is_refused_in_one_line(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with pytest.raises(UserError) as refused:
        build(model, None, str)
    assert type(model).__name__ in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_turns_otherwise_beyond_some_length_is_run_up_to_there() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=160, original_max_position_embeddings=40, rope_parameters=rope, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    assert build(model, None, str).context == 40
    with pytest.raises(UserError, match="1 to 40 tokens"):
        build(model, None, str, context=41)


def test_a_cache_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(UserError, match="needs at least"):
        build(model_of(), None, str, memory=10)


def test_a_cache_holds_no_more_contexts_than_it_is_asked_to() -> None:
    held = build(model_of(), None, str, context=40, rows=1, page=16, memory=10**8, contexts=2)
    assert (
        held.prefix_cache.count * held.prefix_cache.size == 2 * 48
    )  # 40 and a place for the next token, in pages of 16


def test_batches_come_in_few_sizes_and_each_holds_its_rows() -> None:
    sizes = [bucket(rows, 500) for rows in range(1, 501)]
    assert all(rows <= size <= 500 for rows, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 500]
