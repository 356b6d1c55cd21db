"""The shape of a model from its config alone: parameters, those a token passes through, context, attention.

Of the families that people use it is worked out from config.json by arithmetic, without torch or transformers: `FAMILIES` says what a
layer of each consists of. A config of another family, or one that leaves out what is needed or holds anything unusual, goes the slow
way: the model is built on torch's `meta` device, which costs no memory, so this answers for a trillion parameters as well.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.compute import Attention, ComputeShape
from etude.lineage.weight_files import read_header
from etude.models.load import quiet, refuse_multimodal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADS_FILE = "mtp.safetensors"
HEADS_METADATA = "etude_mtp"  # the entry of its header that says what it holds


@dataclass(frozen=True)
class ModelShape:
    """What can be said of a model without its weights."""

    family: str
    parameters: int
    active_parameters: int
    context: int
    compute: ComputeShape


class Block(NamedTuple):
    """A layer in numbers."""

    weights: int
    routed: int  # of them, those of experts that a router chooses
    linear: int  # Σ inputs + outputs of the matrices that LoRA takes


@dataclass(frozen=True)
class Sizes:
    """A model's weights by part."""

    blocks: tuple[Block, ...]
    embedding: int
    head: int  # 0: tied to the embedding
    norm: int

    @property
    def total(self) -> int:
        return sum(block.weights for block in self.blocks) + self.embedding + self.head + self.norm

    def heads(self, text: Any, depth: int, *, shared: bool) -> int:
        """Return the weights of MTP heads: three norms, a projection of two vectors to one, and a layer that sees everything."""
        width: int = text.hidden_size
        like = max(i for i, kind in enumerate(layer_kinds(text)) if kind == FULL)
        return (1 if shared else depth) * (3 * width + 2 * width**2 + self.blocks[like].weights)


class Family(NamedTuple):
    """What a layer consists of beside four matrices of attention, a gated feed-forward part and norms before or after each."""

    qkv_bias: bool | None = None  # None: as `attention_bias` says
    out_bias: bool | None = None
    mlp_bias: bool = False  # whether `mlp_bias` has a say
    norms: int = 2
    qk_norm: str = ""  # of queries and keys: as wide as a "head", or as "all" of them
    fused: bool = False  # one matrix makes queries, keys and values, and one gate and up
    experts: str = ""  # the key that says how many there are
    sinks: bool = False  # attention sinks, and biases in router and experts
    # What a file may leave out:
    tied: bool = False
    biased: bool = False
    head_dim: int | None = None
    every: int = 0  # the n-th layer sees everything, those between a window; 1: all layers do, unless `use_sliding_window`; 0: all


FULL, WINDOW = "full_attention", "sliding_attention"
PLAIN = Family(qkv_bias=False, out_bias=False)
FAMILIES = {
    "llama": Family(mlp_bias=True), "smollm3": Family(mlp_bias=True, tied=True, every=1), "mistral": PLAIN,
    "qwen2": Family(qkv_bias=True, out_bias=False, every=1), "qwen3": Family(qk_norm="head", head_dim=128, every=1),
    "qwen3_moe": Family(qk_norm="head", experts="num_experts"), "mixtral": PLAIN._replace(experts="num_local_experts"),
    "gpt_oss": Family(experts="num_local_experts", sinks=True, biased=True, head_dim=64, every=2),
    "gemma2": Family(norms=4, tied=True, head_dim=256, every=2), "olmo2": Family(qk_norm="all"), "phi3": PLAIN._replace(fused=True),
    "gemma3_text": Family(norms=4, qk_norm="head", tied=True, head_dim=256, every=6),
    "deepseek_v3": Family(experts="n_routed_experts"),
}  # fmt: skip
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "max_position_embeddings")  # fmt: skip
LATENT = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_shared_experts",
    "first_k_dense_replace",
)
ROPE_KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}


class TextConfig(SimpleNamespace):
    """What config.json says of a known family, defaults filled in: as much of a transformers config as is asked here."""

    def get_text_config(self) -> TextConfig:
        return self


