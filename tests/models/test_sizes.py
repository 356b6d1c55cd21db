"""The arithmetic of known families, held against transformers' own models on torch's `meta` device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from etude.errors import UserError
from etude.models.mtp_heads import MtpHeads
from etude.models.shape import FAMILIES, TextConfig, on_meta, read_config, shape_of, text_config
from etude.training import memory
from tests.lineage.refusals import one_line

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BESIDE = {"rope_theta": 10_000.0, "pad_token_id": 0}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "n_shared_experts": 2,
    "first_k_dense_replace": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "mixtral": {"num_experts_per_tok": 3, "num_local_experts": 8},
    "gpt_oss": {"num_experts_per_tok": 3, "num_local_experts": 8, "sliding_window": 32},
    "gemma2": {"sliding_window": 32}, "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2},
    "deepseek_v3": {**EXPERTS, **LATENT},
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"head_dim": 16}, {"attention_bias": True, "mlp_bias": True},
    {"attention_bias": False}, {"num_key_value_heads": 6}, {"q_lora_rank": None},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"],
     "use_sliding_window": True, "sliding_window": 16},
]  # fmt: skip


def folder_of(tmp_path: Path, said: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(said))
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_arithmetic_gives_what_the_model_has(tmp_path: Path, family: str) -> None:
    fast = 0
    without = {"deepseek_v3": "head_dim", "mistral": "layer_types"}.get(family)  # transformers fails on these itself
    variants = [each for each in VARIANTS if without not in each]
    for variant in variants:
        folder = folder_of(tmp_path, {"model_type": family, **SIZES, **BESIDE, **OWN.get(family, {}), **variant})
        found, config = read_config(folder), AutoConfig.from_pretrained(folder)
        fast += isinstance(found, TextConfig)
        assert shape_of(found) == shape_of(config), variant
        assert memory.count_config(found) == memory.count(on_meta(config)), variant
        for depth, shared in ((1, True), (3, False)):
            model = on_meta(config).requires_grad_(requires_grad=False)
            model.mtp = MtpHeads.for_model(model, depth=depth, shared=shared)
            assert memory.count_config(found, depth, shared=shared, frozen=True) == memory.count(model), variant
            joint = memory.count(model.requires_grad_(requires_grad=True))
            assert memory.count_config(found, depth, shared=shared) == joint, variant
    assert fast >= len(variants) - 2


def test_what_only_transformers_can_tell_goes_the_slow_way() -> None:
    llama = {"model_type": "llama", **SIZES}
    assert text_config(llama)
    for unlike in ({"model_type": "gpt2"}, {"hidden_act": "odd"}, {"hidden_size": 50}, {"vocab_size": "320"}, {"num_hidden_layers": 0},
                   {"rope_scaling": {"rope_type": "odd", "factor": 2.0}}, {"layer_types": ["full_attention"] * 5}):  # fmt: skip
        assert text_config({**llama, **unlike}) is None, unlike
    for lacking in SIZES:
        assert text_config({name: value for name, value in llama.items() if name != lacking}) is None
    assert text_config({"model_type": "qwen3", **SIZES, "use_sliding_window": True, "max_window_layers": 2}) is None
    assert text_config([]) is None


def test_an_unknown_kind_of_rope_is_one_plain_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rope in ({"rope_scaling": {"rope_type": "odd", "factor": 2.0}}, {"rope_parameters": {"rope_type": "odd"}}):
        folder = folder_of(tmp_path, {"model_type": "llama", **SIZES, **rope})
        with pytest.raises(UserError, match=one_line("rope_type 'odd' is none that transformers knows")):
            read_config(folder)
    assert capfd.readouterr() == ("", "")
