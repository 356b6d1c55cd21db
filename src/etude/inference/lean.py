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

    from torch import Tensor

    from etude.inference.attention import Turn
    from etude.inference.kv_cache import LayerShape

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

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    second_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scaling: float
    window: int


def run_layer(
    x_ND: Tensor, more_ND: Tensor, cosine_Nd: Tensor, sine_Nd: Tensor, layer: Layer, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Add what the layer before has left to add, and return the sum with what this one has: a compiler joins it to the norm."""
    x_ND = x_ND + more_ND
    qkv = F.linear(_normed(x_ND, layer.norm, shape), layer.qkv, layer.qkv_bias)
    qkv_NHd = qkv.unflatten(1, (-1, shape.width))
    both = shape.heads + shape.kv_heads
    turned = qkv_NHd[:, :both]
    turn: Turn = (cosine_Nd, sine_Nd)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = turned.split([shape.heads, shape.kv_heads], 1)
        query = F.rms_norm(query, query.shape[2:], layer.query_norm, shape.epsilon)
        turned = torch.cat([query, F.rms_norm(key, key.shape[2:], layer.key_norm, shape.epsilon)], 1)
    if not turned.is_cuda:  # else attention does it
        half = shape.width // 2
        swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
        turned, turn = turned * cosine_Nd[:, None] + swapped * sine_Nd[:, None], None
    parts = (turned[:, : shape.heads], turned[:, shape.heads :], qkv_NHd[:, both:])
    query, key, value = (each.transpose(0, 1)[None] for each in parts)
    attended = attend(query, key, value, layer.scaling, layer.window, turn)
    x_ND = x_ND + F.linear(attended[0].flatten(1), layer.out, layer.out_bias)
    gate, up = F.linear(_normed(x_ND, layer.second_norm, shape), layer.gate_up).chunk(2, -1)
    return x_ND, F.linear(F.silu(gate) * up, layer.down)


def _normed(x_ND: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """Return the norm of a sum in the dtype of the weights.

    Sums are kept in float32: in bf16 each layer would round what all before it made.
    """
    return F.rms_norm(x_ND, x_ND.shape[1:], weight.float(), shape.epsilon).to(weight.dtype)


def _entered(embedded_ND: Tensor, hidden_ND: Tensor, weights: tuple[Tensor, ...], shape: Shape) -> Tensor:
    """Return what the layer of a head begins with."""
    embedded_norm, hidden_norm, join = weights
    both = _normed(embedded_ND, embedded_norm, shape), _normed(hidden_ND, hidden_norm, shape)
    return F.linear(torch.cat(both, -1), join).float()


class Lean:
    """A whole decoder, and heads if there are any."""

    def __init__(
        self, model: Any, heads: Any | None, shapes: Sequence[LayerShape], positions: int, *, compiled: bool
    ) -> None:
        decoder = model.get_decoder()
        config, width = decoder.config, decoder.layers[0].self_attn.head_dim
        self.shape = Shape(config.num_attention_heads, config.num_key_value_heads, width, config.rms_norm_eps)
        if (head := getattr(model, "lm_head", None)) is not None and model.get_output_embeddings() is head:
            _joined(model, ("lm_head",), "weight")
        self.embed, self.norm = model.get_input_embeddings().weight, decoder.norm.weight
        self.layers = [_layer(layer, seen) for layer, seen in zip(decoder.layers, shapes, strict=False)]
        self.heads = heads
        self.head_layers = [_layer(each.mtp_block, shapes[-1]) for each in heads.layers] if heads else []
        places = torch.arange(positions, device=self.embed.device)[None]
        self.cosine, self.sine = (each[0] for each in decoder.rotary_emb(self.embed[:1], places))
        compiler = torch.compile if compiled else lambda function: function
        self._run, self._enter, self._leave = compiler(run_layer), compiler(_entered), compiler(_left)

    def trunk(self, tokens_N: Tensor, position_N: Tensor) -> Tensor:
        """Return the hidden states after the last norm."""
        embedded, cosine, sine = F.embedding(tokens_N, self.embed), self.cosine[position_N], self.sine[position_N]
        x, more = embedded.float(), torch.zeros_like(embedded)
        _of_any_length(x, more, cosine, sine)
        for layer in self.layers:
            x, more = self._run(x, more, cosine, sine, layer, self.shape)
        return self._leave(x, more, self.norm, self.shape)

    def draft(self, depth: int, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor) -> Tensor:
        """Return the hidden states of a head; as MtpHeads.step."""
        assert self.heads is not None
        number = 0 if self.heads.shared else depth
        embedded, cosine, sine = F.embedding(next_N, self.embed), self.cosine[position_N], self.sine[position_N]
        _of_any_length(embedded, hidden_ND, cosine, sine)
        own = self.heads.layers[number]
        entry = (own.enorm.weight, own.hnorm.weight, own.eh_proj.weight)
        x, more = self._enter(embedded, hidden_ND, entry, self.shape), torch.zeros_like(embedded)
        _of_any_length(x, more)
        x, more = self._run(x, more, cosine, sine, self.head_layers[number], self.shape)
        return self._leave(x, more, own.post_norm.weight, self.shape)


def _left(x_ND: Tensor, more_ND: Tensor, norm: Tensor, shape: Shape) -> Tensor:
    """Return what comes out at the end."""
    return _normed(x_ND + more_ND, norm, shape)


def _of_any_length(*values: Tensor) -> None:
    """Tell the compiler that the number of tokens will change, and nothing else: so it knows widths, and makes faster code."""
    for each in values:
        torch._dynamo.maybe_mark_dynamic(each, 0)  # noqa: SLF001 - there is no other name for it


def fits(model: Any) -> bool:
    """Return whether a model is the usual decoder, as far as its parts tell."""
    decoder = model.get_decoder()
    config, layers = decoder.config, getattr(decoder, "layers", None)
    given = getattr(config, "rope_parameters", None) or {}
    rope = given.get("rope_type", "default") if given.get("partial_rotary_factor", 1.0) == 1.0 else "of a part"
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
    attention, feed, inner = layer.self_attn, layer.mlp, ("q_proj", "k_proj", "v_proj")
    query_norm, key_norm = (getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm"))
    return Layer(
        layer.input_layernorm.weight, _joined(attention, inner, "weight"), _joined(attention, inner, "bias"),
        query_norm, key_norm, _joined(attention, ("o_proj",), "weight"), attention.o_proj.bias, layer.post_attention_layernorm.weight,
        _joined(feed, ("gate_proj", "up_proj"), "weight"), _joined(feed, ("down_proj",), "weight"), seen.scaling, seen.window,
    )  # fmt: skip


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