def text_config(said: Any) -> TextConfig | None:
    """Return a config of a known family, all of whose sizes are given; None: only transformers can tell."""
    family = FAMILIES.get(str(said.get("model_type"))) if isinstance(said, dict) else None
    if family is None or said.get("use_bidirectional_attention") or ("layer_types" in said and not family.every):
        return None
    latent = "n_routed_experts" in said
    if family.experts == "num_experts" and "num_local_experts" in said:  # as newer versions of transformers write it
        said = {"num_experts": said["num_local_experts"], **said}
    needed = [
        *NEEDED,
        *(["num_experts_per_tok", family.experts] if family.experts else []),
        *(LATENT if latent else ()),
    ]
    needed += ["moe_intermediate_size"] if family.experts in {"num_experts", "n_routed_experts"} else []
    needed += ["decoder_sparse_step"] if family.experts == "num_experts" else []
    needed += ["sliding_window"] if family.every > 1 else []
    if not all(type(said.get(name)) is int and said[name] > 0 for name in needed) or (
        latent and "q_lora_rank" not in said
    ):
        return None
    if {said.get(name) for name in ("hidden_act", "hidden_activation")} - {None, "silu", "gelu", "gelu_pytorch_tanh"}:
        return None
    heads, rope = said["num_attention_heads"], _rope(said, family)
    if said["hidden_size"] % heads or heads % said["num_key_value_heads"] or rope is None:
        return None
    windowed = bool(said.get("use_sliding_window")) or family.every != 1
    layers, every = (
        said["num_hidden_layers"],
        said.get("sliding_window_pattern", 6) if family.every == 6 else family.every,
    )
    if family.every == 1 and windowed and "layer_types" not in said:
        return None
    kinds = [WINDOW if every > 1 and (index + 1) % every else FULL for index in range(layers)]
    filled = {"tie_word_embeddings": family.tied, "attention_bias": family.biased, "mlp_bias": False, "mlp_only_layers": [],
              "sliding_window": None}  # fmt: skip
    given = {name: value for name, value in said.items() if value is not None}
    width = said.get("head_dim") or family.head_dim or said["hidden_size"] // heads
    own = {"head_dim": width, "layer_types": said.get("layer_types") or kinds, "rope_parameters": rope}
    return TextConfig(**filled | given | own | ({} if windowed else {"sliding_window": None}))


def _rope(said: dict[str, Any], family: Family) -> dict[str, Any] | None:
    """Return the rope parameters, as transformers 5 writes them, of a config of any age; None: of a kind that is not known here."""
    scaled = said.get("rope_scaling") or {}
    flat = {"rope_type": scaled.get("type", "default"), "rope_theta": said.get("rope_theta", 10_000.0), **scaled}
    local = {"rope_type": "default", "rope_theta": said.get("rope_local_base_freq", 10_000.0)}
    rope = said.get("rope_parameters") or ({FULL: flat, WINDOW: local} if family.every == 6 else flat)
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    return dict(rope) if all(each.get("rope_type", "default") in ROPE_KINDS for each in kinds) else None


def sizes_of(text: TextConfig) -> Sizes:
    """Return a model's weights by part, from its config."""
    family, width = FAMILIES[text.model_type], text.hidden_size
    blocks = tuple(_block(text, family, index) for index in range(text.num_hidden_layers))
    table = text.vocab_size * width
    return Sizes(blocks, table, 0 if text.tie_word_embeddings else table, width)


def _block(text: TextConfig, family: Family, index: int) -> Block:
    matrices, vectors, routed = [*_attention_matrices(text, family)], family.norms * text.hidden_size, 0
    if hasattr(text, "kv_lora_rank"):
        vectors += text.kv_lora_rank + getattr(text, "q_lora_rank", 0)
    elif family.qk_norm:
        heads = text.num_attention_heads + text.num_key_value_heads if family.qk_norm == "all" else 2
        vectors += heads * text.head_dim
    inner, biased = text.intermediate_size, family.mlp_bias and text.mlp_bias
    if family.experts and _is_routed(text, index):
        inner, experts = getattr(text, "moe_intermediate_size", inner), getattr(text, family.experts)
        routed = experts * (3 * text.hidden_size * inner + family.sinks * (2 * inner + text.hidden_size))
        vectors += experts * (text.hidden_size + family.sinks)  # the router
        inner *= getattr(text, "n_shared_experts", 0)
    up = [2 * inner] if family.fused else [inner, inner]
    if inner:
        matrices += [*((text.hidden_size, out, biased) for out in up), (inner, text.hidden_size, biased)]
    vectors += text.num_attention_heads if family.sinks else 0
    weights = sum(into * out + bias * out for into, out, bias in matrices) + vectors + routed
    return Block(weights, routed, sum(into + out for into, out, _ in matrices))


def _is_routed(text: TextConfig, index: int) -> bool:
    if hasattr(text, "first_k_dense_replace"):
        return bool(index >= text.first_k_dense_replace)
    return index not in text.mlp_only_layers and (index + 1) % getattr(text, "decoder_sparse_step", 1) == 0


