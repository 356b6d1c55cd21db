"""MTP heads as other programs load them.

`transformers`  the whole model with its heads as further layers, for `generate(use_mtp=True)`: for families whose config knows MTP
                layers (DeepSeek-V3's shape and its descendants). A layer that serves all depths is written once for each.
`mimo`          a folder with the heads alone, which vLLM drafts with beside the model itself: MiMo's layer is ours, and no other
                there goes with Llama-shaped models (EAGLE's has no norms). vLLM takes one layer for all depths, so of a layer
                each only the first is written. It looks for the number of heads in the model's config, hence the override.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from etude.errors import UserError
from etude.files import write_json
from etude.lineage.licences import LICENSES
from etude.models.load import load_model, saved_dtype
from etude.models.mtp import FILE, load_heads

if TYPE_CHECKING:
    from pathlib import Path

    from etude.models.mtp import MtpHeads

Layout = Literal["transformers", "mimo"]
FAMILIES = ("llama", "qwen2")  # whose layer is MiMo's, which has biases for queries, keys and values
NOT_COPIED = {FILE, "config.json", "lineage.json", "record.json"}


def export_heads(source: Path, target: Path, layout: Layout) -> str:
    """Write the heads of the model in `source` into the new folder `target`; return how they are used there."""
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty; give a new folder")
    model = load_model(source, torch.device("cpu"), saved_dtype(source))
    heads = load_heads(source, model)
    if heads is None:
        raise UserError(f"{source} has no MTP heads ({FILE}); train some with an `mtp` stage")
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
            f"transformers has no MTP for {family}; use the layout mimo, or this model's folder in Etude itself"
        )
    state = model.state_dict()
    for depth in range(heads.depth):
        for name, weight in heads.layer(depth).state_dict().items():
            place = name.replace("mtp_block.", "").replace(
                "post_norm.", "shared_head.norm.", name.startswith("post_norm.")
            )
            state[f"model.layers.{heads.first_layer + depth}.{place}"] = weight.clone()  # none may share its memory
    config.num_mtp_layers = heads.depth
    model.generation_config = GenerationConfig()  # the source's own is copied; an old one may not be written anew
    model.save_pretrained(target, state_dict=state)
    last = heads.first_layer + heads.depth - 1
    numbers = "|".join(str(number) for number in range(heads.first_layer, last + 1))
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
    renamed = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "post_norm": "final_layernorm",
    }
    tensors = {"model.embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    for name, weight in heads.layer(0).state_dict().items():
        part, _, rest = name.partition(".")
        tensors[f"model.mtp_layers.0.{renamed[part]}.{rest}" if part in renamed else f"model.mtp_layers.0.{rest}"] = (
            weight
        )
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = f"model.mtp_layers.0.{rest.removesuffix('weight')}bias"
            tensors.setdefault(bias, torch.zeros(len(weight), dtype=weight.dtype))  # Llama has none
    embedded, hidden = tensors["model.mtp_layers.0.input_proj.weight"].chunk(2, 1)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat(
        [hidden, embedded], 1
    )  # MiMo has them the other way round
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    said = {**config.to_dict(), "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "layer_types": None, "use_sliding_window": False}  # fmt: skip
    write_json(target / "config.json", said)
    draft = f'{{"method": "mtp", "model": "{target}", "num_speculative_tokens": {heads.depth}}}'
    layers = '{"num_nextn_predict_layers": 1}'
    return f"vLLM: vllm serve {source} --hf-overrides '{layers}' --speculative-config '{draft}'"
