"""Models whose attention does what ours does not must be refused, even where a few tokens would not show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import UserError
from etude.inference.local import build

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 128,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "a window by its mask only": (
        "qwen2_moe",
        MOE | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    ),
    "capped scores": ("gemma2", {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 8}),
}


@pytest.mark.parametrize("what", ODD)
def test_attention_that_ours_is_not(what: str) -> None:
    kind, more = ODD[what]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | more))
    with pytest.raises(UserError) as refused:
        build(model, None, str, context=64, rows=2)
    assert "\n" not in str(refused.value)
    assert ("mask" in str(refused.value)) == (what == "a window by its mask only")
