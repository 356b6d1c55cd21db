"""Control groups: what is written to them, where they are looked for, and that none stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.sandbox import cgroups

LIMITS = {"memory": 64 << 20, "processes": 7, "cpus": 0.5}
PARENTS = cgroups.find()
needs_groups = pytest.mark.skipif(PARENTS is None, reason="no control group can be made here")


def test_both_versions_are_told_the_same_bounds() -> None:
    second, first = cgroups.settings(2, LIMITS), cgroups.settings(1, LIMITS)
    assert dict(second["memory"])["memory.max"] == dict(first["memory"])["memory.limit_in_bytes"] == str(64 << 20)
    assert dict(second["pids"]) == dict(first["pids"]) == {"pids.max": str(7 + cgroups.SPARE)}
    quota, period = dict(second["cpu"])["cpu.max"].split()
    assert (
        int(quota) / int(period)
        == int(dict(first["cpu"])["cpu.cfs_quota_us"]) / int(dict(first["cpu"])["cpu.cfs_period_us"])
        == 0.5
    )


def test_events_of_both_versions_are_read(tmp_path: Path) -> None:
    for text in (
        "low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\noom_group_kill 0\n",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    ):
        (tmp_path / "events").write_text(text)
        descriptor = os.open(tmp_path / "events", os.O_RDONLY)
        assert cgroups.kills(descriptor) == cgroups.kills(descriptor) == 3
        os.close(descriptor)


@needs_groups
def test_groups_are_made_with_their_bounds_and_removed() -> None:
    assert PARENTS is not None
    groups = cgroups.make(PARENTS, 1, LIMITS)
    try:
        folder = Path(PARENTS.folders["memory"]) / Path(groups.folders[0]).name
        name = "memory.max" if PARENTS.version == 2 else "memory.limit_in_bytes"
        assert int((folder / name).read_text()) == 64 << 20
        assert groups.events is not None
        assert cgroups.kills(groups.events) == 0
    finally:
        made = list(groups.folders)
        cgroups.remove(groups)
    assert made
    assert not any(Path(folder).exists() for folder in made)


@needs_groups
def test_only_groups_of_the_dead_are_stale() -> None:
    assert PARENTS is not None
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True, text=True
    )
    dead = Path(PARENTS.folders["memory"]) / f"etude-{cgroups.namespace()}-{ended.stdout.strip()}-1-1"
    elsewhere = dead.with_name(f"etude-1-{ended.stdout.strip()}-1-1")
    dead.mkdir()
    elsewhere.mkdir()
    mine = cgroups.make(PARENTS, 2, LIMITS)
    try:
        cgroups.remove_stale(PARENTS)
        assert not dead.exists()
        assert elsewhere.exists()
        assert all(Path(folder).exists() for folder in mine.folders)
    finally:
        cgroups.remove(mine)
        elsewhere.rmdir()


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
