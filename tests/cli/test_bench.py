"""`etude bench` from the outside: a manifest, an endpoint on a real port, kill −9, bad inputs."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.bench.agents import BenchSettings
from etude.bench.trials import read_results
from etude.cli.bench import run
from etude.files import write_text
from etude.sandbox import probe
from tests.agent.chat_server import ChatServer
from tests.bench import calc_set
from tests.conftest import Etude
from tests.tasks import small

EDIT = "@edit\npath: calc/__init__.py\nold: result = value\nnew: result += value\n@end"


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    small.run(probe.strongest())  # or skip
    return calc_set.write(tmp_path_factory.mktemp("calc"))


def words(calc: tuple[Path, Path], out: Path, *models: str) -> list[str]:
    return ["bench", *models, "--tasks", str(calc[0]), "--cache", str(calc[1]), "--out", str(out)]


def rows(out: Path) -> list[str]:
    return [json.loads(line)["key"] for line in (out / "trials.jsonl").read_text().splitlines()[1:]]


def test_an_endpoint_is_measured_and_reported(etude: Etude, calc: tuple[Path, Path], tmp_path: Path) -> None:
    with ChatServer([EDIT, "total adds now.", EDIT, "total adds now."]) as server:
        said = etude(
            *words(calc, tmp_path / "a", f"{server.url}#scripted"), "--k", 1, "--price-written", 10, "--concurrency", 1
        )
    assert said.code == 0, said.err
    assert said.out.startswith("scripted: 50.0% [")
    assert f"{tmp_path / 'a' / 'report.md'}" in said.out
    report = (tmp_path / "a" / "report.md").read_text()
    assert "cost ↓" in report
    assert '"network":"none"' in report
    for name in (
        "report.html",
        "score_tokens.png",
        "by_category.png",
        "by_package.png",
        "histograms.png",
        "traces.jsonl",
    ):
        assert (tmp_path / "a" / name).stat().st_size > 1000, name
    with ChatServer([]) as server:
        assert etude(*words(calc, tmp_path / "b", server.url), "--k", 1, "--temperature", 0).code == 0
    compared = etude("bench", "compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both")
    assert compared.code == 0, compared.err
    assert "scripted (a) against scripted (b) on the 2 tasks of both: +50.0" in compared.out
    assert "not the same for all: sampling settings" in compared.out
    assert (tmp_path / "both" / "report.html").exists()


def test_killed_it_goes_on_where_it_was(etude: Etude, calc: tuple[Path, Path], tmp_path: Path) -> None:
    command = [*words(calc, tmp_path, "noop", "oracle"), "--k", "2", "--concurrency", "1"]
    child = subprocess.Popen([sys.executable, "-m", "etude", *command], stderr=subprocess.PIPE, start_new_session=True)
    log = tmp_path / "trials.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    before = rows(tmp_path)
    assert 3 <= len(before) < 8
    with log.open("ab") as file:
        file.write(b'{"key": "torn')
    said = etude(*command)
    assert said.code == 0, said.err
    assert rows(tmp_path)[: len(before)] == before
    assert len(rows(tmp_path)) == len(set(rows(tmp_path))) == 8
    assert said.out.startswith("oracle: 100.0% [")
    assert "noop: 0.0% [" in said.out
    assert {trial.outcome for trial in read_results(tmp_path).trials if trial.model == "noop"} == {"fail"}
    refused = etude(*command, "--style", "trace")
    assert (refused.code, "another sampling settings" in refused.err) == (2, True)


def test_what_a_user_gets_wrong_is_one_line(etude: Etude, calc: tuple[Path, Path], tmp_path: Path) -> None:
    header = calc[0].read_text().splitlines()[0]
    write_text(tmp_path / "empty.jsonl", header + "\n")
    write_text(tmp_path / "nothing.jsonl", "")
    (tmp_path / "folder").mkdir()
    other = tmp_path / "other"
    write_text(other / "config.json", '{"model_type": "bert"}')
    wrong = {
        "k = 0: Input should be greater": ("noop", "--k", 0),
        "style = 'rude': Input should be": ("noop", "--style", "rude"),
        "limit = -1": ("noop", "--limit", -1),
        "none.jsonl' is not a file": ("noop", "--tasks", tmp_path / "none.jsonl"),
        "nothing.jsonl is no manifest of tasks": ("noop", "--tasks", tmp_path / "nothing.jsonl"),
        "empty.jsonl has no task": ("noop", "--tasks", tmp_path / "empty.jsonl"),
        "folder holds no tasks": ("noop", "--tasks", tmp_path / "folder"),
        "nosuch": ("nosuch-model",),
        "other": (other,),
        "no server at http://127.0.0.1:9": ("http://127.0.0.1:9/v1",),
        "noop is named twice": ("noop", "noop"),
        "the oracle needs the tools edit and write": ("oracle", "--tools", "bash"),
    }
    for part, given in wrong.items():
        said = etude(*words(calc, tmp_path / "out"), *given)
        assert (said.code, part in said.err, len(said.err.strip().splitlines())) == (2, True, 1), (part, said)
    said = etude("bench", "compare", tmp_path / "folder")
    assert (said.code, "holds no trials.jsonl" in said.err, len(said.err.strip().splitlines())) == (2, True, 1), said


def test_the_command_and_the_stage_have_the_same_defaults() -> None:
    options = {name: option.default for name, option in inspect.signature(run).parameters.items()}
    settings = BenchSettings()
    harness = settings.harness
    assert (options["temperature"], options["turns"], 60 * options["minutes"]) == (
        harness.temperature,
        harness.turns,
        harness.seconds,
    )
    assert all(options[name] == getattr(settings, name) for name in ("k", "limit", "style", "concurrency"))
