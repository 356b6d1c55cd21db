"""Releasing and verifying from the command line: a child of sprout, trained by the real stages."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.bench.agents import weights_mark
from etude.bench.trials import Header, Trial, TrialLog
from etude.lineage import signing
from etude.lineage.record import Parent, load_record
from etude.progress import Reporter
from etude.recipe.recipe import load_recipe
from etude.run.runner import Runner, stage_settings
from etude.run.stages import STAGES
from tests.lineage import releases
from tests.lineage.records import full_record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Etude

RECIPE = """
name = "child"
base = "sprout"
stages = ["cpt"]
[data]
length = 512
heldout = 0.2
workers = 1
filters = {{ scrub = false, min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }}
duplicates = {{ near = false }}
[[data.source]]
name = "rows"
jsonl = "{rows}"
unknown = "keep"
[cpt]
tokens = 1024
length = 256
batch = 4
evaluations = 0
evaluation_rows = 1
"""
KNOW = ("--acknowledge", "unknown-data")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that trained sprout on data of unknown licence, and a key."""
    folder = tmp_path_factory.mktemp("sprout")
    rows = [{"text": f"def add_{number}(value):\n    return value + {number}\n" * 9} for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "child.toml").write_text(RECIPE.format(rows=folder / "rows.jsonl"))
    recipe = load_recipe([folder / "child.toml"], [], stage_settings())
    Runner(folder / "run", folder / "cache", Reporter(quiet=True), STAGES).execute(recipe)
    signing.make_key(folder / "key.pem")
    (folder / "owner.pub").write_bytes(signing.public_pem(folder / "key.pem"))
    return folder


@pytest.fixture
def released(etude: Etude, place: Path, tmp_path: Path) -> Path:
    """A release of it, a test's own."""
    if not (place / "out").exists():
        said = etude(
            "release", place / "run", place / "out", *KNOW, "--key", place / "key.pem", "--cache", place / "cache"
        )
        assert said.code == 0, said.err
        assert signing.fingerprint((place / "owner.pub").read_bytes()) in said.out
    return shutil.copytree(place / "out", tmp_path / "received")


def test_unknown_data_is_refused_until_it_is_acknowledged(etude: Etude, place: Path, tmp_path: Path) -> None:
    said = etude("release", place / "run", tmp_path / "out", "--key", place / "key.pem", "--cache", place / "cache")
    assert said.code == 1
    (told,) = [line for line in said.err.splitlines() if line.startswith("refused")]
    assert told.startswith("refused (data): data of unknown licence went in: rows;")
    assert list(tmp_path.iterdir()) == []


def test_a_child_of_sprout_verifies_with_and_without_its_owners_key(etude: Etude, place: Path, released: Path) -> None:
    said = etude("verify", released, "--cache", place / "cache")
    assert said.code == 0, said.out
    assert said.out.splitlines()[-1] == f"verified: {released}"
    assert "compare it with what the owner publishes" in said.out
    found = json.loads(
        etude("verify", released, "--key", place / "owner.pub", "--cache", place / "cache", "--json").out
    )
    assert found["verified"] is True
    assert found["key"] == {"fingerprint": signing.fingerprint((place / "owner.pub").read_bytes()), "given": True}
    assert {check["check"]: check["outcome"] for check in found["checks"]}["base"] == "ok"


