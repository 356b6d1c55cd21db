"""The usual decoder with as few operations as it takes, on the weights of a transformers model.

Most open models are the same decoder: RMS norms, rotary positions, grouped attention, a gated feed-forward part. transformers' code
for it is made to be read and changed: sixty operations a layer, a Python call for each part. With few tokens at a time the host
spends more time on calls than the device on numbers. Here a layer takes twenty: queries, keys and values come from one matrix
product, gate and up from another, and the table of rotary positions is made once.

What families add to it is here too: sinks and biases (GPT-OSS), windows with positions of their own, norms on both sides and of
1 + weight (Gemma 3), experts with or without a shared one (Qwen3, Mixtral, GPT-OSS, DeepSeek), latent attention (DeepSeek). Of the
latter only the latent is cached: keys are never made, their matrix is applied to the queries instead, and that of the values to
what was attended to.

The joined matrices are the model's own weights, whose tensors become views into them: new weights copied into the model are here too.
Which models fit is seen by their parts, and whether they say the same is tried (model_runner.py). Others run on transformers' code.

Shapes: N tokens, D width of the model, H heads, K key/value heads, d width of a head, C width of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from etude.inference.attention import attend
from etude.training.experts import PLACE, rule_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from etude.inference.kv_cache import LayerShape
    from etude.training.experts import Rule

PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}  # the others depend on how long a text is
NORMS = {"input_layernorm", "post_attention_layernorm"}
MORE_NORMS = {
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
}  # Gemma's: the second norm of four comes after attention
ACTIVATIONS = {"silu", "gelu_pytorch_tanh"}
ROUTERS = ("gate", "router")
FEW = 512  # tokens up to which a GPU computes experts by our kernels, which read each weight once; more are grouped products


@dataclass(frozen=True)
class Shape:
    """What all layers have in common."""

    epsilon: float
    offset: float  # to add to the weights of norms
    activation: str


@dataclass(frozen=True)
class Grouped:
    """The usual attention."""

    heads: int
    kv_heads: int
    width: int
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    sinks: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    scaling: float
    window: int


@dataclass(frozen=True)
class Latent:
    """DeepSeek's attention, by its latents."""

    heads: int
    plain: int  # width of a query without a position
    rotary: int  # and with one
    rank: int
    query_down: Tensor | None
    query_norm: Any
    query: Tensor
    down: Tensor
    norm: Any
    up_HxC: Tensor  # keys, then values, of every head
    out: Tensor
    scaling: float
    interleaved: bool


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward part."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Experts:
    """Many of them, of which a router takes some for each token."""

    router: Any
    rule: Rule | None  # how the router makes weights of logits; None: only it knows
    experts: Any
    shared: Dense | None
    kernels: bool  # whether ours compute them


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    norm: Tensor
    attention: Grouped | Latent
    after_attention: Tensor | None
    second_norm: Tensor
    feed: Dense | Experts
    after_feed: Tensor | None
    table: int  # which of the tables of positions


