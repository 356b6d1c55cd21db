"""The engine on a GPU, with its graphs and compiled parts, against transformers on a CPU; float32, so that greedy texts are equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from etude.inference.local import build
from etude.inference.policy import Sampling
from etude.inference.sampler import Choice, sample_packed
from etude.models.mtp_heads import MtpHeads
from tests import tiny
from tests.inference.engines import Ask, assert_greedy, complete, model_of, prompts_of, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LENGTHS = (3, 17, 40, 64, 5, 33, 90)


def on_gpu(model: Any, heads: Any = None, *, compiled: bool = False) -> Any:
    model, heads = copy.deepcopy((model, heads))
    if heads:
        heads = heads.cuda()
    return build(model.cuda(), heads, str, context=256, rows=8, page=16, memory=64 << 20, compiled=compiled)


@pytest.mark.parametrize(
    ("family", "compiled"), [*((family, False) for family in tiny.FAMILIES), ("llama", True), ("qwen3", True)]
)
def test_writes_what_the_model_writes_on_a_cpu(family: str, *, compiled: bool) -> None:
    model = model_of(family)
    prompts = prompts_of(*LENGTHS)
    got = complete(on_gpu(model, compiled=compiled), prompts, Sampling(24, temperature=0))
    for prompt, completion in zip(prompts, got, strict=True):
        assert_greedy(model, prompt, completion)


def test_experts_in_graphs_choose_as_without() -> None:
    model = model_of("qwen3_moe").bfloat16()
    engine, other = on_gpu(model), on_gpu(model)
    assert engine.decoder._graphs is not None
    other.decoder._graphs = None
    prompts, sampling = prompts_of(*LENGTHS), Sampling(24, temperature=0)
    assert [each.token_ids for each in complete(engine, prompts, sampling)] == [
        each.token_ids for each in complete(other, prompts, sampling)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_guessing_changes_no_greedy_text(*, compiled: bool) -> None:
    model = model_of()
    engine = on_gpu(model, MtpHeads.for_model(model, depth=3), compiled=compiled)
    engine.speculation.wish = True
    prompts = prompts_of(*LENGTHS)
    got = complete(engine, prompts, Sampling(24, temperature=0))
    assert engine.counts.rounds > 0
    for prompt, completion in zip(prompts, got, strict=True):
        assert_greedy(model, prompt, completion)


def test_a_seed_holds_in_any_batch() -> None:
    engine = on_gpu(model_of(), compiled=True)
    prompts, sampling = prompts_of(*LENGTHS), Sampling(24, temperature=0.8, top_p=0.9, seed=3)
    together = complete(engine, prompts, sampling)
    alone = [complete(engine, [prompt], sampling)[0] for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_new_weights_are_in_the_graphs() -> None:
    model, other = model_of(), model_of(seed=1)
    engine, prompts = on_gpu(model, compiled=True), prompts_of(*LENGTHS)
    complete(engine, prompts, Sampling(8, temperature=0))
    engine.update({name: weight.cuda() for name, weight in other.state_dict().items()}, 1)
    got = run(engine, [Ask(prompt, Sampling(8, temperature=0)) for prompt in prompts])
    for prompt, each in zip(prompts, got, strict=True):
        assert_greedy(other, prompt, each.completion)


@pytest.mark.parametrize("cut", [False, True])
def test_draws_what_a_cpu_draws(*, cut: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator) * 3
    choice = Choice(
        torch.rand(64, generator=generator).round(decimals=1), torch.full((64,), 0.9), torch.full((64,), 40), torch.arange(64)
    )  # fmt: skip
    expected = sample_packed(logits, choice, torch.arange(64), cut=cut)
    there = Choice(*(each.cuda() for each in choice))
    for function in (sample_packed, torch.compile(sample_packed, dynamic=True)):
        got = function(logits.cuda(), there, torch.arange(64, device="cuda"), cut=cut).cpu()
        same = got[0] == expected[0]  # a sum in another order may put a draw on the other side of an edge
        assert same.float().mean() > 0.98
        torch.testing.assert_close(got[:, same], expected[:, same], rtol=1e-4, atol=1e-4)
