"""Control groups: what is written to them, where they are looked for, and that none stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.sandbox import cgroups

LIMITS = {"memory": 64 << 20, "processes": 7, "cpus": 0.5}
PARENT = cgroups.find()
needs_groups = pytest.mark.skipif(PARENT is None, reason="no control group of version 2 can be made here")


def test_the_bounds_that_are_written() -> None:
    assert cgroups.settings(LIMITS) == {
        "memory.max": str(64 << 20), "memory.swap.max": "0", "memory.oom.group": "0", "pids.max": "23", "cpu.max": "50000 100000",
    }  # fmt: skip


def test_kills_are_counted(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 0\n")
    descriptor = os.open(tmp_path / "events", os.O_RDONLY)
    assert cgroups.kills(descriptor) == cgroups.kills(descriptor) == 3
    os.close(descriptor)


@needs_groups
def test_a_group_is_made_with_its_bounds_and_removed() -> None:
    assert PARENT is not None
    group = cgroups.make(PARENT, 1, LIMITS)
    try:
        assert int((Path(group.folder) / "memory.max").read_text()) == 64 << 20
        assert cgroups.kills(group.events) == 0
    finally:
        group.close()
        Path(group.folder).rmdir()


def test_only_what_belongs_to_the_dead_is_stale(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True, text=True
    )
    dead = tmp_path / f"etude-{cgroups.namespace()}-{ended.stdout.strip()}-1-1"
    elsewhere = tmp_path / f"etude-1-{ended.stdout.strip()}-1-1"
    mine = [tmp_path / f"{cgroups.own_name(kind)}1" for kind in ("", "frozen-")]
    for folder in (dead, elsewhere, *mine):
        folder.mkdir()
    assert cgroups.stale(str(tmp_path)) == [str(dead)]
    cgroups.remove_stale(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, *mine])


def test_a_process_is_told_from_another_with_its_number() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    started = cgroups.start_time(child.pid)
    assert started
    assert started == cgroups.start_time(child.pid)
    assert started >= cgroups.start_time(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert cgroups.start_time(child.pid) == 0, "a zombie has ended"
    child.communicate()
    assert cgroups.start_time(child.pid) == 0
