"""`etude rl` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.files import read_json, write_json
from etude.rl.ledger import Ledger, Weighted
from etude.run.folder import lock_run
from tests.conftest import Etude
from tests.rl.runs import write

WEIGHTS = {"outcome": 1.0, "length": 0.1, "style": 0.05, "communication": 0.05, "conduct": 0.1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose rl stage is at work."""
    stages = [{"name": "sft", "kind": "sft"}, {"name": "first", "kind": "rl"}, {"name": "later", "kind": "rl"}]
    write_json(tmp_path / "run/run.json", {"name": "r", "stages": stages, "command": "etude run r.toml"})
    work = write(tmp_path / "run/.work/first-0123456789ab", 4)
    Ledger(work / "ledger.jsonl").append(Weighted(WEIGHTS, 1))
    return tmp_path / "run"


def finish(run: Path) -> Path:
    """Publish the stage; what lies in its record does not matter here."""
    folder = (run / ".work/first-0123456789ab").rename(run / "first")
    (folder / "record.json").write_text("{}")
    return folder


def test_a_report_on_a_run_that_goes_on_and_on_its_stage(etude: Etude, run: Path, tmp_path: Path) -> None:
    work = run / ".work/first-0123456789ab"
    said = etude("rl", "report", run)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "4 steps, 16 episodes, 8 s"
    assert said.out.splitlines()[-1] == f"report: {work}/report.html"
    for place in (run / "first", work):  # the stage by its name, and by its folder
        assert etude("rl", "report", place, "--out", tmp_path / "page").out.endswith(f"{tmp_path}/page/report.html\n")
    assert (tmp_path / "page/report.html").read_bytes() == (work / "report.html").read_bytes()


def test_the_report_of_a_finished_stage_is_not_written_again(etude: Etude, run: Path) -> None:
    folder = finish(run)
    (folder / "report.html").write_text("as recorded")
    for place in (run, folder):
        assert f"report: {folder}/report.html" in etude("rl", "report", place).out
    assert (folder / "report.html").read_text() == "as recorded"
    assert not (folder / "report.md").exists()


def test_weights_are_wished_for_and_add_up(etude: Etude, run: Path) -> None:
    wish = run / ".work/first-0123456789ab/reward_weights.json"
    said = etude("rl", "weights", run, "length=0.2")
    assert said.out.splitlines()[0] == "wanted: outcome 1, length 0.2, style 0.05, communication 0.05, conduct 0.1"
    assert read_json(wish) == {"length": 0.2}
    etude("rl", "weights", run, "conduct=0", "length=1e-1")
    assert read_json(wish) == {"length": 0.1, "conduct": 0.0}


@pytest.mark.parametrize(("words", "said"), [
    (["lenght=1"], "did you mean 'length'"), (["length"], "PART=NUMBER"), (["length=much"], "PART=NUMBER"), (["length=nan"], "PART=NUMBER"),
    (["length=inf"], "PART=NUMBER"), (["=1"], "no part ''"), (["length=-1"], "greater than or equal to 0"),
    ([f"{part}=0" for part in WEIGHTS], "all weights of the reward are 0"),
])  # fmt: skip
def test_weights_that_cannot_be_are_one_line(etude: Etude, run: Path, words: list[str], said: str) -> None:
    told = etude("rl", "weights", run, *words)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert said in told.err
    assert not (run / ".work/first-0123456789ab/reward_weights.json").exists()


def test_weights_of_what_is_over_or_has_not_begun_are_refused(etude: Etude, run: Path) -> None:
    (run / ".work/first-0123456789ab/ledger.jsonl").unlink()
    assert "has not begun" in etude("rl", "weights", run, "length=1").err
    finish(run)
    told = etude("rl", "weights", run, "length=1")
    assert (told.code, "is finished" in told.err) == (2, True)


def test_watch_shows_a_run_once_where_nobody_is_at_work(etude: Etude, run: Path) -> None:
    state = {"done": 4, "total": 9, "seconds": 8.0, "seconds_left": 10.0, "now": {"ready": 2}}
    (run / ".work/first-0123456789ab/progress.json").write_text(json.dumps(state))
    shown = etude("rl", "watch", run).out
    assert "step 4 of 9, 8 s, 10 s left" in shown
    assert "ready 2" in shown
    assert "best of group" in shown
    with lock_run(run, print):
        assert etude("rl", "watch", run).out == shown  # in a pipe, also while somebody is


@pytest.mark.parametrize("command", [["report"], ["watch"], ["weights", "length=1"]])
def test_what_is_no_rl_run_is_one_line(etude: Etude, tmp_path: Path, command: list[str]) -> None:
    name, *more = command
    write_json(
        tmp_path / "other/run.json",
        {"name": "r", "stages": [{"name": "sft", "kind": "sft"}], "command": "etude run r.toml"},
    )
    for place, words in (
        (tmp_path / "absent", "no run.json"),
        (tmp_path / "other", "no rl stage"),
        (tmp_path / "other/sft", "no rl stage"),
    ):
        told = etude("rl", name, place, *more)
        assert (told.code, told.out, told.err.count("\n")) == (2, "", 1), told
        assert words in told.err
        assert str(place) in told.err
