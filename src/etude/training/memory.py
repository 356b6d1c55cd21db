"""Memory: how much a training will take, before it starts, and how to take it only once.

Weights, gradients and the optimiser's state are counted exactly. What is kept of the forward pass for the backward pass is estimated
from the model's shape, in the computing dtype: for each position and layer about 10 vectors as wide as the model, 4 as wide as
its feed-forward part, queries, keys and values; with recomputation one vector a layer, and one layer whole. A trunk that only MTP
heads learn from keeps nothing, the heads a layer a depth. Then the logits, up to a chunk of them, some copies each (`COPIES`). On a
CPU the peaks of some shapes were measured: the estimates are within a fifth of them (tests/training/test_memory.py). From this
follows how many rows a device works on at once (`choose_micro`).

A CPU's memory is then kept between operations (`keep_freed_memory`): glibc would give every large block back to the system when it is
freed, and the kernel would clear the pages of the next. Steps of sprout became a third faster (docs/lab-notes.md); the peak stays
the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from etude.errors import UserError
from etude.training.cross_entropy import CHUNK

SHARE = 0.85  # of the memory that may be planned for
STREAMS, FEED_FORWARD = 10, 4
COPIES = {
    "cpu": 3.75,
    "cuda": 3.0,
    "distilled": 11.0,
}  # of logits in float32: one loss, one compiled; of MTP heads on a CPU


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    fixed: int  # whatever the rows
    row: int  # for each row at once
    available: int
    logits: int = 0  # for each row at once,
    most_logits: int = 0  # but not more than this in all

    def needed(self, rows: int) -> int:
        """Return what so many rows at once take."""
        return self.fixed + rows * self.row + min(rows * self.logits, self.most_logits)

    def rows(self) -> int:
        """Return how many rows fit at once."""
        room = self.available * SHARE - self.fixed
        return max(0, int(room // (self.row + self.logits)), int((room - self.most_logits) // self.row))


def estimate(model: Any, length: int, device: torch.device, *, recompute: bool, sharded_over: int = 1) -> Estimate:
    """Estimate what training a model takes on a device."""
    config = model.config.get_text_config()
    weights = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    half = device.type == "cuda"
    kept = 2 if half else 4  # bytes of a number kept for the backward pass
    fixed = weights * kept + trained * (16 + (kept if half else 0)) // sharded_over
    ffn = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = STREAMS * config.hidden_size + FEED_FORWARD * ffn
    heads = model.mtp.depth if hasattr(model, "mtp") else 0
    trunk = config.num_hidden_layers
    if heads and not any(weight.requires_grad for weight in model.get_decoder().parameters()):
        trunk = 1  # of which nothing is kept
    streams = trunk * config.hidden_size + layer if recompute else (trunk + heads) * layer
    row = length * kept * (streams + 4 * config.hidden_size)
    logit = round(4 * COPIES["distilled" if heads and not half else device.type])
    return Estimate(fixed, row, _available(device), length * config.vocab_size * logit, CHUNK * logit)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:  # what is free and what files take up only as long as nobody needs it
        return 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_micro(wish: int, rows: int, estimated: Estimate, *, recompute: bool) -> int:
    """Return how many rows to work on at once: as wished, or the largest divisor of a rank's rows that fits; refuse what will not."""
    fits, wish = estimated.rows(), min(wish, rows)
    other = "" if recompute else ", or recompute = true"
    there = f"{_gb(estimated.available * SHARE)} may be used, {SHARE:.0%} of what is free"
    if fits < 1:
        raise UserError(f"not even one row fits: about {_gb(estimated.needed(1))} are needed and {there};"
                        f" set a shorter `length`{other}, or take a smaller base or LoRA")  # fmt: skip
    if wish > fits:
        raise UserError(f"micro = {wish} rows will not fit: about {_gb(estimated.needed(wish))} are needed and"
                        f" {there}; set micro = {fits}{other}")  # fmt: skip
    return wish or max(size for size in range(1, rows + 1) if rows % size == 0 and size <= fits)


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt(3)


@cache
def keep_freed_memory() -> None:
    """Tell the C library, if it is one that can be told. It holds for the whole process."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
