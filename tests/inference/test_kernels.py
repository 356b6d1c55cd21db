"""The kernels against attention worked out slowly: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.inference import expert_cases
from tests.inference.attending import CASES, WAYS, kernels_differ_by
from tests.inference.expert_cases import experts_differ_by

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """How far off each case is in Triton's interpreter."""
    if GPU:
        pytest.skip("the kernels run on the GPU itself")
    off: dict[str, float] = {}
    for module in ("tests.inference.attending", "tests.inference.expert_cases"):
        command, env = [sys.executable, "-m", module], {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        off |= json.loads(done.stdout)
    return off


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


@pytest.mark.parametrize("name", expert_cases.CASES)
def test_experts_interpreted(interpreted: dict[str, float], name: str) -> None:
    assert interpreted[name] < 5e-6


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", expert_cases.CASES)
def test_experts_on_a_gpu(name: str) -> None:
    assert experts_differ_by(*expert_cases.CASES[name], torch.device("cuda"), torch.float32) < 1e-5
    assert experts_differ_by(*expert_cases.CASES[name], torch.device("cuda"), torch.bfloat16) < 0.02
