"""Small real things to test with: models of every family with random weights, a tokeniser, a source tree."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

if TYPE_CHECKING:
    from pathlib import Path

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 320
CONTEXT = 1024
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def config_of(family: str) -> Any:
    """Return a tiny config of a family."""
    if family == "llama":
        return LlamaConfig(**_COMMON, num_key_value_heads=2, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=8)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=8)
    assert family == "deepseek_v3"
    return DeepseekV3Config(
        **_COMMON, **_EXPERTS, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


def save_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """Save a tiny model with random weights, a byte-level tokeniser and a licence."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    tokeniser().save_pretrained(folder)
    (folder / "LICENSE").write_text("Tiny Licence: do as you like.\n", encoding="utf-8")
    return folder


def tokeniser() -> Any:
    """Return a byte-level BPE trained on a few lines; every text round-trips."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["def add(left, right):\n    return left + right\n", "import os\n"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>")


def write_tree(folder: Path, files: int = 6) -> Path:
    """Write a small source tree."""
    for index in range(files):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line * index}\n" for line in range(4)]
        path = folder / f"package_{index % 2}" / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")
    (folder / "notes.txt").write_text("not code\n", encoding="utf-8")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, with a fixed author."""
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
