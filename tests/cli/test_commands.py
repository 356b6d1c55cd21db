from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etude.cli.main import app
from etude.models.bases import known_bases

if TYPE_CHECKING:
    from tests.conftest import Etude

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "window=64", "--set", "stride=32", "--set", "state_tasks=2", "--set", "state_diffs=1", "--set", "state_chars=120",
         "--set", "speed_prompt=8", "--set", "speed_steps=2", "--set", "speed_batch=2"]  # fmt: skip


COMMANDS = [
    "run",
    "plan",
    "log",
    "init",
    "schema",
    "compare",
    "serve",
    "agent",
    "status",
    "summary",
    "bases",
    "licences",
    "audit",
    "release",
    "verify",
]
GROUPED = [["lineage", "show"], ["lineage", "compute"], ["lineage", "draw"], ["tasks", "make"], ["tasks", "build"], ["tasks", "show"], ["tasks", "check"], ["tasks", "demos"],
           ["trace", "show"], ["trace", "list"], ["trace", "export"], ["trace", "import"], ["sandbox", "probe"], ["sandbox", "shell"],
           ["bench", "compare"], ["rl", "report"], ["rl", "weights"], ["rl", "watch"],
           ["library", "add"], ["library", "list"]]  # fmt: skip


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), *GROUPED], ids=" ".join)
def test_every_command_has_help_with_an_example(etude: Etude, command: list[str]) -> None:
    said = etude(*command, "--help")
    assert said.code == 0
    assert f"Example: etude {' '.join(command)}" in said.out


def test_there_is_no_command_without_a_test_of_its_help() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == set(COMMANDS)


def test_version(etude: Etude) -> None:
    assert etude("--version").out == "etude 0.1.0\n"


def test_bases(etude: Etude) -> None:
    assert set(json.loads(etude("bases", "--json").out)) == set(known_bases())
    listed = etude("bases")
    assert "smollm2-135m" in listed.out
    assert "sprout" in listed.out
    one = etude("bases", "smollm2-135m").out
    assert "134,515,008" in one
    assert "from: counted" in one
    assert "duties: ship the licence text" in one


def test_compare_from_the_command_line(etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path) -> None:
    words = [
        "compare",
        "sprout",
        tiny_base,
        "--on",
        code_tree,
        "--out",
        tmp_path / "run",
        "--cache",
        tmp_path / "cache",
        *SMALL,
    ]
    said = etude(*words)
    assert said.code == 0, said.err
    assert "sprout predicts this code best" in said.out
    assert (tmp_path / "run/compare/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "| bits/byte ↓ |" in (tmp_path / "run/compare/report.md").read_text()
    found = json.loads(etude(*words, "--json").out)
    assert found["steps"] == {"compare": "kept"}
    record = found["records"]["compare"]
    assert [parent["name"] for parent in record["parents"]] == ["sprout", "tiny"]
    assert record["parents"][0]["record"] is not None
    assert record["parents"][1]["record"] is None
    assert record["data"][0]["files"] == 6
    assert record["data"][0]["left_out"] == {"not source code": 1}
    assert record["compute"]["tokens"] > 0
    results = json.loads((tmp_path / "run/compare/results.json").read_text())
    assert [result["name"] for result in results] == ["sprout", "tiny"]
    assert results[0]["licence"] == "Apache-2.0"
    assert results[1]["licence"] == "unknown text"


def test_a_dry_run_prints_the_resolved_recipe_and_what_would_run(etude: Etude, tmp_path: Path) -> None:
    words = [
        "run",
        ROOT / "recipes/quickstart.toml",
        "--cache",
        tmp_path,
        "--out",
        tmp_path / "run",
        "--dry-run",
        "--set",
        "cpt.tokens=4096",
    ]
    said = etude(*words)
    assert "evaluation_rows = 16" in said.out
    stages = ("base", "data", "cpt", "mtp", "before", "sft", "taught", "rl", "after", "release")
    assert said.out.endswith("".join(f"{stage}: would run\n" for stage in stages))
    plan = json.loads(etude(*words, "--json").out)
    assert plan["recipe"]["cpt"]["tokens"] == 4096
    assert plan["recipe"]["mtp"]["schedule"]["kind"] == "cosine"
    assert [step["action"] for step in plan["steps"]] == ["run"] * len(stages)
    assert not (tmp_path / "run").exists()


def test_the_tree_of_a_finished_run(etude: Etude, tmp_path: Path, code_tree: Path) -> None:
    recipe = tmp_path / "r.toml"
    small = "\n".join(word.replace("=", " = ") for word in SMALL if "=" in word)
    recipe.write_text(
        f'name = "r"\nbase = "sprout"\nstages = ["compare"]\n[compare]\non = "{code_tree}"\nbases = ["sprout"]\n{small}\n'
    )
    run = tmp_path / "run"
    said = etude("run", recipe, "--out", run, "--cache", tmp_path / "cache")
    assert said.code == 0, said.err
    assert "compare: sprout is among the candidates already; it is measured once" in said.err
    assert [result["name"] for result in json.loads((run / "compare/results.json").read_text())] == ["sprout"]
    assert said.out.splitlines()[-1] == f"done: {run}; record: {run}/compare/record.json"
    shown = etude("lineage", "show", run, "--verify").out
    assert "└─ base (base, weights)" in shown
    assert "   └─ pretrain (pretrain, weights)" in shown
    assert "1,300,037,632 tokens" in shown
    assert shown.endswith("the weights agree with the record\n")
    tree = json.loads(etude("lineage", "show", run / "base/model", "--json").out)
    assert {record["stage"] for record in tree["records"].values()} == {"base", "pretrain"}
    assert tree["records"][tree["head"]]["licences"][0]["licence"] == "Apache-2.0"
    assert json.loads(etude("status", run, "--json").out)["stages"][1]["state"] == "done"
    assert f"{run}: done" in etude("status", run, "--watch").out


def test_no_colours_in_a_pipe(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "CLICOLOR_FORCE"}}
    for words in (["bases"], ["--help"], ["run", "absent.toml"]):
        done = subprocess.run(
            [sys.executable, "-m", "etude", *words],
            capture_output=True,
            text=True,
            check=False,
            env=clean,
            cwd=tmp_path,
        )
        assert "\x1b" not in done.stdout + done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m etude bases --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}; exit ${{PIPESTATUS[1]}}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
