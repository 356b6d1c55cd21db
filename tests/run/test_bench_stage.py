"""The `bench` stage through the command line: a tiny base beside the benchmark's own scripts, on real tasks in real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.bench.trials import read_results
from etude.lineage.compute import forward_flops
from etude.lineage.record import load_record
from etude.models.shape import model_shape
from etude.run.stages import STAGES
from etude.sandbox import probe
from tests import tiny
from tests.bench import calc_set
from tests.conftest import Etude
from tests.tasks import small

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = """
name = "measured"
base = "{base}"
stages = ["before"]
[before]
kind = "bench"
tasks = "{tasks}"
against = ["oracle", "noop"]
k = 1
device = "cpu"
harness = {{ turns = 2, turn_tokens = 8 }}
tools = {{ tools = ["edit", "write"] }}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe with all it names, and a cache."""
    small.run(probe.strongest())  # or skip
    folder = tmp_path_factory.mktemp("inputs")
    base = tiny.save_model(folder / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    tasks, cache = calc_set.write(folder)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(base=base, tasks=tasks))
    return recipe, cache


def test_what_the_record_tells_is_what_the_trials_say(etude: Etude, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, cache = inputs
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", cache)
    assert said.code == 0, said.err
    folder = tmp_path / "run" / "before"
    record, trials = load_record(folder), read_results(folder).trials
    assert not (folder / "model").exists()
    assert [(parent.name, parent.role) for parent in record.parents] == [("base", "compared")]
    assert [use.name for use in record.data] == ["calc.jsonl (2 tasks)"]
    own = [trial for trial in trials if trial.model == "base"]
    assert len(own) == 2
    assert {trial.model for trial in trials} == {"base", "oracle", "noop"}
    summary = record.summary
    assert (summary["solved"], summary["solved_low"], summary["trials"], summary["invalid"]) == (0.0, 0.0, 2, 0)
    assert summary["valid_calls"] == sum(trial.calls > 0 for trial in own) / 2
    assert summary["tokens_per_trial"] == sum(trial.tokens["written"] for trial in own) / 2 > 0
    assert (summary["solved/oracle"], summary["solved_high/oracle"], summary["valid_calls/oracle"]) == (1.0, 1.0, 1.0)
    assert (summary["solved/noop"], summary["valid_calls/noop"]) == (0.0, 0.0)
    assert "oracle: 100.0% [" in said.out
    assert "base: 0.0% [" in said.out
    assert str(folder / "report.html") in said.out
    traces = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    lengths = [sum(len(node["tokens"]) for node in each["nodes"]) for each in traces if each["id"].startswith("base:")]
    shape = model_shape(tmp_path / "run/base/model").compute
    assert record.compute.tokens == sum(lengths)
    assert record.compute.sampling_flops == record.compute.model_flops
    # Every token is read once.
    assert record.compute.model_flops == pytest.approx(sum(forward_flops(shape, length) for length in lengths))
    assert "before: unchanged, kept" in etude("run", recipe, "--out", tmp_path / "run", "--cache", cache).err


def test_trials_of_an_interrupted_session_are_kept(etude: Etude, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, cache = inputs
    changes = ["--set", "before.against=[]", "--set", "before.k=2", "--set", "before.limit=1"]
    words = ["run", recipe, "--out", tmp_path / "run", "--cache", cache, *changes]
    assert etude(*words).code == 0
    folder = tmp_path / "run" / "before"
    lines = (folder / "trials.jsonl").read_text().splitlines()
    work = tmp_path / "run" / ".work" / f"before-{load_record(folder).fingerprint[:12]}"
    folder.rename(work)
    (work / "record.json").unlink()
    (work / "trials.jsonl").write_text("\n".join(lines[:2]) + "\n")  # the rules and the first trial
    said = etude(*words)
    assert said.code == 0, said.err
    again = (folder / "trials.jsonl").read_text().splitlines()
    assert (again[:2], len(again)) == (lines[:2], len(lines))
    assert load_record(folder).sessions == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('tasks="nowhere.jsonl"', "bench.tasks: 'nowhere.jsonl' is not a file"),
        ('only="other"', "has no task whose id begins with 'other'"),
        ('against=["nosuch"]', "unknown base 'nosuch'"),
        ('against=["noop", "noop"]', "names a model twice"),
        ('tools={tools=["bash"]}', "the oracle needs the tools edit and write"),
        ("k=0", "greater than or equal to 1"),
        ('style="rude"', "style"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(
    etude: Etude, tiny_base: Path, tmp_path: Path, change: str, told: str
) -> None:
    recipe, tasks = tmp_path / "recipe.toml", tmp_path / "tasks.jsonl"
    tasks.write_text('{"format": 1, "name": "set", "split": "bench"}\n{"task": "one", "codebase": "x==1"}\n')
    recipe.write_text(RECIPE.format(base=tiny_base, tasks=tasks))
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path, "--set", f"before.{change}")
    assert (said.code, told in " ".join(said.err.split())) == (2, True), said.err
    assert not (tmp_path / "run").exists()


def test_other_models_count_by_what_they_are(tmp_path: Path) -> None:
    stage, tasks = STAGES["bench"], tmp_path / "tasks.jsonl"
    tasks.write_text("{}")
    other = tiny.save_model(tmp_path / "run/sft/model")
    (other / "lineage.json").write_text("{}")
    settings = stage.settings(tasks=str(tasks), against=[str(tmp_path / "run/sft")])
    before = stage.inputs(settings, "parent", 0)
    assert stage.inputs(settings, "parent", 1) == before  # seeds are the benchmark's own
    (other / "lineage.json").write_text('{"trained": "more"}')
    assert stage.inputs(settings, "parent", 0) != before
