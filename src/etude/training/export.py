"""Save what was trained as a Hugging Face folder, MTP heads in a file of their own beside the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from etude.files import read_json, write_json
from etude.models.mtp import HEADS, save_heads
from etude.training.checkpoint import full_disk_told

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def export(model: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path, *, trunk: bool) -> None:
    """Save a model with the weights of `state`; without its `trunk`, only its heads."""
    weights = dict(model.named_parameters(remove_duplicate=False))  # a tied one is saved once
    state |= {name: value.cpu() for name, value in model.state_dict().items() if name not in weights}
    heads = {name.removeprefix(HEADS): state.pop(name) for name in list(state) if name.startswith(HEADS)}
    with full_disk_told(folder):
        if trunk:
            _save_trunk(model, state, dtype, folder)
        if heads:
            save_heads(folder, heads, depth=model.mtp.depth, shared=model.mtp.shared)


def _save_trunk(model: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> None:
    # transformers refuses to save a generation config with idle settings, though it has loaded it from the base.
    generation, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(folder, state_dict=state)
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    model.generation_config = generation
    config = folder / "config.json"  # transformers writes the dtype that the model computes in
    write_json(config, {**read_json(config), "dtype": str(dtype).removeprefix("torch.")})
