"""A real vLLM drafts with exported MTP heads, and writes what transformers writes without them.

The Python of vLLM's environment is where VLLM_PYTHON says; without it these tests are skipped. Takes a minute or so.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from etude.models import bases
from etude.models.load import load_model
from etude.models.mtp_heads import export_heads, keep_apart
from tests.models.test_mtp_export import PROMPT, saved

VLLM = Path(os.environ.get("VLLM_PYTHON", "python-of-vllm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM.is_file(), reason="no vLLM: set VLLM_PYTHON to the Python of an environment that has it"
    ),
]
ALONE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
         "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, wish, prompt = sys.argv[1], *map(json.loads, sys.argv[2:])
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=2, disable_log_stats=False,
              skip_tokenizer_init=True, **wish)
    written = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False))
    drafted = {each.name: each.value for each in llm.get_metrics() if each.name.endswith(("num_drafts", "num_accepted_tokens"))}
    print("FOUND " + json.dumps([list(written[0].outputs[0].token_ids), list(drafted.values())]))
"""


def test_vllm_drafts_with_exported_heads(tmp_path: Path) -> None:
    sprout = bases.resolve("sprout").folder
    model = load_model(sprout, torch.device("cpu"), torch.float32)
    source = saved(tmp_path / "model", model, depth=3, shared=True)
    keep_apart(source)  # without it vLLM takes the heads for weights of the model, and stops
    export_heads(source, tmp_path / "draft", "mimo")
    draft = {"method": "mtp", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    wish = {"hf_overrides": {"num_nextn_predict_layers": 1}, "speculative_config": draft}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command: list[str | Path] = [VLLM, script, source, json.dumps(wish), json.dumps(PROMPT[0].tolist())]
    done = subprocess.run(
        command, env=os.environ | ALONE, capture_output=True, text=True, check=False, timeout=600, cwd=tmp_path
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    tokens, (drafts, accepted) = json.loads(found[0].removeprefix("FOUND "))
    plain = model.generate(PROMPT, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, PROMPT.shape[1] :]
    assert tokens == plain.tolist()
    assert accepted > 8  # of 24 tokens
    assert drafts < 20
