from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etude.cli.sandbox import visible, workspace_of

if TYPE_CHECKING:
    from tests.conftest import Etude


@pytest.mark.parametrize("command", ["probe", "shell"])
def test_help_has_an_example(etude: Etude, command: str) -> None:
    assert f"Example: etude sandbox {command}" in etude("sandbox", command, "--help").out


def test_probe_names_every_backend(etude: Etude) -> None:
    said = etude("sandbox", "probe")
    rows = {line.split()[0]: line.split()[1] for line in said.out.splitlines()}
    assert list(rows) == ["namespaces", "podman", "docker"]
    assert said.code == (0 if "works" in rows.values() else 1)
    told = json.loads(etude("sandbox", "probe", "--json").out)
    assert {each["backend"]: "works" if each["works"] else "no" for each in told} == rows
    assert all(each["detail"] for each in told)


def test_shell_runs_lines_and_remembers_where_it_is(
    etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree" / "inner folder").mkdir(parents=True)
    (tmp_path / "tree" / "inner folder" / "file").write_text("content\n")
    lines = ["cd inner*", "cat file; pwd", "echo more > file; cd /tmp", "pwd; exit 3", "pwd", "cat '/workspace/inner folder/file'",
             r"printf '\033[2J'", "", "exit", "echo never"]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    said = etude("sandbox", "shell", tmp_path / "tree")
    assert said.code == 0
    assert said.out == "content\n/workspace/inner folder\n/tmp\n/tmp\nmore\n^[[2J"
    assert "[exit code 3]" in said.err
    assert (tmp_path / "tree" / "inner folder" / "file").read_text() == "content\n"  # it was a copy


def test_shell_says_what_is_wrong(etude: Etude, tmp_path: Path) -> None:
    said = etude("sandbox", "shell", tmp_path / "nothing")
    assert (said.code, "is not a folder" in said.err) == (2, True)
    said = etude("sandbox", "shell", tmp_path, "--backend", "namespace")
    assert (said.code, "did you mean 'namespaces'" in said.err) == (2, True)


def test_a_task_folder_shows_what_its_agent_sees(tmp_path: Path) -> None:
    assert workspace_of(tmp_path) == tmp_path
    (tmp_path / "environment").mkdir()
    assert workspace_of(tmp_path) == tmp_path / "environment"
    (tmp_path / "environment" / "tree").mkdir()
    assert workspace_of(tmp_path) == tmp_path / "environment" / "tree"


def test_output_cannot_command_the_terminal() -> None:
    assert visible(b"a\tb\n\x1b]0;t\x07\x7f\xc2\x9b\xff\xe2\x80\xae") == "a\tb\n^[]0;t^G\\x7f\\x9b�\\x202e"
