"""The usual decoder with as few operations as it takes, on the weights of a transformers model.

Most open models are the same decoder: RMS norms, rotary positions, grouped attention, a gated feed-forward part. transformers' code
for it is made to be read and changed: sixty operations a layer, a Python call for each part. With few tokens at a time the host
spends more time on calls than the device on numbers. Here a layer takes twenty: queries, keys and values come from one matrix
product, gate and up from another, and the table of rotary positions is made once.

The joined matrices are the model's own weights, whose tensors become views into them: new weights copied into the model are here too.
Which models fit is seen by their parts, and whether they say the same is tried (runner.py); all others run on transformers' code.

Shapes: N tokens, D width of the model, H heads, K key/value heads, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from etude.inference.attention import attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.inference.cache import LayerShape

PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}  # the others depend on how long a text is
PARTS = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}


@dataclass(frozen=True)
class Shape:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    width: int
    epsilon: float


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    second_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    scaling: float
    window: int


def run_layer(
    x_ND: torch.Tensor,
    more_ND: torch.Tensor,
    cosine_Nd: torch.Tensor,
    sine_Nd: torch.Tensor,
    layer: Layer,
    shape: Shape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what the layer before has left to add, and return the sum with what this one has: a compiler joins it to the norm."""
    x_ND = x_ND + more_ND
    qkv = F.linear(F.rms_norm(x_ND, x_ND.shape[1:], layer.norm, shape.epsilon), layer.qkv, layer.qkv_bias)
    qkv_NHd = qkv.unflatten(1, (-1, shape.width))
    both = shape.heads + shape.kv_heads
    turned = qkv_NHd[:, :both]
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = turned.split([shape.heads, shape.kv_heads], 1)
        query = F.rms_norm(query, query.shape[2:], layer.query_norm, shape.epsilon)
        turned = torch.cat([query, F.rms_norm(key, key.shape[2:], layer.key_norm, shape.epsilon)], 1)
    half = shape.width // 2
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    turned = turned * cosine_Nd[:, None] + swapped * sine_Nd[:, None]
    query_HNd, key_KNd = turned[:, : shape.heads].transpose(0, 1), turned[:, shape.heads :].transpose(0, 1)
    found = attend(query_HNd[None], key_KNd[None], qkv_NHd[:, both:].transpose(0, 1)[None], layer.scaling, layer.window)
    x_ND = x_ND + F.linear(found[0].flatten(1), layer.out, layer.out_bias)
    gate, up = F.linear(F.rms_norm(x_ND, x_ND.shape[1:], layer.second_norm, shape.epsilon), layer.gate_up).chunk(2, -1)
    return x_ND, F.linear(F.silu(gate) * up, layer.down)


class Lean:
    """A whole decoder, and heads if there are any."""

    def __init__(
        self, model: Any, heads: Any | None, shapes: Sequence[LayerShape], positions: int, *, compiled: bool
    ) -> None:
        decoder = model.get_decoder()
        config = decoder.config
        attention = decoder.layers[0].self_attn
        self.shape = Shape(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            config.rms_norm_eps,
        )
        if (head := getattr(model, "lm_head", None)) is not None and model.get_output_embeddings() is head:
            _joined(model, ("lm_head",), "weight")
        self.embed, self.norm = model.get_input_embeddings().weight, decoder.norm.weight
        self.layers = [_layer(layer, seen) for layer, seen in zip(decoder.layers, shapes, strict=False)]
        self.heads = heads
        self.head_layers = [_layer(each.mtp_block, shapes[-1]) for each in heads.layers] if heads else []
        places = torch.arange(positions, device=self.embed.device)[None]
        self.cosine, self.sine = (each[0] for each in decoder.rotary_emb(self.embed[:1], places))
        self._run = torch.compile(run_layer, dynamic=True) if compiled else run_layer

    def trunk(self, tokens_N: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after the last norm."""
        x, cosine, sine = F.embedding(tokens_N, self.embed), self.cosine[position_N], self.sine[position_N]
        more = torch.zeros_like(x)
        for layer in self.layers:
            x, more = self._run(x, more, cosine, sine, layer, self.shape)
        return F.rms_norm(x + more, x.shape[1:], self.norm, self.shape.epsilon)

    def guess(
        self, depth: int, hidden_ND: torch.Tensor, next_N: torch.Tensor, position_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states of a head; as MtpHeads.step."""
        assert self.heads is not None
        own, epsilon = self.heads.layer(depth), self.shape.epsilon
        embedded = F.rms_norm(F.embedding(next_N, self.embed), hidden_ND.shape[1:], own.enorm.weight, epsilon)
        both = torch.cat([embedded, F.rms_norm(hidden_ND, hidden_ND.shape[1:], own.hnorm.weight, epsilon)], -1)
        x = F.linear(both, own.eh_proj.weight)
        layer = self.head_layers[0 if self.heads.shared else depth]
        x, more = self._run(x, torch.zeros_like(x), self.cosine[position_N], self.sine[position_N], layer, self.shape)
        return F.rms_norm(x + more, x.shape[1:], own.post_norm.weight, epsilon)


def fits(model: Any) -> bool:
    """Return whether a model is the usual decoder, as far as its parts tell."""
    decoder = model.get_decoder()
    config, layers = decoder.config, getattr(decoder, "layers", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if not layers or not hasattr(decoder, "norm") or not hasattr(decoder, "rotary_emb") or rope not in PLAIN_ROPE:
        return False
    return getattr(config, "hidden_act", None) == "silu" and all(_is_usual(layer) for layer in layers)


def _is_usual(layer: Any) -> bool:
    parts = {name for name, _ in layer.named_children()}
    attention = {name for name, _ in layer.self_attn.named_children()} if "self_attn" in parts else set()
    feed = {name for name, _ in layer.mlp.named_children()} if "mlp" in parts else set()
    return (
        parts == PARTS
        and attention - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and feed - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}
        and layer.mlp.down_proj.bias is None
    )


def _layer(layer: Any, seen: LayerShape) -> Layer:
    attention, feed = layer.self_attn, layer.mlp
    return Layer(
        layer.input_layernorm.weight,
        _joined(attention, ("q_proj", "k_proj", "v_proj"), "weight"),
        _joined(attention, ("q_proj", "k_proj", "v_proj"), "bias"),
        attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        _joined(attention, ("o_proj",), "weight"),
        attention.o_proj.bias,
        layer.post_attention_layernorm.weight,
        _joined(feed, ("gate_proj", "up_proj"), "weight"),
        _joined(feed, ("down_proj",), "weight"),
        seen.scaling,
        seen.window,
    )


def _joined(part: Any, names: tuple[str, ...], what: str) -> Any:
    """Return the weights of several matrices as one; the model's own become views into it.

    On a CPU a matrix is laid out by columns: its product with the few rows of a decoding step is then up to twice as fast.
    """
    own = [getattr(getattr(part, name), what) for name in names]
    if own[0] is None:
        return None
    whole = torch.cat([each.detach() for each in own])
    if whole.ndim == 2 and whole.device.type == "cpu":
        whole = whole.T.contiguous().T
    for each, piece in zip(own, whole.split([len(each) for each in own]), strict=True):
        each.data = piece
    return whole
