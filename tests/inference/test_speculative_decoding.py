"""SpeculationSpeed ahead changes how fast a request is written, never what is written."""

from __future__ import annotations

import copy
import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.inference.local import build
from etude.inference.policy import Sampling
from etude.models.mtp_heads import MtpHeads
from tests.inference.engines import (
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

DEPTH = 3
GREEDY = Sampling(24, temperature=0)


def random_heads(model: Any, *, depth: int = DEPTH, shared: bool = True, seed: int = 2) -> Any:
    torch.manual_seed(seed)
    heads = MtpHeads.for_model(model, depth=depth, shared=shared)
    for parameter in heads.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return heads


def forgetful_model(**changes: Any) -> Any:
    """Return a model that looks at the last token only: its layers add nothing."""
    model = model_of(tie_word_embeddings=False, **changes)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model


def perfect_heads(model: Any, noise: float = 0.0) -> Any:
    """Return heads that know what a forgetful model says: they hand on the token they are given. With noise they are nearly right."""
    heads = random_heads(model)
    width = heads.layers[0].eh_proj.weight.shape[0]
    heads.layers[0].eh_proj.weight.data = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    heads.layers[0].eh_proj.weight.data += noise * torch.randn(width, 2 * width)
    heads.layers[0].mtp_block.self_attn.o_proj.weight.data.zero_()
    heads.layers[0].mtp_block.mlp.down_proj.weight.data.zero_()
    return heads


@lru_cache
def forgetful() -> tuple[Any, Any, Any]:
    model = forgetful_model()
    return model, perfect_heads(model), perfect_heads(model, noise=0.08)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "mistral"])
def test_greedy_tokens_and_log_probs_are_the_models_own(family: str, page: int | None) -> None:
    changes: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    model, prompts = model_of(family, **changes), prompts_of(1, 2, 7, 40)
    engine = engine_of(model, random_heads(model, shared=page is None), page=page, speculate=True, chunk=16)
    for prompt, done in zip(prompts, complete(engine, prompts, GREEDY), strict=True):
        assert len(done.tokens) == 24
        assert_greedy(model, prompt, done)
        logits = logits_after(model, prompt + done.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0].tolist()
        assert done.raw_logprobs == pytest.approx(expected, abs=1e-4)
    assert engine.counts.rounds == engine.counts.steps > 0
    assert_all_returned(engine)


@pytest.mark.parametrize("page", [None, 16])
def test_heads_that_know_are_believed(page: int | None) -> None:
    model, heads, _ = forgetful()
    prompts = prompts_of(1, 2, 5, 6, 40)
    engine = engine_of(model, heads, page=page, speculate=True)
    done = complete(engine, prompts, Sampling(21, temperature=0))
    assert [each.token_ids for each in done] == [greedy(model, prompt, 21) for prompt in prompts]
    assert engine.counts.rounds == 5  # one token when the prompt is read, then four a round
    assert engine.counts.accepted == engine.counts.drafts == 5 * 5 * DEPTH
    drawn = complete(engine, prompts, Sampling(21, temperature=0.8, seed=1))
    assert (
        engine.counts.accepted == engine.counts.drafts == 2 * 5 * 5 * DEPTH
    )  # where both say the same, nothing is refused
    assert len({tuple(each.token_ids) for each in drawn}) == 5


@pytest.mark.parametrize("late", [0, 1])
def test_drafts_accepted_beyond_the_end_are_not_counted(late: int) -> None:
    """One token when the prompt is read, four in the first round, and of the second one or two."""
    model, heads, _ = forgetful()
    for most, ends in ((6, None), (7, None), (20, 6)):
        engine = engine_of(model, heads, speculate=True, late=late)
        text = greedy(model, [5, 6, 7], most)
        stop = frozenset([text[ends]] if ends and text[ends] not in text[:ends] else [])
        done = complete(engine, [[5, 6, 7]], Sampling(most, temperature=0, stop_tokens=stop))[0]
        rounds = engine.counts.drafts // DEPTH
        assert len(done.tokens) == 1 + rounds + engine.counts.accepted


