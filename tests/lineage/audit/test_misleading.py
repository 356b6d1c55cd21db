"""Files and configs that are broken, or that show the audit other weights than are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from etude.errors import UserError
from etude.lineage.audit.read_weights import open_weights
from tests.lineage.audit import zoo
from tests.lineage.audit.zoo import FFN, HIDDEN, LAYERS

if TYPE_CHECKING:
    from pathlib import Path

UP, KEY = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(("tensor", "said"), [
    ({UP: np.full((FFN, HIDDEN), np.nan, np.float32)}, f"{UP} holds NaN"),
    ({UP: np.ones((FFN, HIDDEN + 1), np.float32)}, f"{UP} does not fit"),
    ({UP: np.ones((2, FFN, HIDDEN), np.float32)}, f"{UP} does not fit"),
    ({KEY: np.ones(HIDDEN, np.float32)}, f"{KEY} is not a matrix"),
    ({"model.embed_tokens.weight": np.ones(9, np.float32)}, "do not fit"),
    ({UP.replace("up_proj", "gate_up_proj"): np.ones((2 * FFN, HIDDEN), np.float32)}, "cannot both be in use"),
    ({KEY.replace("k_proj", "qkv_proj"): np.ones((64, HIDDEN), np.float32)}, "cannot both be in use"),
    ({KEY.replace("self_attn", "attn"): np.ones((16, HIDDEN), np.float32)}, "cannot both be in use"),
])  # fmt: skip
def test_broken_and_double_matrices_are_refused_by_name(tmp_path: Path, tensor: dict[str, Any], said: str) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=said):
        [
            (weights.part(layer, "up"), weights.part(layer, "key"))
            for weights in [open_weights(tmp_path)]
            for layer in range(LAYERS)
        ]


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": 0}, "0 layers are declared, the weights have 3"),
    ({"num_hidden_layers": 4}, "4 layers are declared, the weights have 3"),
    ({"llm_config": {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4}}, "1 layers are declared"),
    ({"num_attention_heads": 0, "head_dim": None}, "do not fit"),
    ({"head_dim": "wide"}, "not the config of a language model"),
    ({"transformers_weights": "other.safetensors"}, "names 'other.safetensors' as its weights"),
])  # fmt: skip
def test_a_config_that_misleads_the_audit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=said):
        open_weights(tmp_path)
