"""`etude data build` and `etude data report`, as the shell sees them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from etude.lineage.record import load_record
from tests import tiny
from tests.conftest import Etude
from tests.data.planted import MIT, code

SCRUB_OFF = "filters = { scrub = false }\n"  # the detector takes a second to start


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name in ("apple", "birch", "cedar"):
        (tmp_path / "code" / name).mkdir(parents=True)
        (tmp_path / "code" / name / "LICENSE").write_text(MIT)
        for module in ("core", "tools"):
            (tmp_path / "code" / name / f"{module}.py").write_text(code(f"{name}.{module}"))
    file = tmp_path / "recipe.toml"
    source = f'[[data.source]]\nname = "mine"\nfolder = "{tmp_path / "code"}"\n'
    file.write_text(
        f'name = "mine"\nbase = "sprout"\n[data]\nlength = 256\nheldout = 0.3\nworkers = 1\n{SCRUB_OFF}{source}'
    )
    return file


def test_build_and_report(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    built = etude("data", "build", recipe, "--out", out, "--cache", tmp_path / "cache")
    assert built.code == 0, built.err
    assert "mine" in built.out
    record = load_record(out / "data")
    assert record.data[0].licences == {"MIT": record.data[0].bytes}
    assert record.summary["tokens"] == record.data[0].tokens
    assert {"manifest.json", "report.html", "report.md", "report.png", "samples.json"} <= set(record.outputs)
    told = json.loads(etude("data", "report", out, "--json").out)
    assert told["digest"] == record.summary["corpus"]
    assert told["sources"][0]["documents_in"] == 9
    for place in (out, out / "data"):
        assert "report.html" in etude("data", "report", place).out
    etude("data", "report", out, "--out", tmp_path / "page")
    assert (tmp_path / "page" / "report.png").read_bytes() == (out / "data" / "report.png").read_bytes()
    alone, in_run = ((place / "report.md").read_text() for place in (tmp_path / "page", out / "data"))
    assert in_run.startswith(alone.rstrip())  # and then the way to the run's other reports
    assert "../report.html" in in_run.removeprefix(alone.rstrip())


def test_a_second_build_keeps_it_and_another_folder_takes_it_over(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    words = ("data", "build", recipe, "--cache", tmp_path / "cache", "--out")
    assert "data: done" in etude(*words, tmp_path / "one").err
    assert "data: unchanged, kept" in etude(*words, tmp_path / "one").err
    assert "data: reused from" in etude(*words, tmp_path / "two").err
    assert "data: unchanged, kept" in etude(*words, tmp_path / "one", "--set", "data.workers=2").err
    (tmp_path / "code" / "apple" / "new.py").write_text(code("new"))
    assert "data: its inputs changed" in etude(*words, tmp_path / "one").err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "data.tokeniser.source=nowhere"], "data.tokeniser.source 'nowhere' is neither"),
        (["--set", 'data.contamination.tasks=["nowhere"]'], "benchmark tasks 'nowhere' do not exist"),
        (["--set", "data.separator=<nothing>"], "data.separator '<nothing>' is not a token"),
        (["--set", 'data.source=[{name="x", folder="/nowhere"}]'], "/nowhere"),
        (["--set", "data.source=[]"], "data.source"),
        (["--set", 'data.tokeniser={source="train", vocabulary=50000}'], "lower data.tokeniser.vocabulary"),
    ],
)
def test_mistakes_are_one_line(etude: Etude, recipe: Path, tmp_path: Path, words: list[str], says: str) -> None:
    said = etude("data", "build", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache", *words)
    assert said.code == 2
    assert says in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "run" / "data").exists()


def test_without_a_base_the_tokeniser_must_be_trained(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace('base = "sprout"\n', ""))
    words = ("data", "build", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    refused = etude(*words)
    assert refused.code == 2
    assert "data.tokeniser needs a base" in refused.err
    assert etude(*words, "--set", 'data.tokeniser={source="train", vocabulary=400}').code == 0


def test_a_recipe_without_a_corpus_is_refused(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        f'name = "x"\nbase = "{tmp_path}"\nstages = ["compare"]\n[compare]\non = "{tmp_path}"\n'
    )
    said = etude("data", "build", tmp_path / "r.toml")
    assert said.code == 2
    assert "describes no corpus" in said.err


@pytest.mark.parametrize("damage", [b"", b"{}", b"no json"])
def test_a_report_of_no_corpus_is_refused(etude: Etude, tmp_path: Path, damage: bytes) -> None:
    if damage:
        (tmp_path / "manifest.json").write_bytes(damage)
    said = etude("data", "report", tmp_path)
    assert said.code == 2
    assert "Traceback" not in said.err


def test_dry_run_writes_nothing(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    said = etude("data", "build", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--dry-run")
    assert said.code == 0
    assert "data: would run" in said.out
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_in_one_line_and_goes_on_later(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting needs root")
    try:
        base = tiny.save_model(tmp_path / "tiny")
        changes = ("--set", f"base={base}", "--set", "data.separator=<|end|>")
        words = ("data", "build", recipe, "--out", place / "run", "--cache", tmp_path / "cache", *changes)
        said = etude(*words)
        assert said.code == 2
        assert "no space left on the device" in said.err
        assert not (place / "run" / "data").exists()
        subprocess.run(["mount", "-o", "remount,size=50m", place], check=True)
        assert etude(*words).code == 0
    finally:
        subprocess.run(["umount", place], check=True)


def test_replay_names_its_teacher(etude: Etude, recipe: Path, tmp_path: Path) -> None:
    replay = 'data.replay={share=0.1, source="self", tokens=64, length=16, batch=4}'
    said = etude("data", "build", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--set", replay)
    assert said.code == 0, said.err
    record, base = load_record(tmp_path / "run" / "data"), load_record(tmp_path / "run" / "base")
    assert [(parent.role, parent.record) for parent in record.parents] == [("teacher", base.id)]
    assert record.compute.tokens == 64
    assert record.compute.model_flops > 0
    assert record.compute.device is not None


def test_a_password_in_an_address_is_refused(etude: Etude, recipe: Path) -> None:
    said = etude("data", "build", recipe, "--set", 'data.source=[{name="x", git="https://me:secret@host/x.git"}]')
    assert said.code == 2
    assert "`git` holds a password" in said.err
