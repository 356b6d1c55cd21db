"""Tiny models of the families the audit reads, each with its own way of keeping matrices; saved by transformers itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, LAYERS, HEADS, KEYS, DIM, FFN, EXPERT_FFN, EXPERTS, VOCAB = 32, 3, 4, 2, 8, 64, 20, 5, 96
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "num_key_value_heads": KEYS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXPERTISE = {"moe_intermediate_size": EXPERT_FFN, "num_experts_per_tok": 2}
FURTHER: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {},
    "starcoder2": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_inner": FFN},
    "falcon": {"num_kv_heads": KEYS, "new_decoder_architecture": True, "ffn_hidden_size": FFN},
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {**EXPERTISE, "num_experts": EXPERTS, "head_dim": DIM, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTISE, "num_experts": EXPERTS, "shared_expert_intermediate_size": 2 * EXPERT_FFN},
    "deepseek_v4": {"n_routed_experts": EXPERTS, "head_dim": DIM, "q_lora_rank": 24, "qk_rope_head_dim": 4, "intermediate_size": EXPERT_FFN},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": DIM},
    "deepseek_v3": {
        **EXPERTISE, "n_routed_experts": EXPERTS, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 8,
    },
}  # fmt: skip


def build(family: str, seed: int = 0) -> Any:
    """Return a model of a family with random weights; those that transformers would start at zero as well."""
    torch.manual_seed(seed)
    common = {} if family == "gpt2" else COMMON
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**common | {"vocab_size": VOCAB} | FURTHER[family]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def write_gguf(file: Path, model: Any, kind: GGMLQuantizationType, tokens: list[str]) -> None:
    """Write a tiny Llama as llama.cpp's converter does: a head's two rotary halves interleaved, the output head its own."""
    config, writer = model.config, GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "lm_head": "output", "layers.": "blk.", "model.": ""}  # fmt: skip
    for full, parameter in model.state_dict().items():
        name = full.replace("model.norm", "output_norm")
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        values = parameter.float().numpy()
        if ".attn_q." in name or ".attn_k." in name:
            values = values.reshape(-1, 2, DIM // 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