def _attention_matrices(text: TextConfig, family: Family) -> Iterator[tuple[int, int, bool]]:
    """Yield (inputs, outputs, whether it has a bias)."""
    width, heads, bias = text.hidden_size, text.num_attention_heads, bool(text.attention_bias)
    if hasattr(text, "kv_lora_rank"):  # multi-head latent attention
        wide, low = text.qk_nope_head_dim + text.qk_rope_head_dim, getattr(text, "q_lora_rank", None)
        yield from [(width, low, bias), (low, heads * wide, False)] if low else [(width, heads * wide, False)]
        yield width, text.kv_lora_rank + text.qk_rope_head_dim, bias
        yield text.kv_lora_rank, heads * (text.qk_nope_head_dim + text.v_head_dim), False
        yield heads * text.v_head_dim, width, bias
        return
    queries, kept = heads * text.head_dim, text.num_key_value_heads * text.head_dim
    outputs = [queries + 2 * kept] if family.fused else [queries, kept, kept]
    yield from ((width, out, bias if family.qkv_bias is None else family.qkv_bias) for out in outputs)
    yield queries, width, bias if family.out_bias is None else family.out_bias


def model_shape(folder: Path) -> ModelShape:
    """Read the shape of the model in a folder."""
    config = read_config(folder)
    try:
        return shape_of(config)
    except Exception as error:  # noqa: BLE001 - a damaged config makes transformers raise almost anything
        raise _no_model(folder, error) from None


def read_config(folder: Path) -> Any:
    """Return the config of the model in a folder: `TextConfig` where that is enough, else that of transformers."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # transformers says what is wrong with it
        if text := text_config(read_json(folder / "config.json")):
            return text
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    quiet()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - as above
        raise _no_model(folder, error) from None
    rope, known = getattr(config.get_text_config(), "rope_parameters", None) or {}, {"default", *ROPE_INIT_FUNCTIONS}
    kinds = [each.get("rope_type") or "default" for each in (rope, *rope.values()) if isinstance(each, dict)]
    if unknown := [kind for kind in kinds if kind not in known]:
        what = f"rope_type {unknown[0]!r} is none that transformers knows ({', '.join(sorted(known))})"
        raise UserError(f"{folder / 'config.json'}: {what}; correct it, or take another base")
    return config


def _no_model(folder: Path, error: Exception) -> UserError:
    refuse_multimodal(folder)
    return UserError(f"{folder / 'config.json'} is not a causal language model transformers knows ({one_line(error)})")


def on_meta(config: Any) -> Any:
    """Return a model without weights. In bf16: torch's grouped products know no other dtype there."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)


def shape_of(config: Any) -> ModelShape:
    """Return the shape that a config describes, a transformers one or ours."""
    text = config.get_text_config()
    tied, share = bool(text.tie_word_embeddings), routed_share(text)
    if isinstance(config, TextConfig):
        sizes = sizes_of(config)
        total, embedding = sizes.total, sizes.embedding
        active = total - (1 - share) * sum(block.routed for block in sizes.blocks)
    else:
        model, total, active = on_meta(config), 0, 0.0
        embedding = model.get_input_embeddings().weight.numel()
        for name, parameter in model.named_parameters():
            if tied and name == "lm_head.weight":
                continue  # the same tensor as the embedding, listed twice on the meta device
            total += parameter.numel()
            active += parameter.numel() * (share if ".experts." in name else 1.0)
    looked_up = 0 if tied else embedding  # an untied input embedding is a lookup, not a multiplication
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


def layer_kinds(text: Any) -> list[str]:
    """Return what each layer sees; those without pairwise attention (linear, state space) have names of their own."""
    return getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers


def _attention(text: Any) -> tuple[Attention, ...]:
    """Return the attention of each layer; layers without pairwise attention have none to count."""
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention
        qk_dim, v_dim = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    else:
        qk_dim = v_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    windows = {FULL: None, WINDOW: getattr(text, "sliding_window", None)}
    return tuple(Attention(heads, qk_dim, v_dim, windows[kind]) for kind in layer_kinds(text) if kind in windows)


def heads_shape(folder: Path) -> tuple[int, bool] | None:
    """Return (depth, shared) of the MTP heads in a model's folder, or None if it has none."""
    file = folder / HEADS_FILE
    if not file.is_file():
        return None
    read_header(file)
    from safetensors import safe_open

    with safe_open(file, framework="np") as tensors:
        metadata = tensors.metadata() or {}
    try:
        shape = json.loads(metadata[HEADS_METADATA])
        return int(shape["depth"]), bool(shape["shared"])
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{file} does not say what it holds; train the heads again, or remove it") from None
