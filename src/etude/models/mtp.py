"""Heads that predict several tokens ahead (multi-token prediction), on any base: the module, and its file beside the weights.

After DeepSeek-V3. At position t and depth i = 1 … k,

    hⁱ_t = norm(block([enorm(embed(x_{t+i})); hnorm(hⁱ⁻¹_t)] · Pᵀ)),    h⁰ = the model's last hidden state, after its norm

and the model's own output head makes of hⁱ_t a guess at x_{t+i+1}. The block is a decoder layer of the base's own class, causal
over the positions of its own depth, at the positions of the trunk. One layer may serve all depths (`shared`), or each has its own.
Names are those of transformers' `MtpModel`, so that an export is a renaming.

Shapes: B rows, T positions, D width.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from etude.errors import UserError, one_line
from etude.files import whole_file, write_json
from etude.models.checkpoint import INDEX, SINGLE, check_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FILE = "mtp.safetensors"
SAID = "etude_mtp"  # the entry of its header that says what it holds
HEADS = "mtp."  # what the names of their weights begin with where they are trained, as `model.mtp`


class MtpLayer(nn.Module):  # type: ignore[misc]
    """One depth, or one for all of them."""

    def __init__(self, config: Any, block: type[nn.Module], norm: type[nn.Module], like_layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm = (norm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = block(config, like_layer)
        self.post_norm = norm(width, eps=config.rms_norm_eps)


class MtpHeads(nn.Module):  # type: ignore[misc]
    """`depth` steps ahead by one shared layer, or by a layer each."""

    def __init__(self, model: Any, *, depth: int, shared: bool) -> None:
        super().__init__()
        decoder = model.get_decoder()
        config = decoder.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        like = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
        made = (type(decoder.layers[like]), type(decoder.norm), like)
        self.depth, self.shared, self.first_layer = depth, shared, config.num_hidden_layers
        self.layers = nn.ModuleList(MtpLayer(config, *made) for _ in range(1 if shared else depth))

    @classmethod
    def for_model(cls, model: Any, *, depth: int, shared: bool = True) -> Self:
        """Return fresh heads for a model, on its device and in its dtype, or say why it can have none."""
        weight = model.get_input_embeddings().weight
        try:
            heads = cls(model, depth=depth, shared=shared)
            heads.apply(model._init_weights)  # noqa: SLF001 - each family knows how its layers begin
            heads.apply(_pass_on)
            heads.to(weight.device).eval()
            for each in heads.parameters():  # not the buffers: a router's bias stays in float32
                each.data = each.data.to(weight.dtype)
            _try_out(heads, model)
        except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise UserError(
                f"{type(model).__name__} cannot have MTP heads: its layers are not of the usual shape ({one_line(error)})"
            ) from None
        return heads

    def layer(self, depth_index: int) -> Any:
        """Return the layer that serves a depth, from 0."""
        return self.layers[0 if self.shared else depth_index]

    def step(
        self,
        depth_index: int,
        hidden_BTD: torch.Tensor,  # noqa: N803
        next_tokens_BT: torch.Tensor,  # noqa: N803
        positions_BT: torch.Tensor,  # noqa: N803
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rotary: Callable[..., Any],
        **attention: Any,
    ) -> torch.Tensor:
        """Go one depth further: from h of the depth before (0: the trunk's) and the token x_{t+depth} to h of this one, [B, T, D].

        `attention` goes on to the block as it is (mask, cache, bounds of pieces). The block attends as layer
        `first_layer + depth_index` of the model, so that each depth has keys and values of its own even where one layer serves all.
        """
        layer = self.layer(depth_index)
        layer.mtp_block.self_attn.layer_idx = self.first_layer + depth_index
        both = torch.cat([layer.enorm(embed(next_tokens_BT)), layer.hnorm(hidden_BTD)], -1)
        out = layer.mtp_block(
            layer.eh_proj(both),
            position_embeddings=rotary(hidden_BTD, positions_BT),
            position_ids=positions_BT,
            **attention,
        )
        return layer.post_norm(out)


def _pass_on(part: nn.Module) -> None:
    """Let a fresh layer pass h on to its block, embedding aside: on sprout, .22 are accepted after 61,000 tokens instead of .17."""
    if isinstance(part, MtpLayer):
        width = len(part.eh_proj.weight)
        part.eh_proj.weight.data[:, width:] += torch.eye(width)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _try_out(heads: MtpHeads, model: Any) -> None:
    """Take a step on four tokens with plain attention: what does not work should not be found out in training."""
    decoder, config = model.get_decoder(), model.get_decoder().config
    places = torch.arange(4, device=model.device)[None]
    hidden = model.get_input_embeddings()(places % config.vocab_size)
    used, config._attn_implementation = config._attn_implementation, "eager"  # noqa: SLF001 - there is no other way
    mask = torch.full((1, 1, 4, 4), float("-inf"), dtype=hidden.dtype, device=hidden.device).triu(1)
    try:
        parts = {"embed": model.get_input_embeddings(), "rotary": decoder.rotary_emb, "attention_mask": mask}
        assert heads.step(0, hidden, places % config.vocab_size, places, **parts).shape == hidden.shape
    finally:
        config._attn_implementation = used  # noqa: SLF001


def save_heads(folder: Path, tensors: Mapping[str, torch.Tensor], *, depth: int, shared: bool) -> None:
    """Write heads into a model's folder."""
    said = {SAID: json.dumps({"depth": depth, "shared": shared})}  # one entry: several would be written in any order
    with whole_file(folder / FILE) as beside:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, said)
        beside.chmod(0o644)  # safetensors makes it private, unlike every other file


def keep_apart(folder: Path) -> None:
    """Give a folder with heads an index of its weights: servers such as vLLM take every safetensors file for weights otherwise."""
    if (folder / FILE).exists() and not (folder / INDEX).exists():
        with safe_open(folder / SINGLE, framework="pt") as tensors:
            names = sorted(tensors.keys())
        size = (folder / SINGLE).stat().st_size
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, SINGLE)})


def heads_shape(folder: Path) -> tuple[int, bool] | None:
    """Return (depth, shared) of the heads in a model's folder, or None if it has none."""
    file = folder / FILE
    if not file.is_file():
        return None
    check_safetensors(file)
    with safe_open(file, framework="pt") as tensors:
        said = tensors.metadata() or {}
    try:
        shape = json.loads(said[SAID])
        return int(shape["depth"]), bool(shape["shared"])
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{file} does not say what it holds; train the heads again, or remove it") from None


def load_heads(folder: Path, model: Any) -> MtpHeads | None:
    """Return the heads in a model's folder for the loaded model, on its device and in its dtype; None if it has none."""
    found = heads_shape(folder)
    if found is None:
        return None
    heads = MtpHeads.for_model(model, depth=found[0], shared=found[1])
    with safe_open(folder / FILE, framework="pt") as tensors:
        state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    try:
        heads.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{folder / FILE} does not fit the model beside it: {one_line(error)}") from None
    return heads
