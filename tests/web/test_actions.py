"""What the page changes: as the command line does, and no more than was asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.files import read_json
from etude.web import actions
from etude.web.reading import Run
from tests.web.made import STAGE, WEIGHTS, Growing, head

HOLD = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from pathlib import Path; from etude.run.folder import lock_run\nwith lock_run(Path(sys.argv[1]), print):\n print('held', flush=True); sys.stdin.read()"
FULL = {"outcome": 1.0, "length": 0.1, "style": 0.05, "communication": 0.05, "conduct": 0.1}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    Growing(head(tmp_path / "run")).train(1)
    return Run("run", tmp_path / "run", None)


def test_new_weights_are_left_where_the_run_looks_for_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.rl.ledger import Weighted, to_line

    with (run.folder / STAGE / "ledger.jsonl").open("ab") as ledger:
        ledger.write(to_line(Weighted(FULL, 2)))
    assert (
        actions.weigh(run, {"stage": "rl", "length": "0.25"})
        == "wanted: outcome 1, length 0.25, style 0.05, communication 0.05, conduct 0.1"
    )
    assert actions.weigh(run, {"stage": "rl", "style": 0}).startswith("wanted: outcome 1, length 0.25, style 0,")
    assert read_json(run.folder / STAGE / "reward_weights.json") == {"length": 0.25, "style": 0.0}
    for wanted, said in (
        ({"lenght": 1}, "no part 'lenght'"),
        ({"length": "much"}, "a weight is a number"),
        ({"length": -1}, "greater than or equal"),
        ({"length": "nan"}, "finite"),
    ):
        with pytest.raises(UserError, match=said):
            actions.weigh(run, {"stage": "rl", **wanted})
    assert read_json(run.folder / STAGE / "reward_weights.json") == {"length": 0.25, "style": 0.0}
    with pytest.raises(KeyError):
        actions.weigh(run, {"stage": "../rl"})


def test_only_the_process_that_holds_the_lock_is_asked_to_stop(run: Run) -> None:
    with pytest.raises(UserError, match="nobody is at work on run"):
        actions.stop(run, {})
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(run.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = run.folder / "lock"
        true = lock.read_bytes()
        lock.write_text(json.dumps({"pid": os.getppid(), "host": "x", "name": "x"}))  # a lie
        with pytest.raises(UserError, match="not a process of this machine"):
            actions.stop(run, {})
        lock.write_bytes(true)
        assert actions.stop(run, {}).startswith(f"process {holder.pid} stops at the next safe place")
        assert holder.wait() in {-signal.SIGINT, 1, 130}


def test_a_run_is_continued_by_its_recipe_and_not_by_the_words_of_its_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Begun:
        pid = 7

        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    about = read_json(run.folder / "run.json") | {"command": "rm -rf /"}
    (run.folder / "run.json").write_text(json.dumps(about))
    assert "process 7 goes on" in actions.go_on(run, {})
    assert started == [
        [sys.executable, "-P", "-m", "etude", "run", str(run.folder / "recipe.toml"), "--out", str(run.folder)]
    ]
    (run.folder / "recipe.toml").unlink()
    with pytest.raises(UserError, match=r"no recipe\.toml"):
        actions.go_on(run, {})


def test_the_forms_are_there_when_they_can_do_something(run: Run) -> None:
    assert "Continue this run" in actions.steering(run)
    assert actions.weights_form(run.stage("rl"), WEIGHTS) == ""  # it is stopped