def test_every_damage_has_its_own_line(etude: Etude, place: Path, released: Path) -> None:
    weights = bytearray((released / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (released / "model.safetensors").write_bytes(weights)
    (released / "LICENSES/sprout/LICENSE").unlink()
    releases.edit_record(released, "cpt")
    said = etude("verify", released, "--cache", place / "cache")
    assert said.code == 1
    assert "the weight file model.safetensors was changed after signing" in said.out
    assert "the licence file LICENSES/sprout/LICENSE was deleted after signing" in said.out
    assert "the record of stage cpt was edited" in said.out
    assert said.out.splitlines()[-1].startswith("NOT verified: 2 of ")


def test_other_weights_under_sprouts_name_are_found_out_by_the_library_that_ships(
    etude: Etude, place: Path, released: Path, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(released), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "other")
    releases.swap_weights(released, tmp_path / "other/model.safetensors", place / "key.pem")
    (released / signing.SIGNATURE).unlink()
    signing.sign_folder(released, place / "key.pem")
    found = json.loads(etude("verify", released, "--cache", place / "cache", "--json").out)
    failed = {check["check"]: check["lines"] for check in found["checks"] if check["outcome"] == "failed"}
    assert failed == {
        "base": ["the claimed base sprout was not found in these weights: no evidence of shared initialisation"]
    }


def bench(folder: Path, model: str) -> Path:
    header = Header(integrity={"network": "none"}, harness="etude 1", tasks="7" * 64, sampling={})
    with TrialLog(folder, header) as log:
        for number in range(4):
            log.add(Trial(model=model, task=f"t{number // 2}", package="p", category="repair", generator="g", style="terse",
                          number=number % 2, outcome="pass" if number else "fail"))  # fmt: skip
    return folder


def test_an_evaluation_of_this_model_goes_into_the_card_and_of_another_is_refused(
    etude: Etude, place: Path, tmp_path: Path
) -> None:
    words = ["release", place / "run", tmp_path / "out", *KNOW, "--key", place / "key.pem", "--cache", place / "cache"]
    said = etude(*words, "--evaluation", bench(tmp_path / "theirs", "child@abcdef"))
    assert said.code == 2
    assert "no valid trial" in said.err
    mark = weights_mark(place / "run/cpt/model")
    said = etude(*words, "--evaluation", bench(tmp_path / "ours", f"child@{mark}"))
    assert said.code == 0, said.err
    card = (tmp_path / "out/README.md").read_text()
    assert "avg@2" in card
    assert "0.75" in card


def test_a_stage_of_the_run_that_measured_these_weights_will_do(etude: Etude, place: Path, tmp_path: Path) -> None:
    words = ["release", place / "run", tmp_path / "out", *KNOW, "--key", place / "key.pem", "--cache", place / "cache"]
    made = load_record(place / "run/cpt")
    for digest, code in (("0" * 64, 2), (made.model_digest, 0)):
        folder = bench(tmp_path / f"code{code}", "cpt")
        parent = Parent(name="cpt", role="compared", record=made.id, model_digest=digest)
        full_record(stage="bench", kind="bench", parents=[parent]).save(folder)
        said = etude(*words, "--evaluation", folder)
        assert (said.code, "no valid trial" in said.err) == (code, code == 2), said.err
    assert "avg@2" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(("words", "told"), [
    (["release", "{place}/nowhere", "{tmp}/out"], "does not exist"),
    (["release", "{place}/run", "{place}/cache"], "exists"),
    (["release", "{place}/run", "{tmp}/out", "--acknowledge", "everything"], "unknown-data"),
    (["release", "{place}/run", "{tmp}/out", "--key", "{place}/owner.pub"], "private key"),
    (["release", "{place}/run", "{tmp}/out", "--evaluation", "{tmp}"], "etude bench"),
    (["verify", "{place}/run"], "not a release"),
    (["verify", "{place}/out", "--key", "{place}/none.pub"], "none.pub"),
    (["verify", "{place}/out", "--key", "{place}/rows.jsonl"], "public key"),
])  # fmt: skip
@pytest.mark.usefixtures("released")
def test_what_cannot_be_done_is_said_in_one_line(
    etude: Etude, place: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    key = ["--key", place / "key.pem"] if "release" in words and "--key" not in words else []
    said = etude(*(word.format(place=place, tmp=tmp_path) for word in words), *key, "--cache", place / "cache")
    assert said.code == 2
    assert len(said.err.strip().splitlines()) == 1
    assert told in said.err
