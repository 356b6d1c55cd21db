"""The `mtp` stage and what becomes of heads after it, through the command line: a chain on a tiny base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.lineage.compute import forward_flops
from etude.lineage.record import load_lineage, load_record
from etude.models.load import load_model
from etude.models.mtp_heads import load_heads
from etude.models.shape import HEADS_FILE, heads_shape, model_shape
from tests.conftest import Etude
from tests.run.test_training_stages import run, write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = """
name = "heads"
base = "{base}"
stages = ["mtp", "extend", "sft", "cpt"]
[data]
length = 2048
heldout = 0.2
separator = "<|end|>"
workers = 1
filters = {{ scrub = false, min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }}
duplicates = {{ near = false }}
[[data.source]]
name = "rows"
jsonl = "{rows}"
unknown = "keep"
[mtp]
depth = 2
tokens = 20_480
length = 128
batch = 16
evaluations = 1
evaluation_rows = 4
optimiser = {{ lr = 3e-3 }}
[extend]
tokens = 4096
length = 2048
batch = 1
evaluations = 0
evaluation_rows = 2
retrieval_items = 0
position_rows = 0
mtp = {{ weight = 0.3, detach = false }}
[sft]
conversations = ["{chats}"]
tokens = 1024
length = 256
batch = 2
evaluations = 0
heldout = 0.3
mtp = {{ }}
[cpt]
tokens = 2048
length = 256
batch = 8
evaluations = 0
evaluation_rows = 2
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: heads, trained along twice, and carried along once."""
    folder = tmp_path_factory.mktemp("heads")
    write_inputs(folder)
    recipe = folder / "heads.toml"
    recipe.write_text(RECIPE.format(base=folder / "base", rows=folder / "rows.jsonl", chats=folder / "chats.jsonl"))
    assert run("run", recipe, "--out", folder / "run", "--cache", folder / "cache") == 0
    return folder / "run"


def results(stage: Path) -> Any:
    return json.loads((stage / "results.json").read_text())


def test_the_model_beneath_stays_as_it_is(chain: Path) -> None:
    parent, child = chain / "base" / "model", chain / "mtp" / "model"
    assert (child / "model.safetensors").read_bytes() == (parent / "model.safetensors").read_bytes()
    assert (child / "config.json").read_bytes() == (parent / "config.json").read_bytes()
    assert heads_shape(child) == (2, True)
    assert set(load_record(chain / "mtp").weights) == {"model.safetensors", HEADS_FILE}
    assert load_heads(child, load_model(child, torch.device("cpu"), torch.float32)) is not None


def test_acceptance_is_measured_and_rises(chain: Path, etude: Etude) -> None:
    table = results(chain / "mtp")["acceptance"]
    assert [(row["domain"], row["depth"]) for row in table] == [("code", 1), ("code", 2)]
    assert all(0 < row["before"] < row["after"] < 1 for row in table)
    measured = [row for row in metrics(chain / "mtp") if row["key"].startswith("eval/")]
    assert len(measured) == 3  # before, during, after
    assert measured[-1]["acceptance"]["code"] == [row["after"] for row in table]
    said = etude("run", chain / "recipe.toml", "--out", chain, "--cache", chain.parent / "cache")
    assert f"{table[0]['after']:.3f}" in said.out
    assert f"{table[1]['after']:.3f}" in (chain / "mtp" / "report.md").read_text()


def metrics(stage: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]


def test_the_record_says_what_was_spent(chain: Path) -> None:
    record = load_record(chain / "mtp")
    trunk = forward_flops(model_shape(chain / "mtp" / "model").compute, 1) * 20_480
    assert record.compute.tokens == 20_480
    assert record.compute.model_flops > trunk  # its forward pass, and the heads
    assert [use.name for use in record.data] == ["rows"]
    lineage = load_lineage(chain / "cpt" / "model")
    assert {each.stage for each in lineage.records.values()} >= {"base", "mtp", "extend", "sft", "cpt"}


@pytest.mark.parametrize("stage", ["extend", "sft"])
def test_heads_are_trained_along(chain: Path, stage: str) -> None:
    parent = {"extend": "mtp", "sft": "extend"}[stage]
    before, after = (load_file(chain / name / "model" / HEADS_FILE) for name in (parent, stage))
    assert set(before) == set(after)
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert {row["depth"] for row in results(chain / stage)["acceptance"]} == {1, 2}
    assert results(chain / stage)["domains"]  # and the trunk is measured as ever
    steps = [row for row in metrics(chain / stage) if row["key"].startswith("train/")]
    weight = {"extend": 0.3, "sft": 0.1}[stage]
    for row in steps:
        assert row["loss"] == pytest.approx(row["next_token"] + weight * row["mtp"], rel=1e-5)


def test_heads_that_are_not_trained_come_along_and_it_is_said(chain: Path) -> None:
    heads = [(chain / stage / "model" / HEADS_FILE).read_bytes() for stage in ("sft", "cpt")]
    assert heads[0] == heads[1]
    assert any("came along untrained" in note for note in results(chain / "cpt")["notes"])
    assert json.loads((chain / "cpt" / "model" / "model.safetensors.index.json").read_text())["weight_map"]


def test_bad_wishes_are_refused(tmp_path: Path, etude: Etude) -> None:
    write_inputs(tmp_path)
    recipe = tmp_path / "bad.toml"
    text = RECIPE.format(base=tmp_path / "base", rows=tmp_path / "rows.jsonl", chats=tmp_path / "chats.jsonl")
    where = ("--out", tmp_path / "run", "--cache", tmp_path / "cache")
    for old, new, said in [
        ("depth = 2", 'dtype = "bfloat16"', "`dtype` has no effect here"),
        ("mtp = { }", "mtp = { }\nlora = { rank = 2 }", "leave one of the two out"),
        ('stages = ["mtp", "extend", "sft", "cpt"]', 'stages = ["extend", "mtp", "sft", "cpt"]', "has no MTP heads"),
    ]:
        assert old in text
        recipe.write_text(text.replace(old, new))
        found = etude("run", recipe, *where)
        assert found.code == 2
        assert said in found.err