def test_heads_of_another_copy_of_the_model_are_refused() -> None:
    model, heads, _ = forgetful()
    with pytest.raises(UserError, match="the MTP heads do not run on our cache"):
        build(copy.deepcopy(model), copy.deepcopy(heads), str, context=64, rows=1)


def test_heads_that_nearly_know_are_believed_in_part() -> None:
    model, _, heads = forgetful()
    prompts = prompts_of(1, 2, 5, 6, 40)
    engine = engine_of(model, heads, speculate=True)
    for prompt, done in zip(prompts, complete(engine, prompts, GREEDY), strict=True):
        assert done.token_ids == greedy(model, prompt, 24)
    assert 0.1 < engine.counts.accepted / engine.counts.drafts < 0.95


@torch.inference_mode()  # type: ignore[untyped-decorator]
def kept_by_hand(model: Any, heads: Any, prompt: list[int], count: int) -> int:
    """Return how many drafts come true if every round computes the heads for the whole text again, without any cache."""
    tokens, kept = [*prompt, int(logits_after(model, prompt)[-1].argmax())], 0
    while len(tokens) < len(prompt) + count:
        read = len(tokens) - 1
        hidden = model.get_decoder()(torch.tensor([tokens[:read]])).last_hidden_state
        drafts: list[int] = []
        for depth in range(heads.depth):
            hidden = heads.step(
                depth, hidden, torch.tensor([[*tokens, *drafts][depth + 1 :]]), torch.arange(read)[None],
                embed=model.get_input_embeddings(), rotary=model.get_decoder().rotary_emb,
                attention_mask=torch.full((1, 1, read, read), -torch.inf).triu(1),
            )  # fmt: skip
            drafts.append(int(model.get_output_embeddings()(hidden[0, -1]).argmax()))
        best = logits_after(model, tokens + drafts).argmax(-1)[read:].tolist()
        true = next((index for index, token in enumerate(drafts) if token != best[index]), heads.depth)
        handed_out = min(true + 1, len(prompt) + count - len(tokens))
        tokens, kept = tokens + best[: true + 1], kept + handed_out - 1
    return kept


@pytest.mark.parametrize(("family", "page"), [("llama", 16), ("qwen3", None), ("qwen3_moe", 16), ("deepseek_v3", None)])
def test_heads_guess_what_they_would_with_the_whole_text_before_them(family: str, page: int | None) -> None:
    model = model_of(family, vocab_size=3)
    heads, prompts = random_heads(model, depth=2, shared=page is None), prompts_of(1, 4, 9, 37, vocabulary=3)
    expected = [kept_by_hand(model, heads, prompt, 24) for prompt in prompts]
    assert sum(expected) > 0
    for prompt, kept in zip(prompts, expected, strict=True):
        engine = engine_of(model, heads, page=page, speculate=True, chunk=16)
        complete(engine, [prompt], Sampling(24, temperature=0))
        assert engine.counts.accepted == kept


# ---- the same distribution


def chi_square(model: Any, prompt: list[int], sampling: Sampling, seen: list[tuple[int, ...]]) -> tuple[float, int]:
    """Return the statistic of texts of three tokens against the model's own probabilities, and its degrees of freedom."""
    texts = list(itertools.product(range(model.config.vocab_size), repeat=3))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, len(prompt) - 1 : -1]
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -torch.inf)
    each = logits.softmax(-1).gather(2, torch.tensor(texts)[..., None])[..., 0].prod(-1)
    shares = dict(zip(texts, each.tolist(), strict=True))
    assert sum(shares.values()) == pytest.approx(1)
    counts = dict.fromkeys(shares, 0)
    for text in seen:
        counts[text] += 1
    assert all(counts[text] == 0 for text, share in shares.items() if share == 0)
    often = [text for text, share in shares.items() if share * len(seen) >= 5]
    pairs = [(counts[text], shares[text] * len(seen)) for text in often]
    rest = (len(seen) - sum(count for count, _ in pairs), len(seen) - sum(share for _, share in pairs))
    if rest[1] >= 5:
        pairs.append(rest)
    return sum((count - expected) ** 2 / expected for count, expected in pairs), len(pairs) - 1


