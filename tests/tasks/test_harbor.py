from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks.harbor import read_harbor, write_harbor
from tests.tasks import small

OLD = 'version = "1.0"\n[metadata]\ncategory = "games"\n[verifier]\ntimeout_sec = 900\n[agent]\ntimeout_sec = 60\n[environment]\ndocker_image = "a/b:1"\nallow_internet = true\nmemory = "2G"\n'
ASK = "import sys; from harbor.models.task.task import Task; task = Task(sys.argv[1]); print(task.name, task.config.verifier.environment_mode.value)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_harbor(small.task(), small.codebase(tmp_path / "calc"), tmp_path / "task")
    return tmp_path / "task"


def test_a_task_is_a_folder_that_gives_nothing_away(folder: Path) -> None:
    found = read_harbor(folder)
    assert (found.name, found.instruction, found.network, found.image) == (
        "etude/calc-1",
        "sums are wrong\n",
        False,
        None,
    )
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


def test_a_task_of_terminal_bench_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "task.toml").write_text(OLD, encoding="utf-8")
    with pytest.raises(UserError, match="is no Harbor task"):
        read_harbor(tmp_path)
    (tmp_path / "instruction.md").write_text("Play.", encoding="utf-8")
    found = read_harbor(tmp_path)
    assert (found.image, found.agent_seconds, found.verifier_seconds, found.network) == ("a/b:1", 60.0, 900.0, True)
    assert (found.name, found.metadata) == (tmp_path.name, {"category": "games"})
