"""The stage `merge` through the command line: what it makes, whom it names as parents, whose licences travel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from etude.jsonl import read_rows
from etude.lineage.record import load_lineage, load_record
from tests import tiny
from tests.conftest import Etude, Said


class Run(Protocol):
    """Runs a recipe with one merge, in a folder named after the run."""

    def __call__(self, name: str, settings: str, base: Path = ..., *words: object) -> Said: ...


@pytest.fixture
def run(etude: Etude, tmp_path: Path, tiny_base: Path) -> Run:
    def call(name: str, settings: str, base: Path = tiny_base, *words: object) -> Said:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(f'name = "{name}"\nbase = "{base}"\nstages = ["merge"]\n[merge]\n{settings}\n')
        return etude("run", recipe, "--out", tmp_path / name, "--cache", tmp_path / "cache", *words)

    return call


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in sorted(folder.glob("model*.safetensors")) for name, value in load_file(file).items()
    }


def other_model(folder: Path, seed: int = 1) -> Path:
    tiny.save_model(folder, seed=seed)
    (folder / "LICENSE").write_text(f"Licence number {seed}.\n")
    return folder


def test_two_models_become_one_with_both_as_parents_and_both_licences(
    run: Run, tmp_path: Path, tiny_base: Path
) -> None:
    other = other_model(tmp_path / "other")
    said = run("two", f'method = "linear"\nothers = ["{other}"]\nweights = [3.0, 1.0]')
    assert said.code == 0, said.err
    assert "linear of base, other" in said.out
    model = tmp_path / "two/merge/model"
    found, one, two = weights(model), weights(tiny_base), weights(other)
    assert all(torch.allclose(found[name], 0.75 * one[name] + 0.25 * two[name], atol=1e-6) for name in one)
    assert AutoModelForCausalLM.from_pretrained(model).config.hidden_size == 32
    record = load_record(tmp_path / "two/merge")
    assert [(edge.name, edge.role, bool(edge.record)) for edge in record.parents] == [
        ("base", "weights", True),
        ("other", "weights", False),
    ]
    assert record.compute.model_flops == 0
    texts = {(model / carried.file).read_text() for carried in record.licences}
    assert texts == {"Tiny Licence: do as you like.\n", "Licence number 1.\n"}


def test_parents_that_carry_a_tree_bring_it_and_the_common_base_is_known_by_its_weights(
    run: Run, tmp_path: Path, tiny_base: Path
) -> None:
    for name, seed in (("left", 1), ("right", 2)):
        other = other_model(tmp_path / f"{name}-other", seed)
        assert run(name, f'method = "slerp"\nothers = ["{other}"]').code == 0
    settings = f'method = "ties"\nothers = ["{tmp_path / "right"}"]\nancestor = "{tiny_base}"'
    assert run("both", settings, tmp_path / "left/merge/model").code == 0
    lineage = load_lineage(tmp_path / "both/merge/model")
    head = lineage.records[lineage.head]
    right, base = (load_record(tmp_path / f"right/{stage}") for stage in ("merge", "base"))
    assert [edge.name for edge in head.parents] == ["base", "merge", "tiny"]
    assert head.parents[1].record == right.id
    assert head.parents[2].record is not None
    assert lineage.records[head.parents[2].record].model_digest == base.model_digest
    assert {"Licence number 1.\n", "Licence number 2.\n"} < {
        (tmp_path / "both/merge/model" / carried.file).read_text() for carried in head.licences
    }


def test_it_is_kept_until_another_model_changes_and_one_with_a_tree_may_move(run: Run, tmp_path: Path) -> None:
    other = other_model(tmp_path / "other")
    assert run("made", f'method = "linear"\nothers = ["{other}"]').code == 0
    third = f'method = "linear"\nothers = ["{tmp_path / "made/merge"}"]'
    assert run("again", third).code == 0
    (tmp_path / "made").rename(tmp_path / "moved")
    assert "merge: unchanged" in run("again", third.replace("made", "moved")).err
    first = load_record(tmp_path / "moved/merge")
    tiny.save_model(other, seed=5)
    assert run("moved", f'method = "linear"\nothers = ["{other}"]').code == 0
    assert load_record(tmp_path / "moved/merge").model_digest != first.model_digest


def test_files_that_are_done_are_not_done_again(run: Run, tmp_path: Path) -> None:
    base, other = tmp_path / "sharded", other_model(tmp_path / "other")
    tiny.save_model(base)
    (base / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(other).save_pretrained(base, max_shard_size="40KB")
    other_model(other, seed=3)
    settings = f'method = "linear"\nothers = ["{other}"]'
    assert run("cut", settings, base).code == 0
    whole = weights(tmp_path / "cut/merge/model")
    assert len(list((tmp_path / "cut/merge/model").glob("model-*.safetensors"))) > 2
    fingerprint = load_record(tmp_path / "cut/merge").fingerprint
    work = tmp_path / f"cut/.work/merge-{fingerprint[:12]}"
    work.parent.mkdir(exist_ok=True)
    (tmp_path / "cut/merge").rename(work)  # as a kill after the first file would have left it
    (work / "record.json").unlink()
    log = (work / "metrics.jsonl").read_text().splitlines(keepends=True)
    (work / "metrics.jsonl").write_text("".join(log[:2]))
    done = json.loads(log[1])["key"]
    for file in (work / "model").iterdir():
        if file.is_file() and file.name != done:
            file.unlink()
    before = (work / "model" / done).stat().st_mtime_ns
    assert run("cut", settings, base).code == 0
    model = tmp_path / "cut/merge/model"
    assert (model / done).stat().st_mtime_ns == before
    assert all(torch.equal(value, weights(model)[name]) for name, value in whole.items())
    assert len([row for row in read_rows(tmp_path / "cut/merge/metrics.jsonl") if row["key"] == done]) == 1


def test_what_makes_no_sense_is_refused(run: Run, tmp_path: Path, tiny_base: Path) -> None:
    same = run("same", f'method = "linear"\nothers = ["{tiny_base}"]')
    assert (same.code, "has the same weights as base" in same.err) == (2, True)
    gone = run("gone", 'method = "linear"\nothers = ["./nowhere"]', tiny_base, "--dry-run")
    assert (gone.code, "'./nowhere' does not exist" in gone.err) == (2, True)
    other = other_model(tmp_path / "other")
    assert run("made", f'method = "linear"\nothers = ["{other}"]').code == 0
    model = tmp_path / "made/merge/model"
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    swapped = run("swapped", f'method = "linear"\nothers = ["{model}"]')
    assert (swapped.code, "are not those its lineage.json names" in swapped.err) == (2, True)


def test_it_needs_a_model_before_it(etude: Etude, tmp_path: Path, tiny_base: Path) -> None:
    recipe = tmp_path / "none.toml"
    recipe.write_text(f'name = "none"\nstages = ["merge"]\n[merge]\nmethod = "linear"\nothers = ["{tiny_base}"]\n')
    said = etude("run", recipe, "--out", tmp_path / "none", "--cache", tmp_path / "cache")
    assert (said.code, "merge needs a model to start from" in said.err) == (2, True)


def test_models_of_one_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    folders = [other_model(tmp_path / side / "same", seed) for side, seed in (("a", 1), ("b", 2))]
    assert run("names", f'method = "linear"\nothers = ["{folders[0]}", "{folders[1]}"]').code == 0
    assert [edge.name for edge in load_record(tmp_path / "names/merge").parents] == ["base", "same", "same-2"]
    assert len(load_record(tmp_path / "names/merge").licences) == 3


def test_the_shipped_recipe_would_run(etude: Etude, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes/merge.toml"
    where = ["--cache", tmp_path, "--out", tmp_path / "run", "--set", f"compare.on={tmp_path}"]
    tiny.write_tree(tmp_path / "code")
    said = etude("run", recipe, "--dry-run", *where)
    assert said.out.endswith("base: would run\ndata: would run\ncpt: would run\nmerge: would run\ncompare: would run\n")
