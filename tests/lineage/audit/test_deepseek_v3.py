"""The case that made the news, in small: a model of DeepSeek-V3's shape, offered under another name without its licence.

Latent attention, a dense first layer, then routed and shared experts; the base is in the library as a sketch only, as a user has it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from etude.lineage.audit.examine import examine, examine_library, open_model
from etude.lineage.audit.sketch import Facts, make_sketch
from etude.progress import Reporter
from tests.lineage.audit.relatives import words_of_tiny
from tests.tiny import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from etude.lineage.audit.sketch import Sketch

    Tensors = dict[str, torch.Tensor]

QUIET = Reporter(quiet=True)
BLOCK = 16


def deepseek(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, moe_intermediate_size=96, num_hidden_layers=4, n_group=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        quantization_config=None, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    words_of_tiny().save_pretrained(folder)
    return folder


def tuned(tensors: Tensors) -> Tensors:
    """Half as much again of every matrix as noise: far more than any fine-tuning."""
    chance = torch.Generator().manual_seed(7)
    return {
        name: (each + 0.5 * each.float().std() * torch.randn(each.shape, generator=chance)).to(each.dtype)
        if each.ndim == 2 else each
        for name, each in tensors.items()
    }  # fmt: skip


def as_fp8(tensors: Tensors) -> Tensors:
    """Every matrix of a layer in eight bits with a scale for each block, as DeepSeek-V3 is published."""
    made: Tensors = {}
    for name, each in tensors.items():
        if each.ndim != 2 or ".layers." not in name or name.endswith("gate.weight"):
            made[name] = each
            continue
        scales = torch.zeros(-(-each.shape[0] // BLOCK), -(-each.shape[1] // BLOCK))
        coded = torch.zeros(each.shape, dtype=torch.float8_e4m3fn)
        for row, column in np.ndindex(*scales.shape):
            place = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = each[place].abs().max().float() / 448
            coded[place] = (each[place].float() / scales[row, column]).to(torch.float8_e4m3fn)
        made |= {name: coded, f"{name}_scale_inv": scales}
    return made


def from_fp8(tensors: Tensors) -> Tensors:
    """The same in bf16 again, as whoever trains on does it."""
    made = {}
    for name, each in tensors.items():
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: each.shape[0], : each.shape[1]]
            made[name] = (each.float() * wide).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            made[name] = each
    return made


def renamed(tensors: Tensors) -> Tensors:
    words = {"model.layers.": "body.", "self_attn": "look", "mlp.experts.": "minds.", "mlp.shared_experts": "common", "mlp.gate.": "pick.",
             "mlp": "think", "up_proj": "w1", "gate_proj": "w2", "down_proj": "w3", "model.embed_tokens": "lookup"}  # fmt: skip
    made = {}
    for name, each in tensors.items():
        for word, other in words.items():
            name = name.replace(word, other)  # noqa: PLW2901 - one after another
        made[name] = each
    return made


def disguised(base: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    if config:
        text = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(re.sub(r"^\{", "{" + config["more"], text), encoding="utf-8")
    save_file(change(load_file(base / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek(tmp_path_factory.mktemp("v3") / "deepseek-v3", seed=0)


@pytest.fixture(scope="module")
def library(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sketch]:
    others = [deepseek(tmp_path_factory.mktemp("other") / f"other-{seed}", seed) for seed in (1, 2)]
    made = []
    for folder in (others[0], base, others[1]):
        opened = open_model(folder)
        facts = Facts(name=folder.name, source="test", licence="DeepSeek-LA-1.0", model_digest="", made="2026-11-18")
        made.append(make_sketch(opened.weights, opened.tokens, facts))
    return made


BLOCKS = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]},'
DISGUISES: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, str]]] = {
    "fine-tuned": (tuned, {}),
    "fp8": (as_fp8, {"more": BLOCKS}),
    "fine-tuned, fp8": (lambda tensors: as_fp8(tuned(tensors)), {"more": BLOCKS}),
    "fp8 and back, fine-tuned": (lambda tensors: tuned(from_fp8(as_fp8(tensors))), {}),
    "renamed": (renamed, {}),
    "fp8 and back, fine-tuned, renamed": (lambda tensors: renamed(tuned(from_fp8(as_fp8(tensors)))), {}),
    "fp8, renamed": (lambda tensors: renamed(as_fp8(tensors)), {"more": BLOCKS}),
}


@pytest.mark.parametrize("how", DISGUISES)
def test_a_model_made_of_deepseek_v3_is_found_in_the_library(
    base: Path, library: list[Sketch], tmp_path: Path, how: str
) -> None:
    change, config = DISGUISES[how]
    suspect = open_model(disguised(base, tmp_path / "ai-3.0", change, **config))
    first, *others = examine_library(suspect, library, QUIET)
    assert (first.reference, first.verdict.word) == ("deepseek-v3", "derived")
    assert first.verdict.log10_p < -30
    assert [other.verdict.word for other in others] == ["none", "none"]
    assert examine(open_model(base), suspect, QUIET).verdict.word == "derived"


def test_its_shape_is_read(base: Path) -> None:
    shape = open_model(base).shape
    assert (shape.attention, shape.experts, shape.shared_experts, shape.dense_layers) == ("mla", 8, 1, 1)
