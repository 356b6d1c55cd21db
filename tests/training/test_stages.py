"""Training stages as a recipe runs them: what their settings mean, what is kept when they are interrupted or repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.lineage.record import load_record
from etude.progress import Reporter
from etude.recipe.recipe import load_recipe
from etude.run.folder import SHORT
from etude.run.runner import Runner, stage_settings
from etude.run.stages import STAGES
from etude.run.stages.extend import ExtendSettings
from etude.run.stages.pretrain import PretrainSettings
from etude.run.stages.sft import SftSettings
from etude.training.settings import TrainSettings
from tests import tiny

RECIPE = """
name = "small"
base = "{base}"
stages = ["cpt"]
[data]
heldout = 0.3
length = 256
separator = "<|end|>"
filters = {{ min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }}
duplicates = {{ near = false }}
[[data.source]]
name = "code"
jsonl = "{docs}"
unknown = "keep"
[cpt]
tokens = 2048
length = 128
batch = 4
evaluations = 1
evaluation_rows = 2
"""


def run(folder: Path, recipe: Path, quiet: Reporter) -> dict[str, str]:
    runner = Runner(folder / "run", folder / "cache", quiet, STAGES)
    return {step.entry.name: step.action for step in runner.execute(load_recipe([recipe], [], stage_settings()))}


@pytest.fixture
def recipe(tmp_path: Path, tiny_base: Path) -> Path:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    # transformers loads this, as many bases have it, and refuses to save it.
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [0, 3]}))
    texts = [f"def function_{index}(value):\n    return value * {index}\n" * 3 for index in range(40)]
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(base=base, docs=docs))
    return path


class Watching(Reporter):
    """Keeps what a bar would show of the training."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.shown: list[float] = []

    def _shower(self, stack: Any, label: str, total: float) -> Any:
        return lambda task: self.shown.append(task.done) if label == "training" else None


def test_interrupted_after_its_end_a_training_is_not_done_again(tmp_path: Path, recipe: Path, quiet: Reporter) -> None:
    recipe.write_text(recipe.read_text() + "micro = 1\n")
    watching = Watching()
    run(tmp_path, recipe, watching)
    assert sorted(set(watching.shown)) == [128.0 * rows for rows in range(17)]  # row by row, not step by step
    stage, whole = tmp_path / "run/cpt", load_record(tmp_path / "run/cpt")
    saved = json.loads((stage / "model/generation_config.json").read_text())
    assert (saved["temperature"], saved["eos_token_id"]) == (0.5, [0, 3])
    assert run(tmp_path, tmp_path / "run/recipe.toml", quiet)["cpt"] == "kept"  # a resolved recipe can be run again

    work = tmp_path / "run/.work" / f"cpt-{whole.fingerprint[:SHORT]}"
    stage.rename(work)  # as a kill leaves it while its files are hashed
    (work / "record.json").unlink()
    (work / "checkpoints").mkdir()
    assert run(tmp_path, recipe, quiet)["cpt"] == "run"
    with MetricsLog(stage / "metrics.jsonl") as metrics:
        assert len(list(metrics.rows("train/"))) == 4
        assert not list(metrics.rows("again/"))
    again = load_record(stage)
    assert (again.weights, again.data, again.summary) == (whole.weights, whole.data, whole.summary)
    assert (again.compute, again.sessions) == (whole.compute, 2)
    assert not any(name.startswith("checkpoints/") for name in again.outputs)

    stage.rename(work)  # and so, had it not been whole
    (work / "record.json").unlink()
    (work / "model/model.safetensors").unlink()
    run(tmp_path, recipe, quiet)
    assert load_record(stage).weights == whole.weights
    assert load_record(stage).compute.tokens == 2 * whole.compute.tokens


def test_a_licence_counts_by_its_content(tmp_path: Path) -> None:
    found = []
    for name, text in (("a", "one"), ("b", "one"), ("b", "other")):
        (tmp_path / name).write_text(text)
        settings = PretrainSettings(tokens=1, licence=str(tmp_path / name))
        found.append(STAGES["pretrain"].inputs(settings, None, 0))
    assert found[0] == found[1] != found[2]


def test_a_table_with_one_number_leaves_the_others_as_the_stage_has_them() -> None:
    pretrain = PretrainSettings.model_validate({"tokens": 1, "optimiser": {"lr": 1e-3}, "schedule": {"warmup": 0.1}})
    assert (pretrain.optimiser.name, pretrain.optimiser.lr, pretrain.optimiser.other_lr) == ("muon", 1e-3, 4e-3)
    assert (pretrain.schedule.kind, pretrain.schedule.warmup, pretrain.schedule.decay) == ("wsd", 0.1, 0.6)
    sft = SftSettings.model_validate({"code": ".", "optimiser": {"name": "adamw", "clip": 0.5}})
    assert (sft.optimiser.lr, sft.optimiser.weight_decay, sft.optimiser.clip) == (1e-4, 0.0, 0.5)
    other = PretrainSettings.model_validate(
        {"tokens": 1, "optimiser": {"name": "adamw"}, "schedule": {"kind": "cosine"}}
    )
    assert (other.optimiser.lr, other.optimiser.other_lr, other.schedule.decay) == (3e-4, None, 0.2)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(TrainSettings, {}), (PretrainSettings, {}), (ExtendSettings, {"length": 64}), (SftSettings, {"code": "."})],
)
def test_settings_written_out_can_be_read_again(kind: Any, given: dict[str, Any]) -> None:
    settings = kind.model_validate({"tokens": 1, **given})
    assert kind.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("given", [{"momentum": 0.5}, {"other_lr": 0.1}, {"betas": [0.9, 1.5]}, {"betas": [-0.1, 0.9]}])
def test_numbers_without_effect_or_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"has no effect with the optimiser 'adamw'|less than 1|greater than or"):
        TrainSettings.model_validate({"tokens": 1, "optimiser": given})


def test_rubbish_to_learn_from_is_refused_before_any_stage_runs(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "hello?"}]}\n')
    with pytest.raises(UserError, match=r"talks.jsonl, line 1: no assistant message, so nothing to learn$"):
        STAGES["sft"].check(SftSettings(conversations=[str(tmp_path / "talks.jsonl")]))
    with pytest.raises(UserError, match=r"^sft.template 'mine.jinja' is not "):
        STAGES["sft"].check(SftSettings(code=str(tiny.write_tree(tmp_path / "code")), template="mine.jinja"))
