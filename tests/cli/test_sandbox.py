from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etude.cli.sandbox import workspace_of
from tests.sandbox.test_container import SPACES, fake

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
    assert said.out == "content\n/workspace/inner folder\n/tmp\n/tmp\nmore\n\\x1b[2J"
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


def test_output_cannot_command_the_terminal(etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = r"printf 'a\tb\n\033]0;t\007\177\302\233\377\342\200\256'; printf '\033[31m' >&2"
    monkeypatch.setattr(sys, "stdin", io.StringIO(line + "\n"))
    said = etude("sandbox", "shell", tmp_path)
    assert said.out == "a\tb\n\\x1b]0;t\\x07\\x7f\\x9b�\\u202e"
    assert "\x1b" not in said.err
    assert "\\x1b[31m" in said.err


def test_shell_in_a_container(etude: Etude, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `probe` says of containers holds: the engine named is the one that is started."""
    if subprocess.run(SPACES, capture_output=True, check=False).returncode:
        pytest.skip("no process namespaces here")
    engine = fake(tmp_path / "bin", "podman")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content\n")
    monkeypatch.setenv("PATH", f"{Path(engine).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("cat file\n"))
    said = etude("sandbox", "shell", tmp_path / "tree", "--backend", "podman:an-image")
    assert (said.code, said.out) == (0, "content\n"), said.err
    asked, started = [json.loads(line) for line in (tmp_path / "bin" / "log").read_text().splitlines()][:2]
    assert (asked[0], asked[-1]) == ("image", "an-image")
    assert (started[0], "sha256:" + hashlib.sha256(b"an-image").hexdigest() in started) == ("run", True)
    said = etude("sandbox", "shell", tmp_path, "--backend", "podman")
    assert (said.code, "podman needs an image: podman:IMAGE" in said.err) == (2, True)
