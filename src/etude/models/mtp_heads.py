"""Multi-token prediction (MTP) heads on any base: the module, its file beside the weights, and its export to other programs.

After DeepSeek-V3. At position t and depth i = 1 … k,

    hⁱ_t = norm(block([enorm(embed(x_{t+i})); hnorm(hⁱ⁻¹_t)] · Pᵀ)),    h⁰ = the model's last hidden state, after its norm

and the model's own output head makes of hⁱ_t a draft of x_{t+i+1}. The block is a decoder layer of the base's own class, causal
over the positions of its own depth, at the positions of the trunk. One layer may serve all depths (`shared`), or each has its own.
Names are those of transformers' `MtpModel`, so that an export is a renaming. Exports:

`transformers`  the whole model with its heads as further layers, for `generate(use_mtp=True)`: for families whose config knows MTP
                layers (DeepSeek-V3's shape and its descendants). A layer that serves all depths is written once for each.
`mimo`          a folder with the heads alone, which vLLM drafts with beside the model itself: MiMo's layer is ours, and no other
                there goes with Llama-shaped models (EAGLE's has no norms). vLLM takes one layer for all depths, so of a layer
                each only the first is written. It looks for the number of heads in the model's config, hence the override.

Shapes: B rows, T positions, D width.
"""

from __future__ import annotations

import json
import re
import shutil
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

from etude.errors import UserError, one_line
from etude.files import whole_file, write_json
from etude.lineage.licences import LICENSES
from etude.lineage.weight_files import INDEX, SINGLE, read_header
from etude.models.load import load_model, saved_dtype
from etude.models.shape import HEADS_FILE, HEADS_METADATA, heads_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

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
            family = type(model).__name__
            raise UserError(f"{family} cannot have MTP heads: unusual layers ({one_line(error)})") from None
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
        rotary: nn.Module,
        **attention: Any,
    ) -> torch.Tensor:
        """Go one depth further: from h of the depth before (0: the trunk's) and the token x_{t+depth} to h of this one, [B, T, D].

        `attention` goes on to the block as it is (mask, cache, bounds of pieces). The block attends as layer
        `first_layer + depth_index` of the model, so that each depth has keys and values of its own even where one layer serves all.
        """
        layer = self.layer(depth_index)
        layer.mtp_block.self_attn.layer_idx = self.first_layer + depth_index
        both = torch.cat([layer.enorm(embed(next_tokens_BT)), layer.hnorm(hidden_BTD)], -1)
        kind = ["full_attention"] if "layer_type" in signature(rotary.forward).parameters else []  # Gemma 3's
        attention |= {"position_embeddings": rotary(hidden_BTD, positions_BT, *kind), "position_ids": positions_BT}
        return layer.post_norm(layer.mtp_block(layer.eh_proj(both), **attention))


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
    metadata = {
        HEADS_METADATA: json.dumps({"depth": depth, "shared": shared})
    }  # one entry: several would be in any order
    with whole_file(folder / HEADS_FILE) as beside:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, metadata)
        beside.chmod(0o644)  # safetensors makes it private, unlike every other file


def keep_apart(folder: Path) -> None:
    """Give a folder with heads an index of its weights: servers such as vLLM take every safetensors file for weights otherwise."""
    if (folder / HEADS_FILE).exists() and not (folder / INDEX).exists():
        names, size = sorted(read_header(folder / SINGLE).tensors), (folder / SINGLE).stat().st_size
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, SINGLE)})


def load_heads(folder: Path, model: Any) -> MtpHeads | None:
    """Return the heads in a model's folder for the loaded model, on its device and in its dtype; None if it has none."""
    shape = heads_shape(folder)
    if shape is None:
        return None
    heads = MtpHeads.for_model(model, depth=shape[0], shared=shape[1])
    try:
        heads.load_state_dict(load_file(folder / HEADS_FILE))
    except RuntimeError as error:
        raise UserError(f"{folder / HEADS_FILE} does not fit the model beside it: {one_line(error)}") from None
    return heads