def run_layer(
    x_ND: Tensor, more_ND: Tensor, cosine_Nd: Tensor, sine_Nd: Tensor, layer: Layer, shape: Shape, forced: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Add what the layer before has left to add, and return the sum, what this one has to add, and the experts it took.

    A compiler joins the sum to the norm. `forced`: experts to take.
    """
    x_ND = x_ND + more_ND
    normed = _normed(x_ND, layer.norm, shape)
    if isinstance(layer.attention, Latent):
        attended = _latent(normed, cosine_Nd, sine_Nd, layer.attention)
    else:
        attended = _grouped(normed, cosine_Nd, sine_Nd, layer.attention, shape)
    if layer.after_attention is not None:
        attended = _normed(attended, layer.after_attention, shape)
    x_ND = x_ND + attended
    normed, chosen = _normed(x_ND, layer.second_norm, shape), None
    if isinstance(layer.feed, Experts):
        more_ND, chosen = _experts(normed, layer.feed, shape, forced)
    else:
        more_ND = _dense(normed, layer.feed, shape)
    return x_ND, more_ND if layer.after_feed is None else _normed(more_ND, layer.after_feed, shape), chosen


def _grouped(x_ND: Tensor, cosine_Nd: Tensor, sine_Nd: Tensor, own: Grouped, shape: Shape) -> Tensor:
    qkv_NHd = F.linear(x_ND, own.qkv, own.qkv_bias).unflatten(1, (-1, own.width))
    both = own.heads + own.kv_heads
    turned = qkv_NHd[:, :both]
    if own.query_norm is not None and own.key_norm is not None:
        query, key = turned.split([own.heads, own.kv_heads], 1)
        turned = torch.cat([_head_normed(query, own.query_norm, shape), _head_normed(key, own.key_norm, shape)], 1)
    turn = (cosine_Nd, sine_Nd) if turned.is_cuda else None  # attention does it there
    if turn is None:
        turned = _turned(turned, cosine_Nd, sine_Nd)
    parts = (turned[:, : own.heads], turned[:, own.heads :], qkv_NHd[:, both:])
    query, key, value = (each.transpose(0, 1)[None] for each in parts)
    attended = attend(query, key, value, own.scaling, own.window, turn, own.sinks)
    return F.linear(attended[0].flatten(1), own.out, own.out_bias)


def _latent(x_ND: Tensor, cosine_Nd: Tensor, sine_Nd: Tensor, own: Latent) -> Tensor:
    """Attend to latents: q·(U c) is (Uᵀ q)·c, so U goes to the query, and the cache keeps c."""
    lowered = x_ND if own.query_down is None else own.query_norm(F.linear(x_ND, own.query_down))
    query_NHd = F.linear(lowered, own.query).unflatten(1, (own.heads, -1))
    plain, rotary = query_NHd.split([own.plain, own.rotary], 2)
    latent, key = F.linear(x_ND, own.down).split([own.rank, own.rotary], 1)
    turned = torch.cat([rotary, key[:, None]], 1)
    if own.interleaved:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
    turned = _turned(turned, cosine_Nd, sine_Nd)
    raised = torch.bmm(plain.transpose(0, 1), own.up_HxC[:, : own.plain])  # [H, N, C]
    query = torch.cat([raised, turned[:, :-1].transpose(0, 1)], -1)
    latent = own.norm(latent)
    kept = torch.cat([latent, turned[:, -1]], -1)[None]
    attended = attend(query[None], kept[None], kept[None, ..., : own.rank], own.scaling, 0)[0]  # [N, H, C]
    values = torch.bmm(attended.transpose(0, 1), own.up_HxC[:, own.plain :].mT)
    return F.linear(values.transpose(0, 1).flatten(1), own.out)


def _turned(given_NHd: Tensor, cosine_Nd: Tensor, sine_Nd: Tensor) -> Tensor:
    half = given_NHd.shape[2] // 2
    swapped = torch.cat([-given_NHd[..., half:], given_NHd[..., :half]], -1)
    return given_NHd * cosine_Nd[:, None] + swapped * sine_Nd[:, None]


def _dense(x_ND: Tensor, own: Dense, shape: Shape) -> Tensor:
    gate, up = F.linear(x_ND, own.gate_up).chunk(2, -1)
    gate = F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")
    return F.linear(gate * up, own.down)


def _experts(x_ND: Tensor, own: Experts, shape: Shape, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen, weights = _routes(x_ND, own, forced)
    if own.kernels and len(x_ND) <= FEW:
        from etude.inference.expert_kernels import few_tokens

        out = few_tokens(x_ND, chosen, weights, own.experts)
    else:
        out = own.experts(x_ND, chosen, weights)
    return out if own.shared is None else out + _dense(x_ND, own.shared, shape), chosen.to(torch.int16)


def _routes(x_ND: Tensor, own: Experts, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, in float32 as the trainer does: near ties fall the same way in both."""
    if own.rule is None or hasattr(own.router, PLACE):  # these compute in float32 by themselves
        _, weights, chosen = own.router(x_ND)
        return chosen, weights
    bias = getattr(own.router, "bias", None)
    scores = own.rule.scores(F.linear(x_ND.float(), own.router.weight.float(), None if bias is None else bias.float()))
    chosen = scores.topk(own.router.top_k).indices if forced is None else forced
    return chosen, own.rule.weights(scores, chosen)


def _normed(x_ND: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """Return the norm of a sum in the dtype of the weights.

    Sums are kept in float32: in bf16 each layer would round what all before it made.
    """
    own = weight.float() + shape.offset
    return F.rms_norm(x_ND.float(), x_ND.shape[1:], own, shape.epsilon).to(weight.dtype)


def _head_normed(x_NHd: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    if not shape.offset:
        return F.rms_norm(x_NHd, x_NHd.shape[2:], weight, shape.epsilon)
    own = weight.float() + shape.offset  # in bf16, 1 + weight would lose most of the weight
    return F.rms_norm(x_NHd.float(), x_NHd.shape[2:], own, shape.epsilon).to(weight.dtype)


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
        config = decoder.config
        offset = 1.0 if _adds_one(decoder.norm) else 0.0
        self.shape = Shape(config.rms_norm_eps, offset, activation(config))
        if (head := getattr(model, "lm_head", None)) is not None and model.get_output_embeddings() is head:
            _joined(model, ("lm_head",), "weight")
        embedding = model.get_input_embeddings()
        self.embed, self.norm = embedding.weight, decoder.norm.weight
        self.embed_scale = getattr(embedding, "embed_scale", None)  # Gemma's
        kinds = _kinds(decoder)
        own = [kinds.index(kind) for kind in config.layer_types] if len(kinds) > 1 else [0] * len(decoder.layers)
        self.layers = [_layer(*each) for each in zip(decoder.layers, shapes, own, strict=False)]
        self.heads = heads
        self.head_layers = [_layer(each.mtp_block, shapes[-1], 0) for each in heads.layers] if heads else []
        places = torch.arange(positions, device=self.embed.device)[None]
        self.tables = [_table(decoder, self.embed[:1], places, kind) for kind in kinds]
        self.chosen: Tensor | None = None  # experts of the last pass, [N, layers that have some, experts a token]
        self.forced: Tensor | None = None  # experts to take in the next pass, as `chosen`; to compare with another code
        compiler = torch.compile if compiled else lambda function: function
        self._run, self._enter, self._leave = compiler(run_layer), compiler(_entered), compiler(_left)

    def _embedded(self, tokens_N: Tensor) -> Tensor:
        embedded = F.embedding(tokens_N, self.embed)
        return embedded if self.embed_scale is None else embedded * self.embed_scale.to(embedded.dtype)

    def trunk(self, tokens_N: Tensor, position_N: Tensor) -> Tensor:
        """Return the hidden states after the last norm."""
        embedded = self._embedded(tokens_N)
        turns = [(cosine[position_N], sine[position_N]) for cosine, sine in self.tables]
        chosen: list[Tensor] = []
        x, more = embedded.float(), torch.zeros_like(embedded)
        _of_any_length(x, more, *(each for turn in turns for each in turn))
        for layer in self.layers:
            forced = (
                self.forced[:, len(chosen)] if self.forced is not None and isinstance(layer.feed, Experts) else None
            )
            run = self._run if forced is None else run_layer
            x, more, experts = run(x, more, *turns[layer.table], layer, self.shape, forced)
            chosen += [] if experts is None else [experts]
        self.chosen = torch.stack(chosen, 1) if chosen else None
        return self._leave(x, more, self.norm, self.shape)

    def draft(self, depth: int, hidden_ND: Tensor, next_N: Tensor, position_N: Tensor) -> Tensor:
        """Return the hidden states of a head; as MtpHeads.step."""
        assert self.heads is not None
        number = 0 if self.heads.shared else depth
        embedded, (cosine, sine) = self._embedded(next_N), (each[position_N] for each in self.tables[0])
        _of_any_length(embedded, hidden_ND, cosine, sine)
        own = self.heads.layers[number]
        entry = (own.enorm.weight, own.hnorm.weight, own.eh_proj.weight)
        x, more = self._enter(embedded, hidden_ND, entry, self.shape), torch.zeros_like(embedded)
        _of_any_length(x, more)
        x, more, _ = self._run(x, more, cosine, sine, self.head_layers[number], self.shape)
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
    if not layers or not hasattr(decoder, "norm") or not hasattr(decoder, "rotary_emb"):
        return False
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    latent = hasattr(layers[0].self_attn, "kv_a_proj_with_mqa")
    plain = all(rope.get("rope_type", "default") in PLAIN_ROPE for rope in each)
    plain = plain and (latent or all(rope.get("partial_rotary_factor", 1.0) == 1.0 for rope in each))
    return plain and activation(config) in ACTIVATIONS and all(_is_usual(layer) for layer in layers)


def activation(config: Any) -> str:
    """Return what the gate of a feed-forward part goes through, by its name."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


def latent_shapes(model: Any, shapes: list[LayerShape]) -> list[LayerShape]:
    """Return what layers keep of a position here: of latent attention, the latent and the key that has a position."""
    if not hasattr(model.get_decoder().layers[0].self_attn, "kv_a_proj_with_mqa"):
        return shapes
    config = model.get_decoder().config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return [replace(each, heads=1, key_width=width, value_width=config.kv_lora_rank, latent=True) for each in shapes]


def _children(part: Any, name: str) -> set[str]:
    return {each for each, _ in getattr(part, name).named_children()} if hasattr(part, name) else set()


def _is_usual(layer: Any) -> bool:
    parts = {name for name, _ in layer.named_children()}
    attention, feed = _children(layer, "self_attn"), _children(layer, "mlp") - {"act_fn"}
    latent = attention - {"q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj"}
    usual = attention - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not usual and latent != {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}:
        return False
    if not usual and layer.self_attn.o_proj.bias is not None:
        return False
    if parts not in (NORMS | {"self_attn", "mlp"}, NORMS | MORE_NORMS | {"self_attn", "mlp"}):
        return False
    if feed == {"gate_proj", "up_proj", "down_proj"}:
        return layer.mlp.down_proj.bias is None
    known = {"experts", "shared_experts", *ROUTERS}
    return "experts" in feed and feed <= known and getattr(layer.mlp.experts, "has_gate", False)


def _adds_one(norm: Any) -> bool:
    """Return whether a norm multiplies by 1 + its weight, as Gemma's do: it says other than its weight where that is nought."""
    weight = torch.zeros_like(norm.weight[:2])
    probe = type(norm)(2).to(weight.device, weight.dtype)
    with torch.no_grad():
        probe.weight.zero_()
        return bool(probe(torch.ones_like(weight)).any())


def _kinds(decoder: Any) -> list[str | None]:
    """Return the kinds of layers that have positions of their own; the usual decoder has one table for all."""
    if "layer_type" not in signature(decoder.rotary_emb.forward).parameters:
        return [None]
    return sorted(set(decoder.config.layer_types))


def _table(decoder: Any, like: Tensor, places: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    cosine, sine = decoder.rotary_emb(like, places, *([kind] if kind else []))
    config, attention = decoder.config, decoder.layers[0].self_attn
    width = getattr(config, "qk_rope_head_dim", 0) or attention.head_dim
    if 2 * cosine.shape[-1] == width:  # GPT-OSS's tables are for one half
        cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
    return cosine[0], sine[0]


def _layer(layer: Any, seen: LayerShape, table: int) -> Layer:
    attention, config = layer.self_attn, layer.self_attn.config
    own: Grouped | Latent
    if hasattr(attention, "kv_a_proj_with_mqa"):
        own = _latent_of(attention, seen.scaling)
    else:
        inner, width = ("q_proj", "k_proj", "v_proj"), attention.head_dim
        query_norm, key_norm = (
            getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")
        )
        own = Grouped(
            config.num_attention_heads, config.num_key_value_heads, width, _joined(attention, inner, "weight"),
            _joined(attention, inner, "bias"), query_norm, key_norm, getattr(attention, "sinks", None),
            _joined(attention, ("o_proj",), "weight"), attention.o_proj.bias, seen.scaling, seen.window,
        )  # fmt: skip
    four = hasattr(layer, "pre_feedforward_layernorm")
    second = layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm
    after = (layer.post_attention_layernorm.weight, layer.post_feedforward_layernorm.weight) if four else (None, None)
    return Layer(layer.input_layernorm.weight, own, after[0], second.weight, _feed(layer.mlp), after[1], table)


def _latent_of(attention: Any, scaling: float) -> Latent:
    down = getattr(attention, "q_a_proj", None)
    query = "q_proj" if down is None else "q_b_proj"
    up = _joined(attention, ("kv_b_proj",), "weight").view(attention.num_heads, -1, attention.kv_lora_rank)
    return Latent(
        attention.num_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank,
        None if down is None else _joined(attention, ("q_a_proj",), "weight"), getattr(attention, "q_a_layernorm", None),
        _joined(attention, (query,), "weight"), _joined(attention, ("kv_a_proj_with_mqa",), "weight"), attention.kv_a_layernorm,
        up, _joined(attention, ("o_proj",), "weight"), scaling, bool(getattr(attention.config, "rope_interleave", False)),
    )  # fmt: skip


def _feed(feed: Any) -> Dense | Experts:
    if not hasattr(feed, "experts"):
        return Dense(_joined(feed, ("gate_proj", "up_proj"), "weight"), _joined(feed, ("down_proj",), "weight"))
    router = next(getattr(feed, name) for name in ROUTERS if hasattr(feed, name))
    shared = getattr(feed, "shared_experts", None)
    kernels = False
    if feed.experts.down_proj.is_cuda:
        from etude.inference.expert_kernels import known

        kernels = known(feed.experts)
    return Experts(router, rule_of(router), feed.experts, None if shared is None else _feed(shared), kernels)  # type: ignore[arg-type]


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
