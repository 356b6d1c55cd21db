from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.errors import Interrupted, UserError
from etude.files import sha256_file
from etude.lineage.record import load_lineage, load_record
from etude.progress import Reporter
from etude.recipe.recipe import Recipe, check
from etude.run.runner import Runner
from etude.run.stage import Job, Outcome, Stage
from etude.run.stages import STAGES
from etude.toml import Layer
from tests import tiny
from tests.run.toy import ScaleSettings, ScaleStage, recipe_of, runner

FOUR: dict[str, dict[str, object]] = {
    "one": {"by": 1.5},
    "two": {"by": 0.5},
    "three": {"by": 2.0},
    "four": {"by": 0.25},
}


@pytest.fixture
def stage() -> ScaleStage:
    return ScaleStage()


def actions(steps: object) -> dict[str, str]:
    return {step.entry.name: step.action for step in steps}  # type: ignore[attr-defined]


def test_a_run_leaves_models_metrics_and_records(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, FOUR))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/two/model")
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    factor = 1.5**4 * 0.5**4
    assert torch.allclose(model.model.norm.weight, base.model.norm.weight * factor)
    record = load_record(tmp_path / "run/two")
    assert record.compute.tokens == 40
    assert record.compute.model_flops == 400
    assert record.compute.device_seconds == 2.0
    assert record.compute.sampling_flops is None  # no row tells of any: not 0, which would be a count
    assert record.sessions == 1
    weights = tmp_path / "run/two/model/model.safetensors"
    assert record.weights["model.safetensors"].sha256 == sha256_file(weights)
    assert record.outputs["metrics.jsonl"].sha256 == sha256_file(tmp_path / "run/two/metrics.jsonl")
    assert len((tmp_path / "run/two/metrics.jsonl").read_text().splitlines()) == 5


def test_the_licence_travels_and_the_lineage_reaches_the_base(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, FOUR))
    last = tmp_path / "run/four"
    assert (last / "model/LICENSES/tiny/LICENSE").read_bytes() == (tiny_base / "LICENSE").read_bytes()
    assert not (last / "model/LICENSE").exists()
    assert (tmp_path / "run/base/model/LICENSE").is_file()
    for stage_name in ("base", *FOUR):
        carried = load_record(tmp_path / "run" / stage_name).licences
        assert [(licence.file, licence.inherited_from) for licence in carried] == [("LICENSES/tiny/LICENSE", "tiny")]
    shutil.copytree(last / "model", tmp_path / "elsewhere")
    lineage = load_lineage(tmp_path / "elsewhere")
    names = []
    at: str | None = lineage.head
    while at is not None:
        record = lineage.records[at]
        names.append(record.stage)
        at = record.parents[0].record if record.parents else None
    assert names == ["four", "three", "two", "one", "base"]
    assert lineage.records[lineage.head] == load_record(last)


def test_a_stage_that_would_lose_a_licence_fails(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    def lose(step: int) -> None:
        if step == 3 and (file := tmp_path / "run/one/model/LICENSES/tiny/LICENSE").exists() and "two/0" in stage.log:
            file.write_text("Tiny Licence: no.\n")

    stage.on_step = lose
    with pytest.raises(
        UserError, match=r"the licence file LICENSES/tiny/LICENSE of base \(from tiny\) is missing or altered"
    ):
        runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, FOUR))
    assert not (tmp_path / "run/two").exists()


