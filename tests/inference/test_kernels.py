"""The kernels against attention worked out slowly: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.inference.attending import CASES, kernels_differ_by

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


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted: dict[str, float], name: str) -> None:
    assert interpreted[name] < 5e-5


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    assert kernels_differ_by(CASES[name], torch.device("cuda"), torch.float32) < 1e-4
    assert kernels_differ_by(CASES[name], torch.device("cuda"), torch.bfloat16) < 0.05
