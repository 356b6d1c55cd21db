"""What training writes: checkpoints on the way, and the model at the end.

    CHECKPOINTS/00000400/__0_0.distcp, …    weights and optimiser state: of each rank its own shards (torch.distributed.checkpoint)
    CHECKPOINTS/00000400/.metadata          where the shards of each tensor are
    CHECKPOINTS/00000400/state.json         everything else, and the SHA-256 of the other files

Each rank copies its shards to main memory, then a thread writes and hashes them under another name; rank 0 renames the folder when all
have, so a checkpoint is there whole or not at all. No rank ever has more than its shards, and any number of ranks can go on from it.
The newest `keep` stay. One that turns out damaged is reported and passed over for the one before it.

The model is a Hugging Face folder, with MTP heads in a file of their own beside the weights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from transformers import GenerationConfig

from etude.errors import UserError
from etude.files import publish_folder, read_json, sha256_file, write_json
from etude.models.mtp_heads import HEADS, save_heads
from etude.training.distributed import World, local, main_memory, sharded_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


INDEX, STATE = ".metadata", "state.json"
UNFINISHED = ".part"
LARGEST_FILE = "5GB"  # of a model's weights
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs none of it


class Writer(dcp.FileSystemWriter):
    """Writes this rank's shards and their SHA-256; once all ranks have, rank 0 publishes the folder. What fails fails on all ranks."""

    def __init__(self, folder: Path, publish: Callable[[dict[str, str]], None]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # all is in main memory already
        self._folder, self._publish = folder, publish

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan  # rank 0 makes the folder, next

    def prepare_global_plan(self, plans: Any) -> Any:
        shutil.rmtree(self._folder, ignore_errors=True)  # what a kill left
        self._folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        with full_disk_reported(self._folder):
            written = super().write_data(plan, planner).wait()
        files = {each.storage_data.relative_path for each in written}
        digests = [WriteResult(MetadataIndex(name), 0, sha256_file(self._folder / name)) for name in sorted(files)]
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([*written, *digests])
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        every = [each for rank in results for each in rank]
        digests = {each.index.fqn: each.storage_data for each in every if isinstance(each.storage_data, str)}
        with full_disk_reported(self._folder):
            super().finish(metadata, [[each for each in every if not isinstance(each.storage_data, str)]])
            self._publish(digests | {INDEX: sha256_file(self._folder / INDEX)})


@dataclass
class Checkpoints:
    """The checkpoints of one training; every rank must take part in all of it.

    A tensor is named KIND/WEIGHT or KIND/WEIGHT:KEY, and is sharded as that weight is; if there is no such weight, rank 0's is kept.
    """

    folder: Path
    keep: int
    say: Callable[[str], object]
    weights: Mapping[str, torch.Tensor]
    world: World = field(default_factory=World)
    _written: int | None = None  # the step of the last one
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
    _writing: Future[None] | None = None

    def __post_init__(self) -> None:
        self._mesh = main_memory() if self.world.size > 1 else None
        self._among = {"process_group": self._mesh and self._mesh.get_group(), "no_dist": not self._mesh}

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Copy a state and begin to write it; a write that is still under way is waited for first. Tensors may be this rank's part."""
        self.wait()
        if step == self._written:  # an interruption just after a save: the same state
            return
        copies = {name: local(tensor).detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        shared = {name: sharded_as(part, self._weight(name), self._mesh) for name, part in copies.items()}
        self._writing = self._writer.submit(self._write, step, shared, dict(state))

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

    def _weight(self, name: str) -> torch.Tensor | None:
        return self.weights.get(name.partition("/")[2].partition(":")[0])

    def _write(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        final = self.folder / f"{step:08d}"
        work = final.with_name(f"{final.name}{UNFINISHED}")

        def publish(digests: dict[str, str]) -> None:
            write_json(work / STATE, {"step": step, "sha256": digests, **state})
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            publish_folder(work, final)
            steps = self._steps()  # one after this was damaged and passed over: it must not count as the newest
            for other in set(steps) - set([each for each in steps if each <= step][-self.keep :]):
                shutil.rmtree(self.folder / f"{other:08d}")

        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        with _failures_raised():
            dcp.save(tensors, storage_writer=Writer(work, publish), planner=planner, **self._among)
        self._written = step

    def _steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.glob("[0-9]" * 8) if path.is_dir())

    def latest(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return the newest state that is whole, of tensors this rank's part in main memory; or None."""
        if self.world.leads:
            for left in self.folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(left)
        steps = self.world.tell(self._steps())
        for step in reversed(steps):
            folder = self.folder / f"{step:08d}"
            if why := next(filter(None, self.world.gather(_damage(folder, self.world))), None):
                self.say(f"the checkpoint of step {step} is damaged ({why}) and is passed over: {folder}")
                continue
            self._written = step
            return self._load(folder), read_json(folder / STATE)
        if steps:
            self.say("no checkpoint is left that can be used: training starts anew")
        return None

    def _load(self, folder: Path) -> dict[str, torch.Tensor]:
        reader, held = dcp.FileSystemReader(folder), {}
        found = reader.read_metadata().state_dict_metadata
        shapes = {
            name.removeprefix("weights/"): what.size for name, what in found.items() if name.startswith("weights/")
        }
        ours = {name: weight.shape for name, weight in self.weights.items()}
        if other := min((name for name in shapes | ours if shapes.get(name) != ours.get(name)), default=None):
            raise UserError(f"{folder} is of another training: {other} is {_size(shapes.get(other))} there and"
                            f" {_size(ours.get(other))} here; remove {self.folder} to start anew")  # fmt: skip
        for name, what in found.items():
            weight, shape = self._weight(name), what.size
            if weight is not None and shape:
                shape = (*local(weight).shape[:-1], shape[-1]) if len(shape) > 1 else local(weight).shape
            held[name] = sharded_as(torch.empty(shape, dtype=what.properties.dtype), weight, self._mesh)
        with _failures_raised():
            dcp.load(held, storage_reader=reader, **self._among)
        return {name: local(value) for name, value in held.items()}


def _size(shape: torch.Size | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


@contextlib.contextmanager
def _failures_raised() -> Iterator[None]:
    """Raise what went wrong on the first rank where something did; torch's own error is no Exception, and lists all."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@contextlib.contextmanager
def full_disk_reported(place: Path) -> Iterator[None]:
    """Report a full disk as any other writer would; safetensors and torch have errors of their own for it."""
    try:
        yield
    except (SafetensorError, RuntimeError, OSError) as error:
        told = (error, error.__context__)  # torch's is raised while the system's is handled
        full = any(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in told)
        if not full and f"os error {errno.ENOSPC}" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place)) from None


def _damage(folder: Path, world: World) -> str | None:
    """Return what is wrong with a checkpoint, as far as this rank can tell: each hashes its share of the files."""
    try:
        digests = read_json(folder / STATE)["sha256"]
        if isinstance(digests, str):
            return "it is of an earlier version of Etude"
        wrong = [
            name for name in sorted(digests)[world.rank :: world.size] if sha256_file(folder / name) != digests[name]
        ]
        return f"{wrong[0]} does not have the checksum in {STATE}" if wrong else None
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
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
    model.save_pretrained(folder, state_dict=state, max_shard_size=LARGEST_FILE)
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    model.generation_config = generation
    config = folder / "config.json"  # transformers writes the dtype that the model computes in
    write_json(config, {**read_json(config), "dtype": str(dtype).removeprefix("torch.")})
