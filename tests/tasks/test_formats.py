from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.tasks.formats import diff, swebench_row, write_harbor, write_swebench
from etude.tasks.manifest import TaskSet
from tests.tasks import small

ASK = "import sys; from harbor.models.task.task import Task; task = Task(sys.argv[1]); print(task.name, task.config.verifier.environment_mode.value)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_harbor(small.task(), small.codebase(tmp_path / "calc"), tmp_path / "task")
    return tmp_path / "task"


def test_a_task_is_a_folder_that_gives_nothing_away(folder: Path) -> None:
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    assert (config["task"]["name"], config["environment"]["network_mode"]) == ("etude/calc-1", "no-network")
    assert (folder / "instruction.md").read_text(encoding="utf-8") == "sums are wrong\n"
    assert (folder / "environment/tree/calc/__init__.py").read_text(encoding="utf-8") == small.BROKEN
    assert "test_mean" not in (folder / "environment/tree/test_calc.py").read_text(encoding="utf-8")
    assert (folder / "tests/pristine/test_calc.py").read_text(encoding="utf-8") == small.TESTS
    assert (folder / "solution/tree/calc/__init__.py").read_text(encoding="utf-8") == small.SOLVED
    with pytest.raises(UserError, match="is there already"):
        write_harbor(small.task(), small.codebase(folder.parent / "again"), folder)


@pytest.mark.parametrize(
    ("source", "reward"), [(small.SOLVED, 1.0), (small.BROKEN, 0.0), ("import os\nos._exit(0)\n", 0.0)]
)
def test_its_verifier_rewards_the_solution_alone(folder: Path, tmp_path: Path, source: str, reward: float) -> None:
    """The paths of a container are replaced by those of a folder; the script is otherwise as it runs there."""
    root = tmp_path / "root"
    shutil.copytree(folder / "environment/tree", root / "workspace")
    shutil.copytree(folder / "tests", root / "tests")
    (root / "logs").mkdir()
    (root / "workspace/calc/__init__.py").write_text(source, encoding="utf-8")
    for path in [*(root / "tests").glob("*.*")]:
        text = path.read_text(encoding="utf-8")
        for place in ("/workspace", "/tests", "/logs"):
            text = text.replace(f'"{place}', f'"{root}{place}').replace(f" {place}", f" {root}{place}")
        path.write_text(text, encoding="utf-8")
    env = {"PATH": f"{small.python().parent}:{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(["sh", str(root / "tests/test.sh")], check=True, env=env, capture_output=True)
    assert json.loads((root / "logs/verifier/reward.json").read_text(encoding="utf-8"))["reward"] == reward


def test_harbor_itself_accepts_it(folder: Path) -> None:
    """Harbor needs a newer Python than ours may be: HARBOR_PYTHON names one that has it."""
    python = os.environ.get("HARBOR_PYTHON")
    if not python:
        pytest.skip("HARBOR_PYTHON names no Python with the package harbor")
    told = subprocess.run([python, "-c", ASK, str(folder)], capture_output=True, text=True, check=True).stdout
    assert told == "etude/calc-1 separate\n"


TEXT = st.lists(st.sampled_from(["a", "b", "--- c", "+++ d", "é\f", ""]), max_size=12).map("\n".join)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=10, max_size=10))
def test_git_applies_diffs_and_undoes_them(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sides = [{f"{i}.py": pair[side] for i, pair in enumerate(pairs)} for side in (0, 1)]
        for name, text in sides[0].items():
            Path(folder, name).write_bytes(text.encode())
        patch = "".join(diff(name, sides[0][name], sides[1][name]) for name in sides[0])
        for arguments, expected in ((["apply"], sides[1]), (["apply", "--reverse"], sides[0])):
            if patch:
                subprocess.run(["git", *arguments, "-"], cwd=folder, input=patch.encode(), check=True)
            assert {name: Path(folder, name).read_bytes().decode() for name in expected} == expected


def test_rows_hold_the_solution_and_the_hidden_tests(tmp_path: Path) -> None:
    calc, task = small.codebase(tmp_path), small.task()
    row = swebench_row(task, calc)
    assert row["patch"] == diff("calc/__init__.py", small.BROKEN, small.SOLVED)
    assert "+def test_mean" in row["test_patch"]
    assert json.loads(row["FAIL_TO_PASS"]) == list(task.fail_to_pass)
    write_swebench(TaskSet("set", "", (task,), {"calc==1": calc}), tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 1
