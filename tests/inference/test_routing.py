"""Experts that a completion names are those the model's own router chose for the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.inference.lean import Experts, _feed, _routes
from etude.inference.local import build
from etude.inference.policy import Sampling
from etude.models.mtp_heads import MtpHeads
from etude.training.experts import take_up
from etude.training.settings import ExpertSettings
from tests.inference.engines import (
    Ask,
    complete,
    engine_of,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
    run,
)

WATCHED = Sampling(20, temperature=0.7, seed=3, experts=True)


def router_logits(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Return what each router says of each token in one plain pass, [T, experts] a layer, computed from what it was given."""
    found: list[torch.Tensor] = []

    def note(gate: Any, given: tuple[torch.Tensor, ...], _: Any) -> None:
        found.append(given[0].flatten(0, -2).double() @ gate.weight.double().T)

    gates = [part for name, part in model.named_modules() if name.endswith(".gate")]
    handles = [gate.register_forward_hook(note) for gate in gates]
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def chosen(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the experts of every token, [T, layers, k], in rising order."""
    logits = router_logits(model, tokens)
    if model.config.model_type == "deepseek_v3":
        bias = [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        scores = [_in_the_best_group(each.sigmoid() + by, model.config) for each, by in zip(logits, bias, strict=True)]
    else:
        scores = logits
    return torch.stack([each.topk(model.config.num_experts_per_tok).indices.sort().values for each in scores], 1)


def _in_the_best_group(scores: torch.Tensor, config: Any) -> torch.Tensor:
    groups = scores.unflatten(1, (config.n_group, -1))
    best = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, value=True)
    return scores.masked_fill(~allowed.repeat_interleave(groups.shape[2], 1), -torch.inf)


def moe(family: str) -> Any:
    model = model_of(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)  # or the bias would make no difference
    return model


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_the_routers_own_choice(family: str, page: int | None) -> None:
    model, prompts = moe(family), prompts_of(3, 40, 25)
    engine = engine_of(model, page=page, chunk=16)
    for turn in range(2):  # the second finds everything in the cache but its experts
        asks = [Ask(prompts[0], WATCHED), Ask(prompts[1], WATCHED), Ask(prompts[2], Sampling(9, seed=1))]
        *watched, plain = (each.completion for each in run(engine, asks))
        assert plain.experts is None, turn
        for prompt, done in zip(prompts, watched, strict=False):
            tokens = prompt + done.token_ids[:-1]  # the last one was never read
            assert done.experts.dtype == torch.int16
            assert torch.equal(done.experts.sort().values.long(), chosen(model, tokens))


def test_a_request_that_was_set_back_names_each_position_once() -> None:
    model, prompts = moe("mixtral"), prompts_of(20, 21, 22)
    engine = engine_of(model, page=8, pages=8)
    for prompt, done in zip(prompts, complete(engine, prompts, WATCHED), strict=True):
        assert torch.equal(done.experts.sort().values.long(), chosen(model, prompt + done.token_ids[:-1]))
    assert engine.counts.preempted > 0


def test_rounds_of_draft_tokens_name_what_was_read_of_the_text_and_nothing_else() -> None:
    model, prompts = moe("mixtral"), prompts_of(5, 17)
    engine = engine_of(model, MtpHeads.for_model(model, depth=2), speculate=True, late=1)
    for prompt, done in zip(prompts, complete(engine, prompts, WATCHED), strict=True):
        assert torch.equal(done.experts.sort().values.long(), chosen(model, prompt + done.token_ids[:-1]))
    assert engine.counts.rounds > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_in_bf16_the_engine_routes_as_the_trainer_does(family: str) -> None:
    """Products rounded to bf16 tie often, and the two would choose otherwise: both compute them in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=64, num_local_experts=64, num_experts_per_tok=4, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    own, hidden = _feed(model.model.layers[0].mlp), torch.randn(4096, 32).bfloat16()
    assert isinstance(own, Experts)
    chosen, weights = _routes(hidden, own)
    plain = own.router(hidden)[2]
    assert take_up(model, ExpertSettings(), 1)
    _, expected, ids = own.router(hidden)
    assert torch.equal(chosen, ids)
    assert torch.equal(weights, expected)
    assert not torch.equal(plain.sort().values, ids.sort().values), "as transformers computes it, some differ"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixture_in_bf16_is_compared_with_the_experts_that_it_took_itself(seed: int) -> None:
    """By routers in bf16 near ties fall otherwise: GPT-OSS with random weights was refused, or run on the slow path."""
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=256, hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=32, num_experts_per_tok=4, sliding_window=16, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if not name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, std=0.1)
    engine = build(model.bfloat16(), None, str, context=64, rows=2, compiled=False, page=16)
    assert engine.runner.lean is not None, engine.runner.slow_because
    assert engine.runner.lean.forced is None
