from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.run.folder import lock_run, read_owner, running_owner

HOLD = "import sys; from pathlib import Path; from etude.run.folder import lock_run\nwith lock_run(Path(sys.argv[1]), print):\n    print('held', flush=True); sys.stdin.read()"


def holder(run: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_by_name_and_pid(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        with pytest.raises(UserError, match=rf"is being used by process {process.pid} \(python.* on ") as raised:
            lock_run(tmp_path / "run", print).__enter__()
        assert "--out" in str(raised.value)
        owner = running_owner(tmp_path / "run")
        assert owner is not None
        assert owner["pid"] == process.pid
        process.kill()


def test_a_dead_owners_lock_is_taken_over_and_said(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert read_owner(tmp_path / "run/lock") is not None
    assert running_owner(tmp_path / "run") is None
    said: list[str] = []
    with lock_run(tmp_path / "run", said.append):
        assert f"process {process.pid}" in said[0]
        assert "ended without finishing" in said[0]


def test_left_in_order_nothing_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with lock_run(tmp_path / "run", said.append):
            assert running_owner(tmp_path / "run") is not None
    assert said == []
    assert running_owner(tmp_path / "run") is None


def test_a_damaged_lock_file_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff{")
    with lock_run(tmp_path, print):
        pass
