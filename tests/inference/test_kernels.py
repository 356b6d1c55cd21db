"""The kernels against attention worked out slowly: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.inference.attending import CASES, WAYS, kernels_differ_by

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """How far off each case is in Triton's interpreter."""
    if GPU:
        pytest.skip("the kernels run on the GPU itself")
    command = [sys.executable, "-m", "tests.inference.attending"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted: dict[str, float], name: str, way: str) -> None:
    assert interpreted[f"{name}, {way}"] < 5e-5


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, way: str) -> None:
    assert kernels_differ_by(CASES[name], torch.device("cuda"), torch.float32, **WAYS[way]) < 1e-4
    assert kernels_differ_by(CASES[name], torch.device("cuda"), torch.bfloat16, **WAYS[way]) < 0.08
