"""A real agent of others works with the server. Heavy to install (litellm), so only where it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.inference.policy import Sampling
from tests.serve.scripted import Scripted, serving


def test_mini_swe_agent_calls_a_tool_and_submits(
    tokeniser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    pytest.importorskip("mcp", reason="litellm 1.106 wants it for tools and does not say so: pip install mcp")
    missing = "mini-swe-agent is not installed: pip install mini-swe-agent"
    agents = pytest.importorskip("minisweagent.agents.default", reason=missing)
    environments = pytest.importorskip("minisweagent.environments.local", reason=missing)
    models = pytest.importorskip("minisweagent.models.litellm_model", reason=missing)

    def script(prompt: Sequence[int], _: Sampling) -> list[int]:
        seen = tokeniser.decode(prompt)
        command = (
            "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made.txt"
            if "<tool_response>" in seen
            else "echo 世界 > made.txt"
        )
        call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
        return list(tokeniser.encode(f"I work.\n<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False))

    policy = Scripted(tokeniser, script)
    with serving(policy) as server:
        about = {"api_base": f"{server.url}/v1", "api_key": "none", "drop_params": True}
        model = models.LitellmModel(model_name="openai/tiny", model_kwargs=about, cost_tracking="ignore_errors")
        place = environments.LocalEnvironment(cwd=str(tmp_path))
        agent = agents.DefaultAgent(
            model, place, system_template="Use bash.", instance_template="{{task}}", step_limit=5
        )
        outcome = agent.run("make a file")
    assert (outcome["exit_status"], outcome["submission"].strip()) == ("Submitted", "世界")
    assert (tmp_path / "made.txt").read_text(encoding="utf-8") == "世界\n"
    assert len(policy.asked) == 2
    assert "<tool_response>" in tokeniser.decode(policy.asked[1][0])
    assert '"name": "bash"' in tokeniser.decode(policy.asked[0][0])
