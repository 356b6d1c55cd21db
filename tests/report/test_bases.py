from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from matplotlib import image
from rich.console import Console

from etude.bench.base_comparison import BitsResult, CandidateResult, FileBits, StateResult
from etude.data.codebase import Codebase, SourceFile
from etude.report import bases
from etude.report.bases import draw

CODE = Codebase(Path("src"), (SourceFile("a.py", "x\n"), SourceFile("b.py", "y\n")), {"not source code": 3})
SPEED = {"prefill": 1000.0, "decode_single": 20.0, "decode_batch": 80.5, "batch": 8, "prompt": 256, "weight_bytes": 5, "peak_bytes": 10**9, "peak_of": "process"}  # fmt: skip


def candidate(
    name: str, bits: float, *, state: float | None = 0.5, lossy: int = 0, wobble: float = 0.0
) -> CandidateResult:
    files = [FileBits("a.py", 100, 100 * (bits + wobble)), FileBits("b.py", 100, 100 * (bits - wobble))]
    return CandidateResult(
        name=name, family="llama", parameters=135_000_000, active_parameters=135_000_000, context=8192, licence="MIT",
        duties=["ship the licence text"],
        bits=BitsResult(bits, (bits - 0.1, bits + 0.1), 200, 60, 2, lossy, files),
        state=StateResult(8, 2, 60.0, state, (0.4, 0.6), 0.05, 0) if state is not None else None,
        speed=SPEED,
    )  # fmt: skip


def test_the_best_comes_first_and_fits_eighty_characters() -> None:
    screen = io.StringIO()
    Console(file=screen, width=80).print(bases.table([candidate("worse", 0.9), candidate("better", 0.8)]))
    lines = screen.getvalue().splitlines()
    heading = next(line for line in lines if "better" in line)
    assert heading.index("better") < heading.index("worse")
    assert "0.800 [0.70–0.90]" in screen.getvalue()
    assert max(map(len, lines)) <= 80


def test_a_sure_lead_and_a_lead_within_the_noise_are_called_so() -> None:
    assert (
        "better predicts this code best: 0.800 bits per byte; next is worse, 0.100 [0.100, 0.100] behind"
        in bases.verdict([candidate("worse", 0.9), candidate("better", 0.8)])
    )
    assert "better is ahead, but within the noise" in bases.verdict(
        [candidate("worse", 0.81, wobble=0.2), candidate("better", 0.8)]
    )
    assert bases.verdict([candidate("only", 0.8)]) == "only: 0.800 bits per byte."


def test_markdown_says_what_was_measured_and_warns() -> None:
    page = bases.markdown([candidate("good", 0.8), candidate("lossy", 0.9, lossy=2)], CODE, total_files=7)
    assert "| bits/byte ↓ | 0.800 [0.70–0.90] | 0.900 [0.80–1.00] |" in page
    assert "200 bytes in 2 of 7 files of src" in page
    assert "copying the unchanged file scores 0.050, and no candidate does better than that" in page
    assert "lossy: its tokeniser does not give back 2 of 2 files exactly" in page
    assert "and no candidate" not in bases.markdown([candidate("sharp", 0.8, state=0.01)], CODE, 7)


@pytest.mark.parametrize("state", [0.5, None])
def test_the_picture_is_a_picture_with_all_bars(tmp_path: Path, state: float | None) -> None:
    draw([candidate(f"base-{n}", 0.8 + n / 10, state=state) for n in range(3)], tmp_path / "out.png")
    pixels = image.imread(tmp_path / "out.png")
    blue = (abs(pixels[:, :, :3] - [0x3B / 255, 0x6E / 255, 0xA8 / 255]).max(axis=2) < 0.02).any(axis=1)
    bars = sum(1 for above, here in itertools.pairwise(blue) if here and not above)
    assert bars == 3
