"""The `rl` stage through the command line: real tasks, real sandboxes, a tiny policy; what it leaves and what it records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from etude.files import sha256_file
from etude.lineage.duties import licence_uses
from etude.lineage.record import load_lineage, load_record
from etude.models.load import load_model, load_tokeniser
from etude.sandbox import probe
from tests import tiny
from tests.bench import calc_set
from tests.conftest import Etude
from tests.tasks import small

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = """
name = "learns"
base = "{base}"
stages = ["rl"]
[rl]
tasks = "{tasks}"
steps = 2
groups = 1
group_size = 3
epochs = 20
processes = false
device = "cpu"
optimiser = {{ lr = 1e-3 }}
harness = {{ turns = 2, turn_tokens = 48 }}
tools = {{ tools = ["read", "shell"] }}
"""


def write_inputs(folder: Path) -> tuple[Path, Path, Path]:
    """Write a base with room for the tools' descriptions, a training set and a recipe; return recipe, tasks and cache."""
    base = tiny.save_model(folder / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    tasks, cache = calc_set.write(folder)
    header, *rows = tasks.read_text().splitlines()
    tasks.write_text("\n".join([json.dumps({**json.loads(header), "split": "train"}), *rows]) + "\n")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(base=base, tasks=tasks))
    return recipe, tasks, cache


def test_the_stage_makes_a_model_with_its_record(etude: Etude, tmp_path: Path) -> None:
    small.run(probe.strongest())
    recipe, tasks, cache = write_inputs(tmp_path)
    done = etude("run", recipe, "--out", tmp_path / "run", "--cache", cache)
    assert done.code == 0, done.err
    folder = tmp_path / "run" / "rl"
    record, base = load_record(folder), load_record(tmp_path / "run" / "base")
    assert (record.kind, [parent.record for parent in record.parents]) == ("rl", [base.id])
    assert [(use.digest, use.source) for use in record.data] == [(sha256_file(tasks), f"file …/{tasks.name}")]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["key"].startswith("train/")]
    assert record.compute.tokens == sum(row["tokens"] for row in steps) > 0
    (rest,) = (row for row in rows if row["key"] == "rest")
    assert record.compute.model_flops == pytest.approx(sum(row["flops"] for row in [*steps, rest]))
    sampling = sum(row["sampling_flops"] for row in [*steps, rest])
    assert record.compute.sampling_flops == pytest.approx(sampling)
    assert 0 < sampling < record.compute.model_flops  # the rest is learning
    held = sum(row["sandbox_seconds"] for row in [*steps, rest])
    assert record.compute.sandbox_seconds == pytest.approx(held, abs=0.01)
    assert (
        held >= 0.99 * sum(row.get("episode_seconds", 0) * row["episodes"] for row in steps) > 0
    )  # rows have six digits
    assert record.compute.device_seconds == pytest.approx(sum(row["device_seconds"] for row in steps), abs=0.01)
    assert {"steps", "episodes", "reward_first", "reward_last", "solved_first", "solved_last"} <= record.summary.keys()
    assert record.summary["steps"] == len(steps) == 2
    assert [licence.file for licence in record.licences] == ["LICENSES/base/LICENSE"]
    assert load_lineage(folder / "model").head == record.id
    before, after = (load_model(path / "model", torch.device("cpu")) for path in (tmp_path / "run" / "base", folder))
    assert any(not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True))
    assert load_tokeniser(folder / "model").encode("import os") == load_tokeniser(tmp_path / "base").encode("import os")
    left = {path.name for path in folder.iterdir()}
    assert {"report.html", "ledger.jsonl", "samples", "model", "results.json"} <= left
    assert not left & {"exchange", "weights", "trainer", "episodes", "job.json", "engine.log", "trainer.log"}
    again = etude("run", recipe, "--out", tmp_path / "run", "--cache", cache)
    assert "rl: unchanged, kept" in again.err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("tasks", '"nowhere.jsonl"'), "rl.tasks: 'nowhere.jsonl' is not a file"),
        (("only", '"other"'), "has no task whose id begins with 'other'"),
        (("group_size", "1"), "greater than or equal to 2"),
        (("staleness", "0"), "staleness = 0"),
        (("rewards", "{outcome=0.0, length=0.0, style=0.0, communication=0.0, conduct=0.0}"), "all weights of the reward are 0"),
        (("kl", '{coefficient=0.1, reference="sft"}'), "reference"),
        (("teacher", '{models={""="./nowhere"}}'), "nowhere"),
        (("teacher", '{models={other="sprout"}}'), "the id of the task 'one' begins with none of the prefixes"),
        (("teacher", '{models={""="sprout", two="sprout"}}'), "no task is left for 'two'; leave that teacher out"),
        (("teacher", '{models={""="sprout"}}'), "has other tokens than the model it is to teach"),
        (("teacher", "{bound=2.0}"), "`bound` has no effect with no `models`"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_done(
    etude: Etude, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, change: tuple[str, str], told: str
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    recipe, tasks = folder / "recipe.toml", folder / "tasks.jsonl"
    tasks.write_text('{"format": 1, "name": "set", "split": "train"}\n{"task": "one", "codebase": "x==1"}\n')
    recipe.write_text(RECIPE.format(base=tiny_base, tasks=tasks))
    said = etude("run", recipe, "--out", folder / "run", "--cache", folder, "--set", f"rl.{change[0]}={change[1]}")
    assert (said.code, told in " ".join(said.err.split())) == (2, True), said.err
    assert not (folder / "run" / ".work").exists()


def test_a_teacher_must_be_a_model_that_reads_as_far(etude: Etude, tiny_base: Path, tmp_path: Path) -> None:
    recipe, tasks, empty = (tmp_path / name for name in ("recipe.toml", "tasks.jsonl", "empty"))
    tasks.write_text('{"format": 1, "name": "set", "split": "train"}\n{"task": "one", "codebase": "x==1"}\n')
    recipe.write_text(RECIPE.format(base=tiny_base, tasks=tasks))
    empty.mkdir()
    short, small = (tiny.save_model(tmp_path / name, seed=1) for name in ("short", "small"))
    for folder, changed in ((short, {"max_position_embeddings": 512}), (small, {"vocab_size": tiny.VOCABULARY - 1})):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changed}))
    for folder, told in ((empty, "empty holds no lineage.json: it was not written by Etude"), (short, "reads 512 tokens, rows may have 1024; set rl.length = 512"),
                         (small, f"knows {tiny.VOCABULARY - 1} tokens, the model it is to teach {tiny.VOCABULARY}")):  # fmt: skip
        given = f'rl.teacher={{models={{""="{folder}"}}}}'
        said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path, "--set", given)
        assert (said.code, told in " ".join(said.err.split())) == (2, True), said.err
        assert "Traceback" not in said.err
    planned = etude("plan", recipe, "--set", f'rl.teacher={{models={{""="{tiny_base}"}}}}', "--json")
    assert json.loads(planned.out)["stages"][0]["parts"]["teachers"] > 0, planned.err


