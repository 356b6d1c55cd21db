"""What two shapes are called, on the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.lineage.audit.examine import compare_shapes
from etude.lineage.audit.read_weights import Shape, declared_by_config, declared_by_gguf

LLAMA_8B = Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 500000.0, "gqa", dense_layers=32)
LLAMA_3B = replace(LLAMA_8B, hidden=3072, layers=28, heads=24, ffn=8192, tied=True, dense_layers=28)
QWEN_1B = Shape("qwen2", 2048, 24, 16, 16, 128, 5504, 151936, False, 1e6, "mha", dense_layers=24)
QWEN_MOE = replace(
    QWEN_1B, model_type="qwen2_moe", ffn=0, dense_layers=0, expert_ffn=1408, experts=60, shared_experts=4
)
KIMI = Shape("kimi_k2", 7168, 61, 64, 64, 192, 18432, 163840, False, 50000.0, "mla", 2048, 384, 1, 1, 1536, 512)
DEEPSEEK = replace(KIMI, model_type="deepseek_v3", heads=128, kv_heads=128, vocab=129280, experts=256, dense_layers=3)


@pytest.mark.parametrize(
    ("a", "b", "kind", "words"),
    [
        (LLAMA_8B, LLAMA_8B, "exact", "the same shape"),
        (LLAMA_8B, replace(LLAMA_8B, model_type="mistral", rope_theta=8e6), "exact", "rope_theta 500000.0 and 8000000.0"),
        (LLAMA_8B, replace(LLAMA_8B, vocab=128264), "extended vocabulary", "vocab 128256 and 128264"),
        (LLAMA_8B, LLAMA_3B, "pruned", "the second could be the other with less of its layers and width"),
        (replace(LLAMA_8B, layers=16, dense_layers=16), LLAMA_8B, "pruned", "the first could be the other with less of its layers ("),
        (LLAMA_8B, replace(LLAMA_8B, ffn=9000, vocab=200000), "pruned", "the second could be the other with less of its width ("),
        (replace(KIMI, experts=320), KIMI, "pruned", "the first could be"),
        (QWEN_1B, QWEN_MOE, "upcycled", "experts in place of the FFN of the first"),
        (QWEN_MOE, QWEN_1B, "upcycled", "experts in place of the FFN of the second"),
        (KIMI, DEEPSEEK, "different", "heads 64 and 128"),
        (LLAMA_8B, QWEN_1B, "different", "different shapes"),
        (LLAMA_8B, QWEN_MOE, "different", "different shapes"),
    ],
)  # fmt: skip
def test_kinds(a: Shape, b: Shape, kind: str, words: str) -> None:
    evidence = compare_shapes(a, b)
    assert evidence.kind == kind
    assert words in evidence.sentence
    assert set(evidence.differences) == {name for name in vars(a) if vars(a)[name] != vars(b)[name]}
    assert compare_shapes(b, a).kind == kind


def test_old_and_nested_configs(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4, "head_dim": 256,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}}  # fmt: skip
    said = declared_by_config(gemma, tmp_path)
    assert (said.model_type, said.layers, said.heads, said.head_dim, said.rope_theta) == (
        "gemma3_text",
        26,
        4,
        256,
        1e6,
    )
    old = declared_by_config({"model_type": "gpt2", "n_layer": 12, "n_head": 6}, tmp_path)
    assert (old.layers, old.heads, old.head_dim, old.rope_theta, old.tied) == (12, 6, None, None, False)
    neox = declared_by_config(
        {"model_type": "x", "num_hidden_layers": 2, "num_attention_heads": 3, "rotary_emb_base": 7}, tmp_path
    )
    assert neox.rope_theta == 7


def test_gguf_metadata(tmp_path: Path) -> None:
    meta = {
        "general.architecture": "deepseek2", "deepseek2.block_count": 62, "deepseek2.nextn_predict_layers": 1,
        "deepseek2.attention.head_count": 128, "deepseek2.attention.key_length_mla": 192, "deepseek2.attention.key_length": 576,
        "deepseek2.attention.q_lora_rank": 1536, "deepseek2.attention.kv_lora_rank": 512, "deepseek2.rope.freq_base": 1e4,
    }  # fmt: skip
    said = declared_by_gguf(meta, tmp_path)
    assert (said.layers, said.heads, said.head_dim, said.q_rank, said.kv_rank) == (61, 128, 192, 1536, 512)
    assert declared_by_gguf(meta | {"deepseek2.attention.head_count": [8, 16]}, tmp_path).heads == 16
    with pytest.raises(UserError, match="block_count"):
        declared_by_gguf({"general.architecture": "clip", "clip.attention.head_count": 3}, tmp_path)