@pytest.mark.parametrize(
    ("noise", "sampling"),
    [
        (None, {}),
        (0.5, {}),
        (0.0, {"temperature": 2.0}),
        (None, {"temperature": 2.0, "top_k": 3}),
        (0.5, {"temperature": 1.5, "top_k": 2}),
    ],
)
def test_drawn_texts_are_distributed_as_the_models_own(noise: float | None, sampling: dict[str, Any]) -> None:
    small: dict[str, Any] = {"vocab_size": 4, "num_hidden_layers": 1}
    model = model_of(**small) if noise is None else forgetful_model(**small)
    model.get_output_embeddings().weight.data *= 0.6  # so that few texts are too rare to count
    heads = random_heads(model) if noise is None else perfect_heads(model, noise)
    engine = engine_of(model, heads, rows=500, context=16, speculate=True)
    draws = [Sampling(3, seed=seed, **sampling) for seed in range(2500)]
    done = [each.completion for each in run(engine, [Ask([1, 2], each) for each in draws])]
    statistic, freedom = chi_square(model, [1, 2], draws[0], [tuple(each.token_ids) for each in done])
    assert freedom >= 4
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8  # beyond the 99.99th percentile; the seeds are fixed
    assert engine.counts.accepted > 0


def test_log_probs_of_drawn_tokens_are_the_models_own() -> None:
    model, _, heads = forgetful()
    prompt, sampling = prompts_of(9)[0], Sampling(40, temperature=0.7, top_k=8, seed=5)
    engine = engine_of(model, heads, speculate=True)
    done = complete(engine, [prompt], sampling)[0]
    scores = logits_after(model, prompt + done.token_ids)[8:-1]
    cut = (scores / 0.7).masked_fill(scores < scores.topk(8).values[:, -1:], -torch.inf)
    ids = torch.tensor(done.token_ids)[:, None]
    assert done.logprobs == pytest.approx(cut.log_softmax(-1).gather(1, ids)[:, 0].tolist(), abs=1e-4)
    assert done.raw_logprobs == pytest.approx(scores.log_softmax(-1).gather(1, ids)[:, 0].tolist(), abs=1e-4)
    assert 0 < engine.counts.accepted < engine.counts.drafts


# ---- ends inside a round, pressure, company


@pytest.mark.parametrize("most", range(1, 10))
def test_a_round_may_end_a_request_anywhere(most: int) -> None:
    model, heads, _ = forgetful()
    prompt = prompts_of(6)[0]
    free = greedy(model, prompt, 12)
    engine = engine_of(model, heads, speculate=True)
    (short,) = run(engine, [Ask(prompt, Sampling(most, temperature=0))])
    assert short.completion.token_ids == free[:most]
    assert short.streamed == short.completion.tokens
    stop = frozenset({free[most]})
    (stopped,) = run(engine, [Ask(prompt, Sampling(12, temperature=0, stop_tokens=stop))])
    assert stopped.completion.token_ids == free[: free.index(free[most]) + 1]
    assert stopped.completion.stopped_by == free[most]
    # What a round wrote beyond the end is not taken for part of the text.
    again = complete(engine, [prompt + free[:8] + [5]], GREEDY)[0]
    assert_greedy(model, prompt + free[:8] + [5], again)
    assert_all_returned(engine)


@pytest.mark.parametrize("page", [None, 16])
def test_the_whole_context_can_be_used(page: int | None) -> None:
    model, heads, _ = forgetful()
    for length in range(40, 48):
        prompt = prompts_of(length)[0]
        engine = engine_of(model, heads, context=64, page=page, speculate=True)
        done = complete(engine, [prompt], Sampling(64 - length, temperature=0))[0]
        assert done.token_ids == greedy(model, prompt, 64 - length)


