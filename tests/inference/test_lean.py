"""The lean decoder against transformers' own code, on the same weights and the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.inference.kv_cache import plan
from etude.inference.lean import fits
from etude.inference.local import build
from etude.inference.model_runner import Runner
from etude.models.mtp_heads import MtpHeads

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 128, "hidden_act": "silu",
}  # fmt: skip
DEEPSEEK = {
    "head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
USUAL: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 7}, "llama-tied": {"tie_word_embeddings": True},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 11,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v3": DEEPSEEK, "deepseek_v3-plain": DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False},
}  # fmt: skip
# What they do besides: multiplied logits and residuals; norms after attention only.
ODD: dict[str, dict[str, Any]] = {"granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5}, "olmo2": {}}


def tiny(name: str, more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("-")[0], **COMMON | more)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        buffers = (each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
        for weight in (
            *model.parameters(),
            *buffers,
        ):  # biases and norms as they come would hide a mistake: all are 0 or 1
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


@pytest.mark.parametrize("name", USUAL)
def test_says_what_transformers_says(name: str) -> None:
    model = tiny(name, USUAL[name])
    tokens = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None], use_cache=False).logits[0]
    assert fits(model)
    runner = build(model, None, str, context=64, rows=2, page=16).runner
    assert runner.lean is not None
    read, last = (plan([([1, 2, 3], first, count)], 16, runner.device) for first, count in ((0, 39), (39, 1)))
    found = torch.cat([runner.run(tokens[:39], read)[0], runner.run(tokens[39:], last)[0]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_others_run_on_their_own_code(name: str) -> None:
    engine = build(tiny(name, ODD[name]), None, str, context=64, rows=2)
    assert engine.runner.lean is None


@pytest.mark.parametrize(
    ("family", "shared"),
    [("llama", True), ("llama", False), ("gemma3_text", True), ("qwen3_moe", True), ("gpt_oss", False)],
)
def test_heads_say_what_they_say_by_themselves(family: str, *, shared: bool) -> None:
    model = tiny(family, USUAL[family])
    heads = MtpHeads.for_model(model, depth=2, shared=shared)
    runner = Runner(model, heads, compiled=False)
    runner.allot(3, 16)
    tokens, hidden = torch.arange(20) % 97, torch.randn(20, 32)
    where = plan([([1, 2], 0, 20)], 16, runner.device)
    lean = runner.lean
    found = [runner.draft(depth, hidden, tokens, where) for depth in range(2)]
    runner.lean = None
    expected = [runner.draft(depth, hidden, tokens, where) for depth in range(2)]
    assert lean is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], found[1]) or shared


def test_new_weights_of_the_model_are_its_own() -> None:
    model, other = tiny("qwen2", {}), tiny("qwen2", {})
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.9)
    tokens = torch.arange(12)
    with torch.no_grad():
        expected = other(tokens[None], use_cache=False).logits[0]
    runner = build(model, None, str, context=64, rows=2).runner
    runner.replace(dict(other.named_parameters()))
    assert runner.lean is not None
    torch.testing.assert_close(
        runner.run(tokens, plan([([1], 0, 12)], runner.cache.size, runner.device))[0], expected, rtol=1e-4, atol=1e-4
    )
