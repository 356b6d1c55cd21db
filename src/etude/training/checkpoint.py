"""What training writes: checkpoints on the way, and the model at the end.

    CHECKPOINTS/00000400/tensors.safetensors    weights and optimiser state
    CHECKPOINTS/00000400/state.json             everything else, and the SHA-256 of the tensors

A checkpoint is the whole state, copied to main memory, then written by a thread under another name and renamed, so it is there whole
or not at all. The newest `keep` stay. One that turns out damaged is reported and passed over for the one before it.

The model is a Hugging Face folder, with MTP heads in a file of their own beside the weights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from etude.files import publish_folder, read_json, sha256_file, write_json
from etude.models.mtp_heads import HEADS, save_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch


TENSORS, STATE = "tensors.safetensors", "state.json"
UNFINISHED = ".part"


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], object]) -> None:
        self.folder, self._keep, self._say = folder, keep, say
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Copy a state and begin to write it; a write that is still under way is waited for first."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self._writing = self._writer.submit(self._write, step, copies, dict(state))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise what went wrong with it."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint and end the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        final = self.folder / f"{step:08d}"
        if final.exists() and not _damage(final):  # an interruption just after a save: the same state
            return
        work = self.folder / f"{step:08d}{UNFINISHED}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        with full_disk_reported(work / TENSORS):
            save_file(tensors, work / TENSORS)
        write_json(work / STATE, {"step": step, "sha256": sha256_file(work / TENSORS), **state})
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        publish_folder(work, final)
        steps = self._steps()  # one after this was damaged and passed over: it must not count as the newest
        for other in set(steps) - set([each for each in steps if each <= step][-self._keep :]):
            shutil.rmtree(self.folder / f"{other:08d}")

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.glob("[0-9]" * 8) if path.is_dir())

    def latest(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return the newest state that is whole, or None."""
        for left in self.folder.glob(f"*{UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)  # every rank comes here
        steps = self._steps()
        for step in reversed(steps):
            folder = self.folder / f"{step:08d}"
            if why := _damage(folder):
                self._say(f"the checkpoint of step {step} is damaged ({why}) and is passed over: {folder}")
                continue
            return load_file(folder / TENSORS), read_json(folder / STATE)
        if steps:
            self._say("no checkpoint is left that can be used: training starts anew")
        return None


@contextlib.contextmanager
def full_disk_reported(file: Path) -> Iterator[None]:
    """Report a full disk as any other writer would; safetensors has an error of its own for it."""
    try:
        yield
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from None


def _damage(folder: Path) -> str | None:
    try:
        expected = read_json(folder / STATE)["sha256"]
        return None if sha256_file(folder / TENSORS) == expected else f"{TENSORS} does not have the checksum in {STATE}"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{STATE} cannot be read"


def export(model: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path, *, trunk: bool) -> None:
    """Save a model with the weights of `state`; without its `trunk`, only its heads."""
    weights = dict(model.named_parameters(remove_duplicate=False))  # a tied one is saved once
    state |= {name: value.cpu() for name, value in model.state_dict().items() if name not in weights}
    heads = {name.removeprefix(HEADS): state.pop(name) for name in list(state) if name.startswith(HEADS)}
    with full_disk_reported(folder):
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
