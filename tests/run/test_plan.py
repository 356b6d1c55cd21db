"""What a dry run refuses: all that can be known before the first stage runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.progress import Reporter
from etude.recipe.recipe import Recipe, load_recipe
from etude.run.runner import Runner, stage_settings
from etude.run.stages import STAGES
from tests import tiny

TASKS = Path(__file__).parents[2] / "recipes/tasks/quick.jsonl"
RECIPE = """
name = "plan"
base = "sprout"
stages = ["cpt", "extend", "mtp", "sft", "rl", "bench", "release"]
[data]
length = 4096
[[data.source]]
name = "mine"
folder = "code"
[cpt]
tokens = 1_000_000
length = 1024
batch = 8
[extend]
tokens = 1_000_000
length = 4096
[mtp]
tokens = 1_000_000
[sft]
code = "code"
length = 4096
mtp = { weight = 0.1 }
[rl]
tasks = "TASKS"
[bench]
tasks = "TASKS"
"""


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> tuple[Runner, Recipe]:
    tiny.write_tree(folder / "code")
    (folder / "plan.toml").write_text(RECIPE.replace("TASKS", str(TASKS)))
    monkeypatch.chdir(folder)
    runner = Runner(folder / "run", folder / "cache", Reporter(quiet=True), STAGES)
    return runner, load_recipe([folder / "plan.toml"], changes, stage_settings())


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


LATER = {  # what was refused only when its turn came: stage, changes, and what is said
    "cuda without a GPU": ("cpt", ['cpt.device="cuda"'], "torch sees no GPU"),
    "cuda for rollouts": ("rl", ['rl.device="cuda"'], "rl: device = 'cuda', but torch sees no GPU"),
    "pretrain with a base": ("pretrain", ['stages=["pretrain"]', "pretrain.tokens=1_000_000"], "this recipe has a base"),
    "pretrain after another stage": ("pretrain", ['stages=["cpt", "pretrain"]', "pretrain.tokens=1_000_000"], "cpt comes before it"),
    "rows beyond the context": ("cpt", ["cpt.length=4096"], "cpt: rows of 4096 tokens are longer than the model's context of 2048"),
    "demonstrations beyond the context": ("sft", ["sft.length=8192"], "longer than the model's context of 4096"),
    "rows of rl beyond the context": ("rl", ["rl.length=8192"], "longer than the model's context of 4096"),
    "no extension": ("extend", ["extend.length=2048"], "already has a context of 2048"),
    "rows too short to extend on": ("extend", ["extend.length=8192"], "too short for 8192"),
    "rows that cannot be cut": ("cpt", ["cpt.length=1000"], "must be a multiple"),
    "an unknown domain": ("cpt", ["cpt.shares={ cod = 1.0 }"], "did you mean 'code'"),
    "heads that nobody made": ("sft", ['stages=["cpt", "extend", "sft"]'], "has no MTP heads"),
    "heads thrown away": (
        "again", ['stages=["mtp", "again"]', 'again.kind="mtp"', "again.tokens=1_000_000", "again.depth=2", "mtp.length=2048", "again.length=2048"],
        "a stage before it makes heads (depth = 3, shared = true)",
    ),
    "less than a step": ("cpt", ["cpt.tokens=8191"], "cpt.tokens = 8191 is less than one step of 8 rows × 1024 = 8192 tokens"),
    "a path for a name": ("release", ['release.name="a/b"'], "release.name 'a/b' cannot name a model"),
    "release of the base": ("release", ['stages=["release", "cpt"]'], "would release the base unchanged; put it after cpt"),
    "nothing to start from": ("sft", ['stages=["sft"]'], "needs a model to start from"),
    "no tokeniser": ("data", ['stages=["sft"]'], "data.tokeniser needs a base"),
    "an engine that is not there": ("rl", [f'rl.engine="http://127.0.0.1:{closed_port()}"'], "127.0.0.1"),
    "replay beyond the context": ("data", ['data.replay={ share = 0.1, source = "self", length = 2048 }'], "context of 2048"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_what_would_be_refused_later_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stage, changes, said = LATER[name]
    runner, recipe = planned(tmp_path, monkeypatch)
    if changes[0].startswith("stages"):  # tables of stages that are left out would be refused for that
        listed = changes[0].partition("=")[2]
        kept = [
            part
            for part in RECIPE.split("\n[")
            if part.split("]")[0].strip("[") in listed or "data" in part.split("]")[0]
        ]
        text = "\n[".join([RECIPE.split("\n[", maxsplit=1)[0], *kept]).replace("TASKS", str(TASKS))
        if name in {"nothing to start from", "no tokeniser"}:
            text = text.replace('base = "sprout"\n', "").replace("mtp = { weight = 0.1 }\n", "")
        (tmp_path / "plan.toml").write_text(text)
    recipe = load_recipe([tmp_path / "plan.toml"], changes, stage_settings())
    lacks = {step.entry.name: step.lacks or "" for step in runner.plan(recipe)}
    assert said in lacks[stage], lacks
    with pytest.raises(UserError):
        runner.execute(recipe)
    assert not (tmp_path / "run").exists()


def test_what_is_right_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, recipe = planned(tmp_path, monkeypatch)
    assert [step.lacks for step in runner.plan(recipe)] == [None] * 9


def test_a_base_without_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.save_model(tmp_path / "empty")
    (base / "model.safetensors").unlink()
    runner, recipe = planned(tmp_path, monkeypatch, f"base={base}")
    assert "empty" in str(runner.plan(recipe)[0].lacks)


def test_a_folder_with_other_files_is_refused_in_a_plan_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, recipe = planned(tmp_path, monkeypatch)
    tiny.write_tree(tmp_path / "run")
    with pytest.raises(UserError, match="is not empty and not a run"):
        runner.plan(recipe)
