"""The Python API: the examples of docs/api.md run as they stand, and importing it loads nothing heavy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.bench.trials import read_results
from etude.errors import UserError
from etude.sandbox import probe
from tests import tiny
from tests.bench import calc_set
from tests.tasks import small

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
RECIPE = """
name = "mine"
base = "sprout"
[data]
length = 64
workers = 1
[[data.source]]
name = "code"
folder = "code"
unknown = "keep"
"""
HEAVY = {"torch", "transformers", "matplotlib", "numpy", "pydantic", "rich", "typer"}


def examples() -> dict[str, str]:
    """Return the code of the page by the heading above it."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    blocks = {each.splitlines()[0]: re.findall(r"```python\n(.*?)```", each, re.DOTALL) for each in sections}
    return {heading: "\n".join(code) for heading, code in blocks.items() if code}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the page describes it."""
    small.run(probe.strongest())  # or skip
    folder = tmp_path_factory.mktemp("api")
    manifest, cache = calc_set.write(folder / "calc")
    shutil.copy(manifest, folder / "tasks.jsonl")
    (folder / "home" / ".cache").mkdir(parents=True)
    (folder / "home" / ".cache" / "etude").symlink_to(cache)
    tiny.write_tree(folder / "code")
    (folder / "mine.toml").write_text(RECIPE)
    return folder


def test_the_examples_of_the_page_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    names: dict[str, object] = {}
    said = {}
    for heading, code in examples().items():
        exec(compile(code, f"{PAGE.name}: {heading}", "exec"), names)
        said[heading] = capsys.readouterr().out
    assert list(said) == ["Sample from a model", "Train", "Play one task", "Benchmark"]
    assert said["Sample from a model"].rstrip().endswith(("length", "stop"))
    assert said["Train"].startswith("base base 0 {'base': 'sprout'}\ndata data 0 {'tokens': ")
    assert said["Play one task"].startswith("True pass finished")
    assert "+" in said["Play one task"]
    assert "oracle Estimate(value=1.0" in said["Benchmark"]
    assert "noop Estimate(value=0.0" in said["Benchmark"]
    assert len(read_results(place / "runs" / "bench" / "calc").trials) == 4
    again = etude.benchmark(["oracle", "noop"], "tasks.jsonl", k=1, out="runs/bench/calc")
    assert {name: score and score.value for name, score in again.items()} == {"oracle": 1.0, "noop": 0.0}
    with pytest.raises(UserError, match=r"has no task .*nothing"):
        etude.play("tasks.jsonl", "nothing", "noop")


def test_importing_it_loads_nothing_heavy_and_unknown_names_are_refused() -> None:
    program = f"import sys, etude\nassert not {HEAVY!r} & set(sys.modules)\nassert 'train' in dir(etude)\netude.nothing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("AttributeError: module 'etude' has no attribute 'nothing'")
