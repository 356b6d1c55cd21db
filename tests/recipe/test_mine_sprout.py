"""recipes/mine-sprout.toml as a newcomer runs it: on a private repository, from an empty cache, every stage."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from etude.files import read_json
from etude.lineage.record import load_lineage, load_record
from tests import tiny
from tests.tasks import small

if TYPE_CHECKING:
    from tests.conftest import Etude

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/mine-sprout.toml"
FUNCTION = '''def {name}_{number}(values, least={number}):
    """Return how many of the values are {name} of at least {number}, and their sum."""
    count, result = 0, 0
    for value in values:
        if value >= least:
            count += 1
            result += value
    return count, result
'''
TEST = """def test_{name}_{number}():
    assert {name}.{name}_{number}([{number}, {number} + 2, {number} - 1]) == (2, 2 * {number} + 2)
"""
TASKS = '[[package]]\ngit = "~/my-project"\nlicence = "LicenseRef-Mine"\n'
# Less of everything; lengths, tools, tasks and all that can be wrong stay the recipe's own.
LESS = {
    "data.workers": 1, "cpt.tokens": 2048, "cpt.evaluation_rows": 1, "sft.tokens": 4096, "sft.evaluation_rows": 1,
    "after.k": 1, "bench.k": 1, "rl.steps": 1, "rl.groups": 1, "rl.group_size": 3,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a repository in it, and an index of packages in which simpy is a few files of ours."""
    project = tmp_path / "my-project"
    for name in ("large", "small"):
        functions = [(name, number) for number in range(1, 13)]
        (project / "tests").mkdir(parents=True, exist_ok=True)
        code = "\n\n".join(FUNCTION.format(name=name, number=number) for name, number in functions)
        (project / f"{name}.py").write_text(code)
        tests = "\n\n".join(TEST.format(name=name, number=number) for name, number in functions)
        (project / f"tests/test_{name}.py").write_text(f"import {name}\n\n\n{tests}")
    (project / "pyproject.toml").write_text('[project]\nname = "my-project"\nversion = "1"\n')
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all of it"]):
        tiny.git(project, *words)
    links = tmp_path / "links"
    links.mkdir()
    with tarfile.open(links / "simpy-4.1.2.tar.gz", "w:gz") as archive:
        for file in sorted((ROOT / "src/etude/rl").glob("tr*.py")):
            archive.add(file, f"simpy-4.1.2/simpy/{file.name}")
        archive.add(ROOT / "LICENSE", "simpy-4.1.2/LICENSE")
    for key, value in (
        small.offline() | {"PIP_FIND_LINKS": f"{small.wheels()} {links}", "HOME": str(tmp_path)}
    ).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where tests run side by side
    yield tmp_path
    torch.set_num_threads(threads)


def test_every_stage_of_the_recipe_runs_on_a_private_repository_from_an_empty_cache(etude: Etude, home: Path) -> None:
    (home / "tasks.toml").write_text(f'name = "mine"\nmutation = 2\ndeletion = 1\n{TASKS}')
    made = etude("tasks", "make", "tasks.toml")
    assert made.code == 0, made.err
    less = [word for key, value in LESS.items() for word in ("--set", f"{key}={value}")]
    said = etude("run", RECIPE, *less)
    assert said.code == 0, said.err
    run = home / "runs/mine"
    stages = [stage["name"] for stage in read_json(run / "run.json")["stages"]]
    assert stages == ["base", "data", "cpt", "before", "sft", "after", "rl", "bench", "release"]
    assert all(load_record(run / stage).sessions == 1 for stage in stages)
    learnt = {stage: load_record(run / stage).compute.tokens for stage in ("cpt", "sft", "rl")}
    assert learnt["cpt"] == 2048
    assert min(learnt.values()) > 0
    (corpus,) = load_lineage(run / "rl/model").corpora.values()
    assert {use.name: use.licences.keys() for use in corpus.data}["mine"] == {"LicenseRef-Mine"}
    assert etude("verify", run / "release/release").code == 0
