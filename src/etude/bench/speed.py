"""How fast a model reads and writes on this machine, and how much memory it takes.

Plain transformers with a key-value cache, so that every family is measured the same way. Median of several repeats
after one that warms up. Memory is the highest the process (CPU) or the allocator (GPU) reached while measuring.
"""

from __future__ import annotations

import contextlib
import re
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 3
ROUNDS = 3 * (REPEATS + 1)  # calls of `on_round`: three measurements, each with a round to warm up


@dataclass(frozen=True)
class SpeedResult:
    """Tokens a second and bytes."""

    prefill: float
    decode_single: float
    decode_batch: float
    batch: int
    prompt: int  # tokens
    weight_bytes: int
    peak_bytes: int
    peak_of: str  # whose peak it is: the process's, or the GPU allocator's


@torch.inference_mode()  # type: ignore[untyped-decorator]
def measure_speed(model: Any, prompt: int, steps: int, batch: int, on_round: Callable[[], object]) -> SpeedResult:
    """Measure one model; `on_round` is called ROUNDS times, for a progress bar."""
    _reset_peak(model.device)
    prefill = prompt / _median(lambda: _prefill_seconds(model, prompt), on_round)
    single = steps / _median(lambda: _decode_seconds(model, prompt, steps, 1), on_round)
    several = batch * steps / _median(lambda: _decode_seconds(model, prompt, steps, batch), on_round)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return SpeedResult(prefill, single, several, batch, prompt, weights, *_peak(model.device))


def _prefill_seconds(model: Any, prompt: int) -> float:
    ids = _ids(model, 1, prompt)
    begun = clock(model.device)
    model(ids, use_cache=False, logits_to_keep=1)
    return clock(model.device) - begun


def _decode_seconds(model: Any, prompt: int, steps: int, batch: int) -> float:
    """Return the time of `steps` greedy steps after a prompt that is already in the cache."""
    output = model(_ids(model, batch, prompt), use_cache=True, logits_to_keep=1)
    begun = clock(model.device)
    for _ in range(steps):
        following = output.logits[:, -1].argmax(-1, keepdim=True)
        output = model(following, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
    return clock(model.device) - begun


def _median(measurement: Callable[[], float], on_round: Callable[[], object]) -> float:
    samples = []
    for _ in range(REPEATS + 1):
        samples.append(measurement())
        on_round()
    return statistics.median(samples[1:])  # the first warms up


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """Return tokens to work on; which ones does not matter to a dense model, and spreads evenly over experts."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # where the kernel does not offer it, the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the high-water mark back to now


def _peak(device: torch.device) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "GPU allocator"
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii")) if status.exists() else None
    if match:
        return int(match[1]) * 1024, "process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process, since its start"
