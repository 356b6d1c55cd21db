"""LoRA by peft: small matrices beside the large ones are trained, and added in when the model is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.training.settings import LoraSettings


def add(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Give a model its small matrices, and return peft's hold on it; only they are trained from now on."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)  # one of each pair starts at random
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=settings.targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.targets {settings.targets!r} does not fit this model: {one_line(error)}") from None


def merge(held: Any) -> Any:
    """Add the small matrices into the large ones, and return the model as it was built."""
    return held.merge_and_unload()