def test_whoever_asks_for_single_steps_gets_them() -> None:
    model, heads, _ = forgetful()
    prompts = prompts_of(5, 6)
    engine = engine_of(model, heads, speculate=True)
    asks = [Ask(prompts[0], Sampling(8, temperature=0, alternatives=2)), Ask(prompts[1], GREEDY)]
    first, second = (each.completion for each in run(engine, asks))
    assert [token.alternatives[0][0] for token in first.tokens] == first.token_ids == greedy(model, prompts[0], 8)
    assert second.token_ids == greedy(model, prompts[1], 24)
    assert 0 < engine.counts.rounds < engine.counts.steps


PROMPTS = prompts_of(1, 4, 18, 33)


@lru_cache
def expected(prompt: int) -> list[int]:
    return greedy(forgetful()[0], PROMPTS[prompt], 20)


arrivals = st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 12), st.none() | st.integers(0, 20))


@settings(max_examples=25)
@given(
    st.lists(arrivals, min_size=1, max_size=6), st.integers(0, 6), st.integers(1, 3), st.sampled_from([True, None]),
    st.integers(0, 1),
)  # fmt: skip
def test_under_pressure_it_is_the_same(
    coming: list[tuple[int, int, int, int | None]], spare: int, rows: int, draft: bool | None, late: int
) -> None:
    model, _, heads = forgetful()
    engine = engine_of(model, heads, rows=rows, page=8, pages=8 + spare, speculate=draft, chunk=13, late=late)
    asks = [Ask(PROMPTS[each], Sampling(most, temperature=0), at, gone) for each, most, at, gone in coming]
    for (prompt, most, _, gone), got in zip(coming, run(engine, asks), strict=True):
        assert [token.id for token in got.streamed] == expected(prompt)[:most][: len(got.streamed)]
        if gone is None:
            assert got.completion.token_ids == expected(prompt)[:most]
    assert_all_returned(engine)


# ---- where it does not pay


@pytest.mark.parametrize(("cost", "pays"), [(3.0, True), (30.0, False)])
def test_it_falls_back_where_it_does_not_pay_and_says_so(cost: float, pays: bool) -> None:
    model, heads, _ = forgetful()
    said: list[str] = []
    engine = engine_of(model, heads, context=512, say=said.append)
    # A round costs so many single steps; heads that know write four tokens in one.
    engine.speculation.clock = lambda: engine.counts.steps + (cost - 1) * engine.counts.rounds
    prompt = prompts_of(5)[0]
    done = complete(engine, [prompt], Sampling(150, temperature=0))[0]
    assert done.token_ids == greedy(model, prompt, 150)
    single = engine.counts.steps - engine.counts.rounds
    assert engine.counts.rounds > single if pays else engine.counts.rounds < single
    assert bool(said) != pays
    assert all("speculative decoding is off" in line for line in said)


@pytest.mark.parametrize("page", [16, None])
def test_rounds_that_are_read_late_change_nothing(page: int | None) -> None:
    model = model_of()
    engine = engine_of(model, MtpHeads.for_model(model, depth=3), page=page, context=48, rows=3, speculate=True, late=1)
    asks = [
        Ask(prompt, Sampling(min(new, 48 - len(prompt)), temperature=0), comes=index)
        for index, (prompt, new) in enumerate(zip(prompts_of(1, 7, 15, 16, 30, 40, 47, 12), (47, 1, 2, 3, 18, 8, 1, 36), strict=True))
    ]  # fmt: skip
    for ask, got in zip(asks, run(engine, asks), strict=True):
        assert len(got.completion.token_ids) == ask.sampling.max_tokens
        assert_greedy(model, ask.prompt, got.completion)
        assert [token.id for token in got.streamed] == got.completion.token_ids
    assert engine.counts.rounds > 0
    assert_all_returned(engine)