Layout = Literal["transformers", "mimo"]
FAMILIES = ("llama", "qwen2")  # whose layer is MiMo's, which has biases for queries, keys and values
MIMO_NAMES = {
    "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "post_norm": "final_layernorm",
}  # fmt: skip
PLACE = "model.mtp_layers.0"
NOT_COPIED = {HEADS_FILE, "config.json", "lineage.json", "record.json"}


def export_heads(source: Path, target: Path, layout: Layout) -> str:
    """Write the heads of the model in `source` into the new folder `target`; return how they are used there."""
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty; give a new folder")
    model = load_model(source, torch.device("cpu"), saved_dtype(source))
    heads = load_heads(source, model)
    if heads is None:
        raise UserError(f"{source} has no MTP heads ({HEADS_FILE}); train some with an `mtp` stage")
    target.mkdir(parents=True, exist_ok=True)
    use = _as_layers(model, heads, target) if layout == "transformers" else _as_draft(model, heads, source, target)
    for file in source.iterdir():  # tokeniser, own licence; what is written above is the target's own
        if file.is_file() and file.name not in NOT_COPIED and ".safetensors" not in file.name:
            shutil.copyfile(file, target / file.name)
    if (source / LICENSES).is_dir():
        shutil.copytree(source / LICENSES, target / LICENSES)
    return use


def _as_layers(model: Any, heads: MtpHeads, target: Path) -> str:
    config, family = model.config.get_text_config(), type(model).__name__
    if not hasattr(config, "num_mtp_layers"):
        raise UserError(
            f"transformers has no MTP for {family}; use the layout mimo, or the model's own folder in Etude"
        )
    state = model.state_dict()
    for depth in range(heads.depth):
        for name, weight in heads.layer(depth).state_dict().items():
            place = re.sub("^post_norm", "shared_head.norm", name).replace("mtp_block.", "")
            state[f"model.layers.{heads.first_layer + depth}.{place}"] = weight.clone()  # none may share its memory
    config.num_mtp_layers = heads.depth
    model.generation_config = GenerationConfig()  # the source's own is copied; an old one may not be written anew
    model.save_pretrained(target, state_dict=state)
    numbers = "|".join(str(heads.first_layer + depth) for depth in range(heads.depth))
    return (
        "transformers: model.generate(…, use_mtp=True). It knows MTP layers by the numbers of published models; tell it ours first:"
        rf" model._keys_to_ignore_on_load_unexpected = [r'model\.layers\.({numbers})\.']"
    )


def _as_draft(model: Any, heads: MtpHeads, source: Path, target: Path) -> str:
    config = model.config
    odd = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if config.model_type not in FAMILIES or odd or config.hidden_act != "silu":
        what = f"a {config.model_type} with {odd[0]}" if odd else f"a {config.model_type}"
        raise UserError(f"{source} is {what}; the layout mimo holds layers of {' or '.join(FAMILIES)} shape only")
    if getattr(config, "head_dim", None) not in {None, config.hidden_size // config.num_attention_heads}:
        raise UserError(f"{source}: its heads are {config.head_dim} wide; MiMo's are hidden_size / num_attention_heads")
    tensors = {"model.embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    for name, weight in heads.layer(0).state_dict().items():
        part, _, rest = name.partition(".")
        place = f"{PLACE}.{MIMO_NAMES[part]}.{rest}" if part in MIMO_NAMES else f"{PLACE}.{rest}"
        tensors[place] = weight
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = f"{place.removesuffix('weight')}bias"
            tensors.setdefault(bias, torch.zeros(len(weight), dtype=weight.dtype))  # Llama has none
    embedded, hidden = tensors[f"{PLACE}.input_proj.weight"].chunk(2, 1)
    tensors[f"{PLACE}.input_proj.weight"] = torch.cat([hidden, embedded], 1)  # MiMo has them the other way round
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / SINGLE, {"format": "pt"})
    said = {**config.to_dict(), "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "layer_types": None, "use_sliding_window": False}  # fmt: skip
    write_json(target / "config.json", said)
    draft = f'{{"method": "mtp", "model": "{target}", "num_speculative_tokens": {heads.depth}}}'
    layers = '{"num_nextn_predict_layers": 1}'
    return f"vLLM: vllm serve {source} --hf-overrides '{layers}' --speculative-config '{draft}'"
