"""Load a model and its tokeniser from a Hugging Face folder, or say in one line why not.

Missing tensors are refused: transformers would fill them with random numbers and go on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.errors import UserError, one_line
from etude.models.checkpoint import weight_files

if TYPE_CHECKING:
    from pathlib import Path

DeviceWish = Literal["auto", "cpu", "cuda"]


def choose_device(wish: DeviceWish) -> torch.device:
    """Return the device to work on; `auto` takes a GPU where there is one."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but torch sees no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if wish != "cpu" and torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: bf16 on a GPU, float32 on a CPU, where bf16 is slower and less exact."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | None = None, config: Any = None) -> Any:
    """Return the model in evaluation mode; with another config than its own, if one is given."""
    weight_files(folder)
    _quiet()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or default_dtype(device),
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
            raise
        raise UserError(f"{folder} cannot be loaded: {one_line(error)}") from None
    lacking = sorted(info["missing_keys"]) + [str(entry[0]) for entry in info.get("mismatched_keys", [])]
    if lacking:
        raise UserError(f"{folder}: its weights lack {len(lacking)} tensors of its config, such as {lacking[0]}")
    return model.to(device).eval()


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the weights in a model's folder: that of its first tensor."""
    with safe_open(weight_files(folder)[0], framework="pt") as tensors:
        return tensors.get_tensor(next(iter(tensors.keys()))).dtype


def load_tokeniser(folder: Path) -> Any:
    """Return the tokeniser of a model's folder."""
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise UserError(
            f"{folder} has no tokeniser (tokenizer.json or tokenizer.model); copy the base's files next to the weights"
        )
    _quiet()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - as above
        raise UserError(f"{folder}: its tokeniser cannot be loaded: {one_line(error)}") from None


def _quiet() -> None:
    """Keep transformers' own bars and remarks out of our output; what matters we check and say ourselves."""
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
