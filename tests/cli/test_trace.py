"""`etude trace` from the outside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from etude.agent.trace import read_traces, write_traces
from tests.agent.traces import episode
from tests.conftest import Etude


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_traces(
        tmp_path / "t.jsonl", [episode(), dataclasses.replace(episode(), id="other", stop="turns", rewards={})]
    )
    return tmp_path / "t.jsonl"


def test_episodes_are_listed_and_shown_by_number_or_id(etude: Etude, file: Path) -> None:
    listed = etude("trace", "list", file)
    assert listed.code == 0
    assert [line.split() for line in listed.out.splitlines()[1:]] == [
        ["1", "fix-1", "Mend", "the", "parser.", "finished", "7", "20"],  # parts without weights are no reward
        ["2", "other", "Mend", "the", "parser.", "turns", "7", "20"],
    ]
    assert "fix-1" in etude("trace", "show", file).out
    assert (
        etude("trace", "show", file, "--episode", "2").out
        == etude("trace", "show", file, "--episode", "other", "--plain").out
    )
    full = etude("trace", "show", file, "--full").out
    assert "line 47" in full
    assert "line 47" not in etude("trace", "show", file).out


def test_episodes_go_out_as_atif_and_come_back(etude: Etude, file: Path, tmp_path: Path) -> None:
    assert etude("trace", "export", file, "--atif", tmp_path / "out").code == 0
    made = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in made] == ["trajectory-1.json", "trajectory-2.json"]
    assert json.loads(made[0].read_text())["schema_version"] == "ATIF-v1.8"
    assert etude("trace", "import", *made, "--out", tmp_path / "back.jsonl").code == 0
    assert read_traces(tmp_path / "back.jsonl") == read_traces(file)
    again = etude("trace", "import", *made, "--out", tmp_path / "back.jsonl")
    assert (again.code, "there already" in again.err) == (2, True)


def test_a_torn_line_is_told(etude: Etude, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])
    said = etude("trace", "list", file)
    assert (said.code, "the last line" in said.err, "is torn" in said.err) == (0, True, True)
    assert "other" not in said.out


@pytest.mark.parametrize("content", [b"", b"rubbish", b"rubbish\n", b"{}\n", b"\xff\x00\n", b"[" * 5000 + b"\n", None])
def test_bad_files_are_one_line(etude: Etude, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for words in (
        ["show", path],
        ["list", path],
        ["export", path, "--atif", tmp_path / "out"],
        ["import", path, "--out", tmp_path / "o"],
    ):
        said = etude("trace", *words)
        assert said.code == 2
        assert str(path) in said.err
        assert said.err.count("error: ") == 1 == len(said.err.splitlines()) - ("note: " in said.err)
    assert not (tmp_path / "o").exists()


def test_an_unknown_episode_is_told_of_the_known(etude: Etude, file: Path) -> None:
    said = etude("trace", "show", file, "--episode", "9")
    assert (said.code, "'9'" in said.err, "1 to 2" in said.err) == (2, True, True)
