"""Metrics sent to sinks: what the real packages stored, and that no sink can hold up a run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli.main import main
from etude.errors import UserError
from etude.lineage.record import load_record
from etude.progress import Reporter
from etude.recipe.recipe import LogSettings, load_recipe
from etude.report import sinks
from etude.report.sinks import SINKS, Point, Sink, tensorboard
from etude.run import log
from etude.run.log import Sending, following
from tests.lineage.refusals import one_line
from tests.run.logged import Logged, Points, etude_log, installed, of_mlflow, of_tensorboard, of_trackio, of_wandb
from tests.run.toy import ScaleStage, recipe_of, runner

if TYPE_CHECKING:
    from collections.abc import Callable

LOSS = [(n, 1 / n) for n in range(1, 6)]


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    made = Logged(tmp_path / "run")
    made.begin()
    return made


def in_two_sessions(run: Logged, sink: str, **environment: str) -> None:
    """Send three steps; then two more of a run that was resumed, once as if the note of what was sent had been lost."""
    run.write("cpt", {"key": "eval/00000000", "step": 0, "bits_per_byte": {"code": 2.5}})
    run.train(1, 3)
    run.write("cpt", torn='{"key": "train/00000004", "lo')
    state = run.folder / "log" / sink / "state.json"
    assert etude_log(run.folder, sink, **environment) == f"{sink}: 4 rows sent"
    before = state.read_bytes()
    metrics = run.folder / "cpt" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().rpartition(b"\n")[0] + b"\n")  # as whoever appends next does
    run.write("cpt", {"key": "again/0002/train/00000003", "loss": 7.0})
    run.train(4, 5)
    assert etude_log(run.folder, sink, **environment) == f"{sink}: 2 rows sent"
    if sink != "trackio":  # which has no way to tell
        state.write_bytes(before)
        assert etude_log(run.folder, sink, **environment) == f"{sink}: 2 rows sent"
    assert etude_log(run.folder, sink, **environment) == f"{sink}: 0 rows sent"


def same(found: Points) -> None:
    assert {name.rpartition("/")[2] for name in found} == {"loss", "flops", "code"}
    assert dict(found["cpt/loss"]) == pytest.approx(dict(LOSS))
    assert len(found["cpt/loss"]) == len(LOSS)
    assert [step for step, _ in found["cpt/flops"]] == [1, 2, 3, 4, 5]
    assert found["cpt/eval/bits_per_byte/code"] == [(0, 2.5)]


def test_tensorboard_reads_each_step_once(logged: Logged) -> None:
    installed("tensorboard")
    in_two_sessions(logged, "tensorboard")
    same(of_tensorboard(logged.folder / "log" / "tensorboard"))


def test_mlflow_keeps_each_step_once_in_one_run(logged: Logged, tmp_path: Path) -> None:
    installed("mlflow")
    installed("sqlalchemy")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    in_two_sessions(logged, "mlflow", MLFLOW_TRACKING_URI=uri)
    same(of_mlflow(uri, "run"))


def test_trackio_keeps_each_step_once_in_one_run(logged: Logged, tmp_path: Path) -> None:
    installed("trackio")
    in_two_sessions(logged, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    same(of_trackio(tmp_path / "trackio", "run"))


def test_wandb_keeps_one_run_and_numbers_rows_so_that_doubles_fall_away(logged: Logged) -> None:
    installed("wandb")
    in_two_sessions(logged, "wandb", WANDB_MODE="offline")
    rows, runs, axes = of_wandb(logged.folder / "log" / "wandb")
    assert len(runs) == 1
    assert axes == {"cpt/*": "cpt/step"}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert [(row["cpt/step"], row["cpt/loss"]) for _, row in sorted(rows.items())[1:]] == LOSS
    assert rows[0]["cpt/eval/bits_per_byte/code"] == 2.5


VALUES = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), st.floats(width=32, allow_nan=False), min_size=1)  # fmt: skip


@settings(max_examples=30)
@given(st.lists(VALUES, min_size=1, max_size=4), st.integers(0, 2**40))
def test_any_name_number_and_step_comes_back_from_tensorboard(
    tmp_path_factory: Any, rows: list[Any], step: int
) -> None:
    folder = tmp_path_factory.mktemp("events")
    board = tensorboard(folder, "", "", {})
    next(board)
    board.send([Point(n, "s", step + n, 1e9 + n, values) for n, values in enumerate(rows)])
    wanted: Points = {}
    for n, values in enumerate(rows):
        for name, value in values.items():
            wanted.setdefault(name, []).append((step + n, value))
    assert of_tensorboard(folder) == wanted


def test_the_checksum_is_that_of_the_standard() -> None:
    """RFC 3720, B.4, and the mask as the TFRecord format says it."""
    for content, crc in ((b"\0" * 32, 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        masked = ((crc >> 15) | (crc << 17) & 0xFFFFFFFF) + 0xA282EAD8
        assert sinks._masked_crc(content) == (masked & 0xFFFFFFFF).to_bytes(4, "little")


class Kept:
    """A sink that keeps what it gets, and fails when it is told to."""

    points: list[Point]
    fail_at: int

    @staticmethod
    def sink(folder: Path, project: str, name: str, own: dict[str, Any]) -> Sink:
        own["opened"] = own.get("opened", 0) + 1
        while points := (yield):
            for point in points:
                if point.number == Kept.fail_at:
                    raise OSError("no route to host")
                Kept.points.append(point)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    Kept.points, Kept.fail_at = [], -1
    monkeypatch.setitem(SINKS, "kept", Kept.sink)
    return Kept


def test_what_a_failing_sink_had_not_taken_whole_is_sent_again(
    logged: Logged, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "BATCH", 2)
    logged.train(1, 5)
    kept.fail_at = 3
    sending = Sending(logged.folder, "kept")
    with pytest.raises(OSError, match="no route"):
        sending.send()
    kept.fail_at = -1
    assert sending.send() == 3
    assert [point.number for point in kept.points] == [0, 1, 2, 2, 3, 4]  # the batch that broke, once more
    assert [point.step for point in kept.points] == [1, 2, 3, 3, 4, 5]
    assert json.loads((logged.folder / "log/kept/state.json").read_text())["opened"] == 2


def test_a_stage_is_followed_into_its_place_and_one_that_replaces_it_is_another_group(
    logged: Logged, kept: type[Kept]
) -> None:
    work = logged.folder / ".work" / f"cpt-{'0' * 12}"
    work.parent.mkdir()
    shutil.move(logged.folder / "cpt", work)
    logged.train(1, 2, stage=f".work/{work.name}")
    sending = Sending(logged.folder, "kept")
    assert sending.send() == 2
    logged.train(3, 3, stage=f".work/{work.name}")
    work.rename(logged.folder / "cpt")
    assert sending.send() == 1
    shutil.rmtree(logged.folder / "cpt")
    logged.begin(at=2e9)
    logged.train(1, 1)
    assert sending.send() == 1
    assert [(point.stage, point.step, *sorted(point.values)) for point in kept.points] == [
        *(("cpt", n, "cpt/flops", "cpt/loss") for n in (1, 2, 3)), ("cpt~2", 1, "cpt~2/flops", "cpt~2/loss")
    ]  # fmt: skip


def test_strange_rows_and_stages_send_nothing_and_stop_nothing(
    logged: Logged, tmp_path: Path, kept: type[Kept]
) -> None:
    outside = Logged(tmp_path / "other")
    outside.begin("secret")
    outside.train(1, 1, "secret")
    names = ["../other/secret", 3, None, "cpt"]
    (logged.folder / "run.json").write_text(json.dumps({"name": "x", "stages": [{"name": name} for name in names]}))
    for line in ("3", "[]", "{", '{"key": 7}', '{"key": "train/x", "loss": 1}', '{"key": "train/1", "loss": 1e999, "nan": NaN, "big": 1' + "0" * 400 + ', "no": true}'):  # fmt: skip
        logged.write("cpt", torn=line + "\n")
    logged.write("cpt", {"key": "train/-3", "deep": {"er": {"est": 1}}})
    assert Sending(logged.folder, "kept").send() == 1
    assert kept.points == [Point(0, "cpt", 3, 1e9, {"cpt/deep/er/est": 1.0})]


def test_nothing_is_written_through_a_link(logged: Logged, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = logged.folder / "log" / "tensorboard"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.0.etude").symlink_to(precious)
    with pytest.raises(UserError, match=one_line("is a link", "remove it")):
        Sending(logged.folder, "tensorboard")
    assert precious.read_text() == "mine"


def test_a_run_sends_what_its_stages_measured_and_its_identity_is_the_same(
    tmp_path: Path, tiny_base: Path, quiet: Reporter
) -> None:
    plain = recipe_of(tiny_base, {"one": {"by": 1.5}, "two": {"by": 0.5}})
    recipe = dataclasses.replace(plain, log=LogSettings(to=["tensorboard"]))
    assert recipe.hash == plain.hash
    assert recipe.resolved()["log"] == {"to": ["tensorboard"]}
    made = runner(tmp_path / "run", tmp_path / "cache", ScaleStage(), quiet)
    made.execute(recipe)
    again = runner(tmp_path / "plain", tmp_path / "other", ScaleStage(), quiet)
    again.execute(plain)
    assert load_record(tmp_path / "run/two").fingerprint == load_record(tmp_path / "plain/two").fingerprint
    assert not (tmp_path / "plain/log").exists()
    made.execute(recipe)  # nothing is done, and nothing sent twice
    found = of_tensorboard(tmp_path / "run/log/tensorboard")
    assert found["one/summary/by"] == [(0, 1.5)]
    assert found["two/summary/by"] == [(0, 0.5)]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a `wandb` before the real one; its first begin is told by a FIFO, then it does what the words say."""

    def put(words: str) -> Path:
        folder, told = tmp_path / "stand-in", tmp_path / "told"
        folder.mkdir()
        os.mkfifo(told)
        lines = ["import os, threading", "from pathlib import Path", "Settings, first = dict, [1]", "def init(**_):",
                 f"    if first.pop() if first else 0: Path({str(told)!r}).write_text(str(os.getpid()))", f"    {words}"]  # fmt: skip
        (folder / "wandb.py").write_text("\n".join(lines))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return told

    return put


