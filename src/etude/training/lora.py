"""LoRA by peft: small matrices beside the large ones are trained, and added in when the model is handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.training.settings import LoraSettings


def add(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Give a model its small matrices, and return peft's wrapper; only they are trained from now on."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)  # one of each pair starts at random
    own = {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": settings.targets}
    config = LoraConfig(**own, lora_dropout=0.0, task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.targets {settings.targets!r} does not fit this model: {one_line(error)}") from None


def merged_state(adapters: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the state that a model would have with its small matrices added in, by the names it had without them.

    peft's way back subtracts, and rounds: so the large matrices are put back as they were.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapters.merge_adapter()
    large = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    merged = {name.replace(".base_layer.", "."): value.clone() for name, value in large.items()}
    adapters.unmerge_adapter()
    model.load_state_dict(before)
    return merged