def test_changing_stage_four_does_not_repeat_one_to_three(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    worker.execute(recipe_of(tiny_base, FOUR))
    stage.log.clear()
    changed = recipe_of(tiny_base, FOUR | {"four": {"by": 3.0}})
    assert actions(worker.plan(changed)) == {
        "base": "kept",
        "one": "kept",
        "two": "kept",
        "three": "kept",
        "four": "run",
    }
    worker.execute(changed)
    assert stage.log == [f"four/{step}" for step in range(4)]


def test_changing_back_uses_what_was_replaced(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    worker.execute(recipe_of(tiny_base, FOUR))
    first = load_record(tmp_path / "run/four")
    worker.execute(recipe_of(tiny_base, FOUR | {"four": {"by": 3.0}}))
    stage.log.clear()
    assert actions(worker.execute(recipe_of(tiny_base, FOUR)))["four"] == "reuse"
    assert stage.log == []
    assert load_record(tmp_path / "run/four") == first


def test_another_run_reuses_and_does_not_share_what_it_may_change(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, FOUR))
    stage.log.clear()
    other = runner(tmp_path / "other", tmp_path / "cache", stage, quiet)
    done = other.execute(recipe_of(tiny_base, FOUR | {"four": {"by": 9.0}}, name="other"))
    assert actions(done) == {"base": "reuse", "one": "reuse", "two": "reuse", "three": "reuse", "four": "run"}
    assert stage.log == [f"four/{step}" for step in range(4)]
    shutil.rmtree(tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "other/three/model")


def test_a_changed_base_changes_everything_but_a_touched_one_nothing(
    tmp_path: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    base = tiny.save_model(tmp_path / "mine", seed=1)
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    recipe = recipe_of(base, {"one": {}})
    worker.execute(recipe)
    stage.log.clear()
    (base / "model.safetensors").touch()
    assert actions(worker.execute(recipe)) == {"base": "run", "one": "kept"}
    tiny.save_model(base, seed=2)
    assert actions(worker.execute(recipe)) == {"base": "run", "one": "run"}


def test_a_changed_tokeniser_is_a_changed_parent(tmp_path: Path, stage: ScaleStage, quiet: Reporter) -> None:
    base = tiny.save_model(tmp_path / "mine", seed=1)
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    recipe = recipe_of(base, {"one": {}})
    worker.execute(recipe)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 77}))
    assert actions(worker.execute(recipe)) == {"base": "run", "one": "run"}


def test_only_what_the_record_names_is_taken_from_another_run(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    recipe = recipe_of(tiny_base, {"one": {}})
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe)
    (tmp_path / "run/one/model/stray.safetensors").write_text("mine")
    done = runner(tmp_path / "other", tmp_path / "cache", stage, quiet).execute(recipe)
    assert actions(done)["one"] == "reuse"
    assert not (tmp_path / "other/one/model/stray.safetensors").exists()
    assert load_lineage(tmp_path / "other/one/model").head == load_record(tmp_path / "other/one").id


@pytest.mark.parametrize("damage", ["truncate", "remove", "record", "lineage"])
def test_a_damaged_stage_is_done_again(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter, damage: str
) -> None:
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    recipe = recipe_of(tiny_base, {"one": {}, "two": {}})
    worker.execute(recipe)
    before = load_record(tmp_path / "run/one").weights
    weights = tmp_path / "run/one/model/model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "lineage":
        (tmp_path / "run/one/model/lineage.json").unlink()
    else:
        (tmp_path / "run/one/record.json").write_text("{")
    stage.log.clear()
    assert actions(worker.execute(recipe)) == {"base": "kept", "one": "run", "two": "kept"}
    assert load_record(tmp_path / "run/one").weights == before


def test_a_flipped_bit_is_not_taken_into_another_run(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    recipe = recipe_of(tiny_base, {"one": {}})
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe)
    good = load_record(tmp_path / "run/one").weights
    weights = tmp_path / "run/one/model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = runner(tmp_path / "other", tmp_path / "cache", stage, quiet).execute(recipe)
    assert actions(done)["one"] == "run"
    assert load_record(tmp_path / "other/one").weights == good


