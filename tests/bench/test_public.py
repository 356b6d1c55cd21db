"""Public benchmarks end to end, in real containers where PODMAN_IMAGE names an image with python3, git and bash; and their files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from etude.bench.public import engine_of, graded, public_set
from etude.cli.api import benchmark
from etude.errors import UserError
from tests.tasks.test_public import harbor, marked, swebench

DOCKERFILE = """FROM {image}
RUN mkdir /testbed && cd /testbed && git init -q && echo 'wrong' > answer && git add -A && \\
    git -c user.name=x -c user.email=x@y commit -q -m base
WORKDIR /testbed
"""
EVAL = """set -x
cd /testbed
: '>>>>> Start Test Output'
if [ "$(cat answer)" = 42 ]; then echo "PASSED t.py::new"; else echo "FAILED t.py::new - no"; fi
echo "PASSED t.py::old"
: '>>>>> End Test Output'
"""
GOLD = "diff --git a/answer b/answer\n--- a/answer\n+++ b/answer\n@@ -1 +1 @@\n-wrong\n+42\n"


def test_reports_say_what_the_harness_would(tmp_path: Path) -> None:
    task = public_set(swebench(tmp_path / "org__repo-1")).public["org__repo-1"]
    done = graded(task, marked("PASSED t.py::new\nPASSED t.py::old\n"), applied=True)
    assert done["resolved"]
    assert done["tests_status"]["FAIL_TO_PASS"] == {"success": ["t.py::new"], "failure": []}
    assert not graded(task, marked("PASSED t.py::new\nFAILED t.py::old\n"), applied=True)["resolved"]
    silent = graded(task, "bash: no such file", applied=True)
    assert (silent["resolved"], silent["patch_successfully_applied"], "tests_status" in silent) == (False, False, False)
    assert not graded(task, marked("PASSED t.py::new\nPASSED t.py::old\n"), applied=False)["resolved"]


def test_an_image_named_for_public_tasks_is_refused() -> None:
    assert engine_of("docker") == "docker"
    for wrong in ("podman:x", "namespaces"):
        with pytest.raises(UserError, match="public tasks name their own images"):
            engine_of(wrong)


@pytest.mark.slow
def test_gold_passes_and_nothing_fails(tmp_path: Path) -> None:
    image = os.environ.get("PODMAN_IMAGE", "")
    if not image or not shutil.which("podman"):
        pytest.skip("podman is not installed, or PODMAN_IMAGE names no image of it")
    tasks = tmp_path / "tasks"
    first = swebench(tasks / "org__repo-1", image="localhost/etude-not-there:1")
    second = harbor(tasks / "one", "[environment]\nallow_internet = false\n")
    for folder in (first, second / "environment"):
        (folder / "Dockerfile").write_text(DOCKERFILE.format(image=image))
    (first / "eval.sh").write_text(EVAL)
    (first / "gold.patch").write_text(GOLD)
    for name, text in {
        "tests/test.sh": "grep -c 42 answer > /logs/verifier/reward.txt",
        "solution/solve.sh": "echo 42 > answer",
    }.items():
        (second / name).parent.mkdir()
        (second / name).write_text(text)
    out = tmp_path / "out"
    scores = benchmark(["oracle", "noop"], tasks, out=out, k=1, concurrency=1, sandbox="podman")
    assert {name: score and score.value for name, score in scores.items()} == {"oracle": 1.0, "noop": 0.0}
    prediction = json.loads((out / "oracle.etude-1.predictions.jsonl").read_text())
    assert prediction["instance_id"] == "org__repo-1"
    assert "+42" in prediction["model_patch"]
    assert json.loads((out / "oracle.etude-1.json").read_text())["resolved_ids"] == ["org__repo-1"]
    assert json.loads((out / "noop.etude-1.json").read_text())["empty_patch_ids"] == ["org__repo-1"]
    assert (out / "harbor/oracle/one__1/verifier/reward.txt").read_text().strip() == "1"
    header = json.loads((out / "trials.jsonl").read_text().splitlines()[0])
    assert header["integrity"]["sandbox"] == "podman"
    traces = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    assert all(trace["made_by"]["sandbox"].startswith("podman:sha256:") for trace in traces)
