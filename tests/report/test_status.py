from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from etude.errors import Interrupted, UserError
from etude.progress import Reporter
from etude.report.status import headline, run_status, status_table
from etude.run.folder import lock_run
from tests.run.toy import ScaleStage, recipe_of, runner


def shown(run: Path) -> str:
    screen = io.StringIO()
    Console(file=screen, width=200).print(status_table(run_status(run)))
    screen.write(headline(run_status(run)))
    return screen.getvalue()


@pytest.fixture
def stopped(tmp_path: Path, tiny_base: Path) -> Path:
    """A run stopped in the middle of its second stage."""
    stage = ScaleStage()
    stops: list[int] = []

    def check_stop() -> None:
        if len(stops) == 6:
            raise Interrupted(2)

    stage.on_step = stops.append
    recipe = recipe_of(tiny_base, {"one": {}, "two": {}, "three": {}})
    with pytest.raises(Interrupted):
        runner(tmp_path / "run", tmp_path / "cache", stage, Reporter(quiet=True), check_stop).execute(recipe)
    return tmp_path / "run"


def test_states_of_a_stopped_run(stopped: Path) -> None:
    status = run_status(stopped)
    assert [(stage.name, stage.state) for stage in status.stages] == [
        ("base", "done"), ("one", "done"), ("two", "stopped"), ("three", "waiting"),
    ]  # fmt: skip
    assert status.stages[1].summary == {"by": 1.5}
    assert "nobody is at work; continue with: " in shown(stopped)
    assert "scaling: 2 of 4 steps" in shown(stopped)


def test_a_run_at_work_shows_rate_and_time_left(stopped: Path) -> None:
    with lock_run(stopped, print):
        status = run_status(stopped)
        assert status.stages[2].state == "running"
        assert status.owner is not None
        text = shown(stopped)
    assert f"process {status.owner['pid']} is at work" in text
    assert "steps/s" in text


def test_a_damaged_stage_is_called_that(stopped: Path) -> None:
    (stopped / "one/model/model.safetensors").unlink()
    assert run_status(stopped).stages[1].state == "damaged"


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        run_status(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="is damaged; run the recipe again"):
        run_status(tmp_path)


def test_a_finished_stage_that_runs_again_under_other_settings_is_not_done(tmp_path: Path, tiny_base: Path) -> None:
    stage = ScaleStage()
    quiet = Reporter(quiet=True)
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, {"one": {}}))

    def stop() -> None:
        if len(stage.log) == 6:
            raise Interrupted(2)

    changed = recipe_of(tiny_base, {"one": {"by": 9.0}})
    with pytest.raises(Interrupted):
        runner(tmp_path / "run", tmp_path / "cache", stage, quiet, stop).execute(changed)
    assert run_status(tmp_path / "run").stages[1].state == "stopped"
    runner(tmp_path / "run", tmp_path / "cache", stage, quiet).execute(recipe_of(tiny_base, {"one": {}}))
    status = run_status(tmp_path / "run")
    assert status.stages[1].state == "done"
    assert list((tmp_path / "run/.work").glob("one-*"))  # kept, but abandoned
