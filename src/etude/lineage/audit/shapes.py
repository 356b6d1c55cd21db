"""What two models' shapes say about kinship: the same, more words, pruned, upcycled, or another.

What tensors show is taken from them and not from the config: a config can be edited without anybody noticing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim")
NESTED = ("text_config", "llm_config", "language_config")
# A difference in these is worth a word, but is no other structure: both change in training, or in how a file is written.
INCIDENTAL = {"model_type", "tied", "rope_theta"}
DEPTH = {"layers", "dense_layers"}
EXPERT_FIELDS = {"experts", "expert_ffn", "shared_experts", "dense_layers", "ffn"}


@dataclass(frozen=True)
class Declared:
    """What only the config or the GGUF's metadata can say."""

    model_type: str
    layers: int
    heads: int
    head_dim: int | None
    rope_theta: float | None
    q_rank: int = 0
    kv_rank: int = 0
    tied: bool = False  # said so; a model without an output head is tied in any case
    block: tuple[int, int] = (128, 128)  # rows and columns that share one fp8 scale


@dataclass(frozen=True)
class Shape:
    """The structure of a model; 0 where it has no such part."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # rows of a dense layer's up-projection
    vocab: int  # rows of the embedding, padding included
    tied: bool
    rope_theta: float | None
    attention: str  # "mha" | "gqa" | "mla"
    expert_ffn: int = 0
    experts: int = 0
    shared_experts: int = 0
    dense_layers: int = 0  # layers with a dense FFN: all of them in a dense model
    q_rank: int = 0
    kv_rank: int = 0


WIDTH = {field.name for field in fields(Shape)} - INCIDENTAL - DEPTH - {"vocab", "attention"}


@dataclass(frozen=True)
class ShapeEvidence:
    """How two shapes are related. Compatible shapes prove nothing; different ones disprove nothing."""

    kind: str  # "exact" | "extended vocabulary" | "pruned" | "upcycled" | "different"
    differences: dict[str, tuple[Any, Any]]
    sentence: str


def declared_by_config(config: Mapping[str, Any], where: Path) -> Declared:
    """Read a Hugging Face config; `where` is named in what goes wrong."""
    try:
        text: Mapping[str, Any] = next((config[key] for key in NESTED if isinstance(config.get(key), dict)), config)
        rope = text.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
        latent = int(text.get("kv_lora_rank") or 0)
        return Declared(
            model_type=str(text.get("model_type") or config["model_type"]),
            layers=_first(text, "num_hidden_layers", "n_layer", "num_layers"),
            heads=_first(text, "num_attention_heads", "n_head"),
            head_dim=sum(text[key] for key in LATENT) if latent else int(text.get("head_dim") or 0) or None,
            rope_theta=rope.get("rope_theta") or text.get("rope_theta") or text.get("rotary_emb_base"),
            q_rank=int(text.get("q_lora_rank") or 0),
            kv_rank=latent,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            block=tuple((text.get("quantization_config") or {}).get("weight_block_size") or (128, 128)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where} is not the config of a language model ({error} is missing or wrong)") from None


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return int(next((config[key] for key in keys if config.get(key)), None) or config[keys[0]])


def declared_by_gguf(meta: Mapping[str, Any], where: Path) -> Declared:
    """Read the metadata of a GGUF file."""
    kind = meta.get("general.architecture")
    said = {key.removeprefix(f"{kind}."): value for key, value in meta.items()}
    try:
        heads = said["attention.head_count"]
        return Declared(
            model_type=str(kind),
            layers=said["block_count"] - said.get("nextn_predict_layers", 0),
            heads=max(heads) if isinstance(heads, list) else heads,
            head_dim=said.get("attention.key_length_mla") or said.get("attention.key_length"),
            rope_theta=said.get("rope.freq_base"),
            q_rank=said.get("attention.q_lora_rank", 0),
            kv_rank=said.get("attention.kv_lora_rank", 0),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} is not a language model ({error} is missing or wrong)") from None


def compare_shapes(a: Shape, b: Shape) -> ShapeEvidence:
    """Compare two shapes. Which of the two was first, no shape can tell."""
    pairs = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(Shape)}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    changed = differences.keys() - INCIDENTAL
    kind, sentence = _kind(changed, differences)
    listed = ", ".join(f"{name} {one} and {other}" for name, (one, other) in differences.items())
    return ShapeEvidence(kind, differences, f"{sentence} ({listed})" if listed else sentence)


def _kind(changed: set[str], differences: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    if not changed:
        return "exact", "the same shape"
    if changed == {"vocab"}:
        return "extended vocabulary", "the same shape but for the number of words"
    dense = [side for side in (0, 1) if "experts" in changed and differences["experts"][side] == 0]
    if dense and changed <= EXPERT_FIELDS | {"vocab"}:
        return "upcycled", f"the same shape with experts in place of the FFN of the {('first', 'second')[dense[0]]}"
    structural = changed - {"vocab"}
    smaller = {one < other for one, other in (differences[name] for name in structural)}
    if not dense and len(smaller) == 1 and structural <= DEPTH | WIDTH:
        parts = [word for word, names in (("layers", DEPTH), ("width", WIDTH)) if structural & names]
        less = "first" if smaller == {True} else "second"
        return "pruned", f"the {less} could be the other with less of its {' and '.join(parts)}"
    return "different", "different shapes"