def test_stopped_between_two_units_it_goes_on_with_the_next(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    asked: list[int] = []

    def check_stop() -> None:
        if asked:
            raise Interrupted(15)

    stage.on_step = lambda step: asked.append(step) if step == 2 else None
    recipe = recipe_of(tiny_base, {"one": {}})
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet, check_stop)
    with pytest.raises(Interrupted):
        worker.execute(recipe)
    assert stage.log == ["one/0", "one/1", "one/2"]
    assert not (tmp_path / "run/one").exists()
    asked.clear()
    stage.on_step = lambda step: None
    worker.execute(recipe)
    assert stage.log == ["one/0", "one/1", "one/2", "one/3"]
    record = load_record(tmp_path / "run/one")
    assert record.sessions == 2
    assert record.compute.tokens == 40


def test_unfinished_work_under_other_settings_is_kept(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter
) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError

    stage.on_step = fail
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    with pytest.raises(RuntimeError):
        worker.execute(recipe_of(tiny_base, {"one": {"by": 1.5}}))
    stage.on_step = lambda step: None
    worker.execute(recipe_of(tiny_base, {"one": {"by": 2.5}}))
    stage.log.clear()
    worker.execute(recipe_of(tiny_base, {"one": {"by": 1.5}}))
    assert stage.log == ["one/2", "one/3"]


def test_a_plan_does_nothing(tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter) -> None:
    steps = runner(tmp_path / "run", tmp_path / "cache", stage, quiet).plan(recipe_of(tiny_base, FOUR))
    assert set(actions(steps).values()) == {"run"}
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_until_a_stage(tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter) -> None:
    worker = runner(tmp_path / "run", tmp_path / "cache", stage, quiet)
    assert list(actions(worker.execute(recipe_of(tiny_base, FOUR), until="two"))) == ["base", "one", "two"]
    with pytest.raises(UserError, match="'five' is not a stage of this recipe"):
        worker.execute(recipe_of(tiny_base, FOUR), until="five")


def test_the_run_folder_says_how_to_go_on(
    tmp_path: Path, tiny_base: Path, stage: ScaleStage, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/etude", "run", "my recipe.toml"])
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, {"one": {}}))
    head = json.loads((tmp_path / "run/run.json").read_text())
    assert head["stages"] == [{"name": "base", "kind": "base"}, {"name": "one", "kind": "scale"}]
    assert head["command"] == "/somewhere/etude run 'my recipe.toml'"
    assert 'kind = "scale"' in (tmp_path / "run/recipe.toml").read_text()


class NoteStage(Stage):
    """A report: writes down a setting and the benchmarks it was handed."""

    settings = ScaleSettings
    reads_benchmarks = True

    def inputs(self, settings: ScaleSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:
        return settings.model_dump()

    def run(self, settings: ScaleSettings, job: Job) -> Outcome:
        (job.work.folder / "note.json").write_text(json.dumps([settings.by, *(place.name for place in job.benchmarks)]))
        return Outcome(parents=[job.model.as_parent()])


def test_a_stage_that_reads_benchmarks_gets_those_before_it_and_is_done_again_when_one_changes(
    tmp_path: Path, tiny_base: Path, quiet: Reporter
) -> None:
    stages: dict[str, Stage] = {"base": STAGES["base"], "bench": NoteStage(), "note": NoteStage()}
    worker = Runner(tmp_path / "run", tmp_path / "cache", quiet, stages)

    def recipe(by: float) -> Recipe:
        table = {"name": "toy", "base": str(tiny_base), "stages": ["before", "bench", "note", "late"]}
        kinds = {"before": {"kind": "bench"}, "bench": {"by": by}, "note": {}, "late": {"kind": "bench"}}
        return check([Layer("test", {**table, **kinds})], {"bench": ScaleSettings, "note": ScaleSettings})

    worker.execute(recipe(1.0))
    assert json.loads((tmp_path / "run/note/note.json").read_text()) == [1.5, "before", "bench"]
    assert actions(worker.plan(recipe(1.0)))["note"] == "kept"
    assert [step.fingerprint for step in worker.plan(recipe(2.0))][3] == ""  # not known before the benchmark has run
    assert actions(worker.execute(recipe(2.0)))["note"] == "run"
