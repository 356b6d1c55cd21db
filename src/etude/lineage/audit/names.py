"""Where architectures keep their matrices: which tensor, and which of its rows.

A table of names by part serves all families; which of them a model has says which family it is of. What is fused (query, key
and value; gate and up) or reordered (GGUF's rotary halves) is a choice of rows, so that reading a part is reading rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from etude.lineage.audit.shapes import Declared

# Llama and its kin; Llama 4; InternLM 2; GPT-2 and StarCoder; Phi-2; OPT; GPT-J; NeoX, Falcon and Bloom; Qwen 1; DeepSeek-V4; GGUF.
PARTS: dict[str, tuple[str, ...]] = {
    "up": ("mlp.up_proj", "feed_forward.up_proj", "feed_forward.w3", "mlp.c_fc", "mlp.fc1", "fc1", "mlp.fc_in",
           "mlp.dense_h_to_4h", "mlp.w1", "ffn_up"),
    "gate": ("mlp.gate_proj", "feed_forward.gate_proj", "feed_forward.w1", "mlp.w2", "ffn_gate"),
    "gate_up": ("mlp.gate_up_proj", "feed_forward.gate_up_proj"),
    "shared up": ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj", "feed_forward.shared_expert.up_proj",
                  "mlp.shared_mlp.up_proj", "ffn.shared_experts.w3", "ffn_up_shexp"),
    "shared gate": ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj", "feed_forward.shared_expert.gate_proj",
                    "mlp.shared_mlp.gate_proj", "ffn.shared_experts.w1", "ffn_gate_shexp"),
    "shared gate_up": ("shared_mlp.input_linear",),
    "expert up": ("mlp.experts.{}.up_proj", "feed_forward.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3",
                  "ffn.experts.{}.w3", "ffn_up.{}"),
    "expert gate": ("mlp.experts.{}.gate_proj", "feed_forward.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1",
                    "ffn.experts.{}.w1", "ffn_gate.{}"),
    "expert gate_up": (),
    "experts up": ("ffn_up_exps",),
    "experts gate": ("ffn_gate_exps",),
    "experts gate_up": ("mlp.experts.gate_up_proj", "feed_forward.experts.gate_up_proj", "block_sparse_moe.input_linear",
                        "ffn_gate_up_exps"),
    "router": ("mlp.gate", "mlp.router", "feed_forward.router", "block_sparse_moe.gate", "block_sparse_moe.router.layer",
               "mlp.gate.wg", "ffn.gate", "ffn_gate_inp"),
    "query": ("self_attn.q_a_proj", "self_attn.q_proj", "attn.q_proj", "attn.wq_a", "attn_q_a", "attn_q"),
    "key": ("self_attn.kv_a_proj_with_mqa", "self_attn.k_proj", "self_attn.kv_proj", "attn.k_proj", "attn.wkv",
            "attn_kv_a_mqa", "attn_k"),
    "stacked": ("self_attn.qkv_proj", "attn.c_attn", "attn_qkv"),
    "grouped": ("attention.query_key_value", "self_attention.query_key_value", "attention.wqkv"),
}  # fmt: skip
ENDINGS = (".weight", "", ".weight_packed")
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embed", "token_embd")
OUTPUT = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|output_layer)\.weight|(?:output|head)\.weight")
STACK = re.compile(r"((?:.*?\.)?(?:layers|h|blk)\.)(\d+)\.(.+)")
NOT_LANGUAGE = re.compile(r"vision|visual|audio|speech|mtp|encoder\.")
FUSED_UP = {"phi3", "glm4", "chatglm"}  # GGUF architectures whose ffn_up holds the gate as well
INTERLEAVED = {"gpt_oss"}  # gate and up alternate, row by row
# GGUF architectures whose query and key rows llama.cpp's converter reorders: a head's two rotary halves are interleaved.
ROTARY_PAIRS = {"llama", "smollm3", "granite", "granitemoe", "arcee", "minicpm"}


@dataclass(frozen=True)
class Place:
    """Where a matrix lies. `rows` are those of the matrix as [units, hidden], whichever way round it is stored."""

    tensor: str
    rows: NDArray[np.int64]
    expert: int | None = None


class Layout:
    """Finds the parts of a model among its tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], declared: Declared, where: Path) -> None:
        self._shapes, self._declared, self._where = shapes, declared, where
        self._stack, others = _stacks_of(shapes, where)
        language = (name for name in shapes if not NOT_LANGUAGE.search(name))
        found = [name for name in language if name.removesuffix(".weight").split(".")[-1] in EMBEDDINGS]
        if not found:
            raise UserError(_unknown(shapes, where, "embedding"))
        self.embedding = min(found, key=len)  # a longer one belongs to a further prediction layer
        self.unread = [*others, *(name for name in found if name != self.embedding and not STACK.fullmatch(name))]
        self.vocab, self.hidden = shapes[self.embedding]
        self._refuse_other_depth()
        self._refuse_mixed_layers()
        self.head_dim = declared.head_dim or self.hidden // declared.heads
        self.latent = any("kv_a_" in name for name in shapes)
        self.tied = declared.tied or not any(OUTPUT.fullmatch(name) for name in shapes)

    def ffn(self, layer: int, part: str, owner: str = "", expert: int | None = None) -> Place | None:
        """Find "up" or "gate" of the dense FFN ("") or the "shared ", "expert " or stacked "experts " one; a fused gate is first."""
        fused = self._find(layer, f"{owner}gate_up", expert)
        if self._declared.model_type in FUSED_UP and not owner:
            fused = fused or self._find(layer, "up")
        apart = self._find(layer, f"{owner}{part}", expert)
        name = self._only(fused, apart)
        if name is None:
            return None
        rows = np.arange(self._units(name))
        if fused and self._declared.model_type in INTERLEAVED:
            rows = rows[part == "up" :: 2]
        elif fused:
            rows = np.split(rows, 2)[part == "up"]
        return Place(name, rows, expert if owner == "experts " else None)

    def router(self, layer: int) -> Place | None:
        """Find the router."""
        name = self._find(layer, "router")
        return Place(name, np.arange(self._units(name))) if name else None

    def attention(self, layer: int, part: str) -> Place | None:
        """Find "query" or "key"; with latent attention what comes first after the residual stream."""
        fusions = {fusion: found for fusion in ("stacked", "grouped") if (found := self._find(layer, fusion))}
        if (name := self._find(layer, part)) and self._only(name, *fusions.values()):
            rows = np.arange(self._units(name))
            if name.startswith("blk.") and self._declared.model_type in ROTARY_PAIRS:
                rows = rows.reshape(-1, self.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
            return Place(name, rows)
        return next(
            (Place(fused, self._of_fused(fusion, part, self._units(fused))) for fusion, fused in fusions.items()), None
        )

    def _of_fused(self, fusion: str, part: str, units: int) -> NDArray[np.int64]:
        """Pick a part's rows of fused query, key and value: all queries first, or each key after the queries it serves."""
        heads, dim = self._declared.heads, self.head_dim
        keys = (units // dim - heads) // 2
        if fusion == "stacked":
            return np.arange(heads * dim) if part == "query" else np.arange(heads * dim, (heads + keys) * dim)
        group = heads // keys
        served = np.arange(units).reshape(keys, group + 2, dim)
        return (served[:, :group] if part == "query" else served[:, group]).reshape(-1)

    def _find(self, layer: int, part: str, expert: int | None = None) -> str | None:
        names = (f"{self._stack}{layer}.{name}{ending}" for name in PARTS[part] for ending in ENDINGS)
        return self._only(*(full for name in names if (full := name.format(expert)) in self._shapes))

    def _only(self, *found: str | None) -> str | None:
        """Return the one tensor of a part. A second one may be a decoy: whoever loads the model reads one of the two."""
        names = sorted({name for name in found if name})
        if len(names) > 1:
            raise UserError(f"{self._where}: {names[0]} and {names[1]} cannot both be in use; remove what is not")
        return names[0] if names else None

    def _refuse_mixed_layers(self) -> None:
        """Refuse a layer that is dense and has experts as well: which of the two is loaded, its tensors cannot tell."""
        for layer in range(self._declared.layers):
            dense = self.ffn(layer, "up")
            experts = [self.router(layer), self.ffn(layer, "up", "expert ", 0), self.ffn(layer, "up", "experts ", 0)]
            if dense and not dense.tensor.startswith("blk."):  # GGUF has models with both
                [self._only(dense.tensor, expert.tensor) for expert in experts if expert]

    def _refuse_other_depth(self) -> None:
        """Refuse a config that tells of other layers than there are; some models keep a few further prediction layers."""
        found = (STACK.fullmatch(name) for name in self._shapes)
        said, there = self._declared.layers, 1 + max(int(name[2]) for name in found if name and name[1] == self._stack)
        if not 0 < said <= there <= said + 1 + said // 4:
            raise UserError(f"{self._where}: {said} layers are declared, the weights have {there}; correct the config")

    def _units(self, name: str) -> int:
        return self._shapes[name][-1 if self.transposed(name) else -2]

    def transposed(self, name: str) -> bool:
        """Say whether a tensor is stored as [hidden, units] (GPT-2, some experts); a square one is taken as it is."""
        if len(self._shapes[name]) < 2:
            raise UserError(f"{self._where}: {name} is not a matrix; fetch the weights again")
        units, columns = self._shapes[name][-2:]
        return units == self.hidden != columns and not name.endswith("_packed")


def _stacks_of(names: Mapping[str, tuple[int, ...]], where: Path) -> tuple[str, list[str]]:
    """Return the prefix of the language model's layers, that under which most layers have parts we know, and the other ones."""
    known = {re.sub(r"\.\{\}", ".0", name) for part in PARTS.values() for name in part}
    layers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = STACK.fullmatch(name)
        if match and not NOT_LANGUAGE.search(match[1]) and re.sub(r"\.weight(_packed)?$", "", match[3]) in known:
            layers[match[1]].add(int(match[2]))
    if not layers:
        raise UserError(_unknown(names, where, "layers"))
    first, *others = sorted(layers, key=lambda prefix: -len(layers[prefix]))
    return first, others


def _unknown(names: Mapping[str, tuple[int, ...]], where: Path, what: str) -> str:
    shown = ", ".join(list(names)[:4]) or "nothing"
    return f"{where}: no {what} known to this audit, which reads decoder language models; its tensors: {shown}, …"