def test_the_record_names_the_teachers_and_their_licences(etude: Etude, tmp_path: Path) -> None:
    """One is the base itself, which the tree has already; the other is a folder that nobody recorded."""
    small.run(probe.strongest())
    recipe, _, cache = write_inputs(tmp_path)
    other = tiny.save_model(tmp_path / "other", seed=4)
    config = json.loads((tmp_path / "base/config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))
    (other / "LICENSE").write_text("You may look at this model.\n")
    given = f'rl.teacher={{models={{""="{tmp_path / "base"}", calc-2="{other}"}}}}'
    words = ("run", recipe, "--out", tmp_path / "run", "--cache", cache, "--set", given)
    done = etude(*words)
    assert done.code == 0, done.err
    record, base = load_record(tmp_path / "run/rl"), load_record(tmp_path / "run/base")
    edges = [(edge.role, edge.record, edge.model_digest == base.model_digest) for edge in record.parents]
    assert edges == [("weights", base.id, True), ("teacher", base.id, True), ("teacher", None, False)]
    assert {licence.inherited_from for licence in record.licences} == {"base", "other"}
    lines = (tmp_path / "run/rl/metrics.jsonl").read_text().splitlines()
    steps = [row for line in lines if (row := json.loads(line))["key"].startswith("train/")]
    assert all(abs(row["teacher_gap"]) < 5 for row in steps)
    roles = {use.ancestor: use.role for use in licence_uses(tmp_path / "run/rl/model") if use.role != "data"}
    assert roles == {"base": "weights", "other": "teacher"}
    assert "rl: unchanged, kept" in etude(*words).err
    weights = other / "model.safetensors"
    weights.write_bytes(tiny.save_model(tmp_path / "third", seed=5).joinpath("model.safetensors").read_bytes())
    assert "rl: would run" in etude(*words, "--dry-run").out  # another teacher, another stage


def test_a_benchmark_is_not_learnt(etude: Etude, tiny_base: Path, tmp_path: Path) -> None:
    tasks, recipe = tmp_path / "tasks.jsonl", tmp_path / "recipe.toml"
    tasks.write_text('{"format": 1, "name": "set", "split": "bench"}\n')
    recipe.write_text(RECIPE.format(base=tiny_base, tasks=tasks))
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path)
    assert (said.code, "is a benchmark" in said.err) == (2, True), said.err


def test_a_set_whose_checks_are_broken_here_is_refused(etude: Etude, tmp_path: Path) -> None:
    small.run(probe.strongest())
    recipe, tasks, cache = write_inputs(tmp_path)
    lines = tasks.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"calc-2"' in line)
    row = json.loads(lines[place])
    lines[place] = json.dumps({**row, "fail_to_pass": row["pass_to_pass"], "pass_to_pass": row["fail_to_pass"]})
    tasks.write_text("\n".join(lines) + "\n")
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", cache)
    assert (said.code, "task calc-2: its check is broken: doing nothing is scored" in said.err) == (2, True), said.err


def test_stages_that_start_from_a_model_are_refused_without_one() -> None:
    from etude.run.stages import STAGES

    kinds = {kind for kind, stage in STAGES.items() if stage.needs_model}
    assert kinds == {"cpt", "extend", "sft", "mtp", "rl", "merge", "bench", "release"}
