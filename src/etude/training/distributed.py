"""One process, or several that train together.

`torchrun --nproc-per-node N -m etude run RECIPE` starts N of them. Rank 0 runs the recipe; the others wait to be told which
training to join (`run/stages/training.py`). Weights, gradients and optimiser state are then sharded by FSDP2.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

PATIENCE = datetime.timedelta(days=7)  # ranks wait while rank 0 builds a corpus


@dataclass(frozen=True)
class World:
    """Which of the processes that train together this one is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def sum(self, value: float) -> float:
        """Return the sum of a value over all ranks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device("auto"))
        dist.all_reduce(total)
        return float(total)

    def tell(self, message: Any) -> Any:
        """Return rank 0's message on every rank."""
        if self.size == 1:
            return message
        box = [message]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def device(self, wish: str) -> torch.device:
        """Return the device of this rank."""
        from etude.models.load import choose_device

        device = choose_device(wish)  # type: ignore[arg-type]
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device.type == "cuda" else device


def join() -> World:
    """Return the world torchrun made, or one process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if not dist.is_initialized():
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=PATIENCE)
    return World(dist.get_rank(), size)


def shard(
    root: torch.nn.Module, layers: Any, device: torch.device, kept: torch.dtype, dtype: torch.dtype, *, trained: bool
) -> None:
    """Spread rank 0's model over all ranks in place: shards in `kept`, frozen ones and computation in `dtype`, gradients in float32.

    Layer by layer, so that no device holds more than one whole; the other ranks need no weights of their own. What is outside the
    layers stays whole from the forward to the backward pass, if there will be one.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        _take_over(layer, device, kept, dtype)
        fully_shard(layer, mp_policy=policy)
    _take_over(root, device, kept, dtype)
    fully_shard(root, mp_policy=policy, reshard_after_forward=not trained)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _take_over(part: torch.nn.Module, device: torch.device, kept: torch.dtype, frozen: torch.dtype) -> None:
    """Give every rank the weights that rank 0 has of a part, one by one; those that are sharded already it has."""
    for own in [*part.parameters(), *part.buffers()]:
        if isinstance(own, DTensor):
            continue
        is_weight = isinstance(own, torch.nn.Parameter)
        dtype = (kept if own.requires_grad else frozen) if is_weight else own.dtype
        new = torch.empty(own.shape, dtype=dtype, device=device)
        if not own.is_meta:
            new.copy_(own)
        # Swapped, not replaced: a weight that is tied is one for all who hold it.
        torch.utils.swap_tensors(own, torch.nn.Parameter(new, requires_grad=own.requires_grad) if is_weight else new)
        dist.broadcast(own.detach(), 0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_as(part: torch.Tensor, weight: torch.Tensor | None, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Return the whole of which this rank has a part, sharded as a weight is, by rows; a single number is every rank's.

    `mesh`: where its parts are, if not where the weight's are.
    """
    if not isinstance(weight, DTensor) or isinstance(part, DTensor) or not part.ndim:
        return part
    shape = (*weight.shape[:-1], part.shape[-1]) if weight.ndim > 1 else weight.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh or weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )


@cache
def main_memory() -> DeviceMesh:
    """Return the ranks' main memories as a mesh, with a group of its own: a thread may use it while training goes on."""
    return DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=PATIENCE), "cpu")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every rank has whole, sharded as another one."""
    if not isinstance(pattern, DTensor):
        return value
    return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)