def test_a_broken_sink_is_said_once_and_counted(
    logged: Logged, begun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = begun("print('noise'); raise ConnectionError('the server\\nis away')")
    monkeypatch.setattr(log, "PATIENCE", 600.0)
    said: list[str] = []
    with following(["wandb"], logged.folder, said.append):
        logged.train(1, 3)
        told.read_text()
    assert said == []
    first, last = capfd.readouterr().err.splitlines()
    assert first == "log: wandb fails, and is tried again; the run goes on: the server is away"
    count = int(last.split("failed ")[1].split()[0])
    assert last == f"log: wandb failed {count} times; etude log {logged.folder} --to wandb sends what is missing"
    assert count >= 2
    assert (logged.folder / "log/wandb/messages.txt").read_text().count("noise") == count


def test_a_sink_that_dies_is_said(
    logged: Logged, begun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = begun("os._exit(7)")
    monkeypatch.setattr(log, "PATIENCE", 600.0)
    said: list[str] = []
    with following(["wandb"], logged.folder, said.append):
        told.read_text()
    assert said == [f"log: wandb ended with code 7; etude log {logged.folder} --to wandb sends what is missing"]


def test_a_sink_that_hangs_holds_nothing_up(
    logged: Logged, begun: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = begun("threading.Event().wait()")
    monkeypatch.setattr(log, "PATIENCE", -log.LOOK)
    said: list[str] = []
    with following(["wandb"], logged.folder, said.append):
        pid = int(told.read_text())  # waits until it hangs
    try:
        assert said == [f"log: wandb has not ended; etude log {logged.folder} --to wandb sends what is missing"]
        assert os.getpgid(pid) == pid  # its own group: Ctrl-C does not reach it, and its end takes along what it began
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_sink_follows_a_run_that_was_killed_to_the_end(logged: Logged) -> None:
    """The end of standard input is all that tells it: a run that is killed says nothing."""
    command = [*etude_follow(logged.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        logged.train(1, 5)
        process.stdin.close()
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert process.returncode == 0
    found = of_tensorboard(logged.folder / "log/tensorboard")["cpt/loss"]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]


def etude_follow(run: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "etude", "log", str(run), "--to", "tensorboard", "--follow"]


def test_a_missing_package_is_refused_before_the_first_stage(tmp_path: Path, tiny_base: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    recipe = dataclasses.replace(recipe_of(tiny_base, {"one": {}}), log=LogSettings(to=["tensorboard", "trackio"]))
    made = runner(tmp_path / "run", tmp_path / "cache", ScaleStage(), quiet)
    for act in (made.plan, made.execute):
        with pytest.raises(UserError, match=one_line("trackio", "pip install trackio")):
            act(recipe)
    assert not (tmp_path / "run").exists()


def test_the_setting_takes_known_sinks_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('name = "x"\nstages = ["scale"]\n[log]\nto = ["tensorboard", "mlflow"]\n')
    kinds = {"scale": ScaleStage.settings}
    recipe = load_recipe([file], [], kinds)
    assert recipe.log == LogSettings(to=["tensorboard", "mlflow"])
    changed = load_recipe([file], ['log.to=["wandb"]'], kinds)
    assert changed.log == LogSettings(to=["wandb"])
    assert changed.hash == recipe.hash
    with pytest.raises(UserError, match=one_line("r.toml:4", "log.to", "'tensorboard'", "'tensorbored'")):
        file.write_text(file.read_text().replace("tensorboard", "tensorbored"))
        load_recipe([file], [], kinds)


@pytest.mark.parametrize(("words", "message"), [(["--to", "tensorbord"], ("no sink", "did you mean 'tensorboard'")), (["--to", "tensorboard"], ("run.json",))])  # fmt: skip
def test_the_command_refuses_in_one_line(words: list[str], message: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["etude", "log", str(tmp_path), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert all(word in error for word in message)
