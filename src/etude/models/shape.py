"""The shape of a model from its config alone: parameters, those a token passes through, context, attention.

The model is built on torch's `meta` device, which costs no memory, so this answers for a trillion parameters as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import UserError, one_line
from etude.lineage.compute import Attention, ComputeShape
from etude.models.load import refuse_multimodal

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """What can be said of a model without its weights."""

    family: str
    parameters: int
    active_parameters: int
    context: int
    compute: ComputeShape


def model_shape(folder: Path) -> ModelShape:
    """Read the shape of the model in a folder."""
    try:
        return shape_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:  # noqa: BLE001 - a damaged config makes transformers raise almost anything
        file, why = folder / "config.json", one_line(error)
        refuse_multimodal(folder)
        raise UserError(f"{file} is not a causal language model transformers knows ({why})") from None


def shape_of(config: Any) -> ModelShape:
    """Return the shape that a transformers config describes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    embedding = model.get_input_embeddings().weight
    tied = bool(text.tie_word_embeddings)
    share = routed_share(text)
    total, active = 0, 0.0
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue  # the same tensor as the embedding, listed twice on the meta device
        total += parameter.numel()
        active += parameter.numel() * (share if ".experts." in name else 1.0)
    looked_up = 0 if tied else embedding.numel()  # an untied input embedding is a lookup, not a multiplication
    return ModelShape(
        family=str(config.model_type),
        parameters=total,
        active_parameters=round(active),
        context=int(text.max_position_embeddings),
        compute=ComputeShape(round(active) - looked_up, _attention(text)),
    )


def routed_share(text: Any) -> float:
    """Return the share of routed experts a token passes through; 1 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
    return text.num_experts_per_tok / experts if experts else 1.0


def _attention(text: Any) -> tuple[Attention, ...]:
    """Return the attention of each layer; layers without pairwise attention (linear, state space) have none to count."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention
        qk_dim, v_dim = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    else:
        qk_dim = v_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    return tuple(Attention(heads, qk_dim, v_dim, windows[kind]) for kind in kinds if kind in windows)
