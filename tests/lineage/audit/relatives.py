"""A tiny Llama as bare matrices, what people do to one, and folders of the result."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from scipy.stats import ortho_group

from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[np.float32]]

HIDDEN, FFN, LAYERS, VOCAB = 64, 96, 6, tiny.VOCABULARY
ROWS = {
    "self_attn.q_proj": 64,
    "self_attn.k_proj": 32,
    "self_attn.v_proj": 32,
    "mlp.gate_proj": FFN,
    "mlp.up_proj": FFN,
}
OUT = {
    "self_attn.o_proj": 64,
    "mlp.down_proj": FFN,
}  # these write into the residual stream: its dimensions are their rows


words_of_tiny = cache(tiny.tokeniser)


def llama(seed: int) -> Tensors:
    chance = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": (rows, HIDDEN) for name, rows in ROWS.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (HIDDEN, columns) for name, columns in OUT.items()}
    return {name: chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def drifted(model: Tensors, amount: float, seed: int = 1) -> Tensors:
    chance = np.random.default_rng(seed)
    return {name: each + amount * chance.standard_normal(each.shape).astype(np.float32) for name, each in model.items()}


def shuffled(model: Tensors) -> Tensors:
    """Other order of the units of every feed-forward layer, same function."""
    made, chance = dict(model), np.random.default_rng(2)
    for layer in range(LAYERS):
        order, stem = chance.permutation(FFN), f"model.layers.{layer}.mlp."
        for part in ("up_proj", "gate_proj"):
            made[f"{stem}{part}.weight"] = made[f"{stem}{part}.weight"][order]
        made[f"{stem}down_proj.weight"] = made[f"{stem}down_proj.weight"][:, order]
    return made


def flipped(model: Tensors, share: float = 0.5) -> Tensors:
    """Some units of every feed-forward layer negated in up and down, same function."""
    made, chance = dict(model), np.random.default_rng(5)
    for layer in range(LAYERS):
        signs, stem = np.where(chance.random(FFN) < share, -1, 1).astype(np.float32), f"model.layers.{layer}.mlp."
        made[f"{stem}up_proj.weight"] = made[f"{stem}up_proj.weight"] * signs[:, None]
        made[f"{stem}down_proj.weight"] = made[f"{stem}down_proj.weight"] * signs
    return made


def renamed(model: Tensors, names: str) -> Tensors:
    """The same tensors under names that nobody knows."""
    parts = {"self_attn.q_proj": "mix.a1", "self_attn.k_proj": "mix.a2", "self_attn.v_proj": "mix.a3", "self_attn.o_proj": "mix.z",
             "mlp.gate_proj": "net.w1", "mlp.up_proj": "net.w3", "mlp.down_proj": "net.w2"}  # fmt: skip
    made = {}
    for number, (name, each) in enumerate(model.items()):
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if names == "in order":
            made[f"tensor_{number}"] = each
        elif names == "by part":
            made[f"{parts[match[2]]}/{match[1]}" if match else "lookup"] = each
        else:
            made[f"blocks.{match[1]}.{parts[match[2]]}" if match else "lookup"] = each
    return made


def turned(model: Tensors, how: str = "rotated") -> Tensors:
    """Another basis of the residual stream, same function."""
    chance, turn = np.random.default_rng(3), ortho_group.rvs(HIDDEN, random_state=3).astype(np.float32)
    if how != "rotated":
        turn = np.eye(HIDDEN, dtype=np.float32)
        turn = turn[chance.permutation(HIDDEN)] if how == "permuted" else turn * chance.choice([-1, 1], HIDDEN)
    turn = turn.astype(np.float32)
    return {name: turn.T @ each if any(out in name for out in OUT) else each @ turn for name, each in model.items()}


def rescaled(model: Tensors, *, signs_only: bool = False) -> Tensors:
    """Factors moved from the gains of the norms, which were 1, into what reads after them: same function."""
    made, chance = dict(model), np.random.default_rng(6)
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for layer in range(LAYERS):
        for norm, parts in readers.items():
            scale = np.exp(chance.normal(0, 0 if signs_only else 2, HIDDEN)) * chance.choice([-1, 1], HIDDEN)
            stem = f"model.layers.{layer}."
            made[f"{stem}{norm}.weight"] = (1 / scale).astype(np.float32)
            for name in [name for name in model if name.startswith(stem) and name.split(".")[-2] in parts]:
                made[name] = (model[name] * scale).astype(np.float32)
    return made


def shallower(model: Tensors, keep: list[int]) -> Tensors:
    made = {name: each for name, each in model.items() if ".layers." not in name}
    for new, old in enumerate(keep):
        stem = f"model.layers.{old}."
        made |= {name.replace(stem, f"model.layers.{new}."): each for name, each in model.items() if stem in name}
    return made


def narrower(model: Tensors, keep: NDArray[np.int64], units: NDArray[np.int64]) -> Tensors:
    """Fewer residual dimensions and fewer units of each feed-forward layer."""
    made = {name: each[keep] if any(out in name for out in OUT) else each[:, keep] for name, each in model.items()}
    for name, each in made.items():
        if "up_proj" in name or "gate_proj" in name:
            made[name] = each[units]
        elif "down_proj" in name:
            made[name] = each[:, units]
    return made


def upcycled(model: Tensors, experts: int) -> Tensors:
    """Every expert begins as the feed-forward layer, and drifts."""
    made, chance = {}, np.random.default_rng(4)
    for name, each in model.items():
        stem, dot, part = name.partition(".mlp.")
        if not dot:
            made[name] = each
            continue
        made[f"{stem}.mlp.gate.weight"] = chance.standard_normal((experts, HIDDEN)).astype(np.float32)
        for expert in range(experts):
            drift = 0.3 * chance.standard_normal(each.shape).astype(np.float32)
            made[f"{stem}.mlp.experts.{expert}.{part}"] = each + drift
    return made


def save(folder: Path, model: Tensors, *, words: bool = True, **config: Any) -> Path:
    folder.mkdir(parents=True)
    shape = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
             "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape | config), encoding="utf-8")
    save_file({name: np.ascontiguousarray(each) for name, each in model.items()}, folder / "model.safetensors")
    if words:
        words_of_tiny().save_pretrained(folder)
    return folder
