"""RL on a cluster with one engine of ours and one real vLLM. VLLM_PYTHON names the Python of vLLM's environment; else it is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import etude
from etude.agent.trace import from_json
from etude.rl.exchange import Exchange, episode_file
from etude.rl.ledger import Finished, Ledger
from etude.rl.processes import LEDGER
from tests.cluster.conftest import ROOT

VLLM = Path(os.environ.get("VLLM_PYTHON", "python-of-vllm"))
SPROUT = Path(etude.__file__).parent / "models" / "sprout"
SCRIPT = """#!/bin/sh
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export PYTHONPATH={installed}:{source}
exec {python} "$@"
"""


def environment(folder: Path) -> Path:
    """Return a Python of vLLM in which the plug-in is as if installed."""
    about = folder / "installed" / "etude-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: etude\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\netude = etude.inference.vllm_plugin:register\n")
    script = folder / "python"
    script.write_text(SCRIPT.format(installed=about.parent, source=ROOT / "src", python=VLLM))
    script.chmod(0o755)
    return script


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.is_file(), reason="no vLLM: set VLLM_PYTHON to the Python of an environment that has it")
def test_one_of_ours_and_one_of_vllm_sample_for_two_ranks(cluster: Any, tmp_path: Path) -> None:
    """What either wrote is, token by token, as likely to the trainer as the engine said."""
    model = tmp_path / "model"  # in float32: in bf16 engine and trainer are hundredths apart
    AutoModelForCausalLM.from_pretrained(SPROUT, dtype=torch.float32).save_pretrained(model)
    AutoTokenizer.from_pretrained(SPROUT).save_pretrained(model)
    words = [f"vllm={environment(tmp_path)}", "steps=3", "groups=4", "length=512", 'mode="sync"']
    command = [sys.executable, "-m", "tests.cluster.toy", str(model), str(tmp_path / "run"), cluster.address, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    reports = [Exchange(tmp_path / "run/exchange").report(step) for step in (1, 2, 3)]
    assert all(each and each.metrics["mismatch_p99"] < 1e-3 for each in reports)
    events = [event for event in Ledger(tmp_path / "run" / LEDGER).read()[0] if isinstance(event, Finished)]
    files = [tmp_path / "run" / episode_file(event.group, event.episode) for event in events]
    versions = {each for file in files for node in from_json(file.read_bytes(), "").nodes for each in node.versions}
    assert versions == {0, 1, 2}
    assert "POST /inference/v1/generate" in (tmp_path / "run/cluster/engine-1.log").read_text()
