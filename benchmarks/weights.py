"""Weights on the move: bytes and seconds of a delta against whole copies, for a state like SmolLM2-135M's and one like sprout's.

    python benchmarks/weights.py

Updates are like Adam's at a learning rate of 2e-6 (a step of about that size for every weight, made in float32 and rounded), the
weights normal with the spread of trained ones. Publishing includes the flush to the disk; a follower fetches each version as
it comes, one that joins late the newest from its anchor on; “whole” is what both take without deltas. Medians over versions.
The first row's weights are published from the GPU if there is one.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from etude.inference.weight_sync import Held, WeightStore
from etude.models.load import load_model
from report import finish

VERSIONS, ANCHOR_EVERY, LEARNING_RATE = 9, 4, 2e-6
SPROUT = Path(__file__).parents[1] / "src/etude/models/sprout"


def smollm2_shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of SmolLM2-135M: 30 layers of width 576, embeddings tied."""
    layer: dict[str, tuple[int, ...]] = {
        "q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576), "gate": (1536, 576), "up": (1536, 576),
        "down": (576, 1536), "before": (576,), "after": (576,),
    }  # fmt: skip
    layers = {f"layers.{index}.{name}": shape for index in range(30) for name, shape in layer.items()}
    return {"embed": (49152, 576), **layers, "norm": (576,)}


def sprout_shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the shipped base."""
    return {name: tuple(each.shape) for name, each in load_model(SPROUT, torch.device("cpu")).named_parameters()}


def seconds_of(work: Any) -> tuple[float, Any]:
    """Return how long something takes, and what it returns."""
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found


def row(model: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Publish and follow some versions."""
    torch.manual_seed(0)
    master = {name: torch.randn(shape, device=device) * 0.04 for name, shape in shapes.items()}
    published, pulls = [], []
    held: Held | None = None
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as other:
        store, only_whole = WeightStore(Path(scratch), ANCHOR_EVERY), Path(other)
        for version in range(VERSIONS):
            for each in master.values():
                each.sub_(torch.randn_like(each).clamp_(-2, 2), alpha=LEARNING_RATE)
            weights = {name: each.to(dtype) for name, each in master.items()}
            published.append(store.publish(weights, version, version))
            took, held = seconds_of(lambda version=version, held=held: store.pull(version, held))
            pulls.append(took)
        late, joined = seconds_of(lambda: WeightStore(Path(scratch), ANCHOR_EVERY).pull(VERSIONS - 2))
        assert held
        assert joined.version == VERSIONS - 2
        whole = WeightStore(only_whole, 1).publish(weights, 0, 0)  # a store's first version is an anchor alone
        whole_pull, found = seconds_of(lambda: WeightStore(only_whole, 1).pull(0))
        assert all(torch.equal(found.tensors[name], each.cpu()) for name, each in weights.items())
        assert all(torch.equal(held.tensors[name], each.cpu()) for name, each in weights.items())
    deltas = [each for each in published if each.kind == "delta" and not each.anchored]
    size = median(each.bytes for each in deltas)
    return {
        "model": model, "dtype": str(dtype).removeprefix("torch."), "device": device.type, "whole MB": round(whole.bytes / 1e6, 1),
        "delta MB": round(size / 1e6, 2), "times smaller": round(whole.bytes / size, 1),
        "publish s": round(median(each.seconds for each in deltas), 3), "publish whole s": round(whole.seconds, 3),
        "follow s": round(median(pulls[1:]), 3), "fetch whole s": round(whole_pull, 3), "join late s": round(late, 3),
    }  # fmt: skip


def main() -> None:
    """Measure and report."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [
        row("135M", smollm2_shapes(), torch.bfloat16, device),
        row("sprout", sprout_shapes(), torch.float32, torch.device("cpu")),
    ]
    finish("weights", rows, "h200" if device.type == "cuda" else "cpu")


if __name__ == "__main__":
    main()
