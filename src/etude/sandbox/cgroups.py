"""Control groups (version 2): what bounds memory, processes and CPU of a sandbox as a whole. Standard library only.

A launcher makes the group of a sandbox and removes it; its keeper joins it once, and all it starts is born in it. (Joining costs
15 ms, for the kernel waits until all its processors have noticed: too much for every call.) What the keeper starts offers itself to be
killed first when memory runs out, and its processes are bounded by a rlimit slightly below the group's bound.
A group's name tells whose it is: process namespace, launcher's pid and start time. Groups of dead launchers are removed.
Where no group can be made (version 1, or not ours to write), resource limits and the keeper's watchdog bound a sandbox.
"""

# pathlib is slow to import, and a launcher must start fast.
# ruff: noqa: PTH102, PTH106, PTH110, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
SPARE = 16  # processes that the keeper can always start
PERIOD = 100_000  # microseconds, over which CPU time is shared out
NAME = re.compile(r"etude-(?:\w+-)?(\d+)-(\d+)-(\d+)-")


@dataclass(frozen=True)
class Group:
    """The group of one sandbox."""

    folder: str
    join: int  # descriptor: write 0 to join
    events: int  # descriptor that counts processes killed for want of memory

    def close(self) -> None:
        os.close(self.join)
        os.close(self.events)


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _own_folders() -> list[str]:
    """Return the folder of this process's group and those above it, the nearest first."""
    mounts = (line.partition(" - ") for line in read("/proc/self/mountinfo").splitlines())
    mount = next((before.split()[4] for before, _, after in mounts if after.startswith("cgroup2 ")), None)
    own = next((line[3:] for line in read("/proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    if mount is None or own is None:
        return []
    parts = [part for part in own.split("/") if part and part != ".."]
    return [os.path.join(mount, *parts[:count]) for count in range(len(parts), -1, -1)]


def _bounds_memory(folder: str) -> bool:
    """Switch controllers on for the groups in a folder, where that is allowed; return whether that of memory is."""
    for name in CONTROLLERS:
        with contextlib.suppress(OSError):  # not ours, not there, or the folder has processes of its own
            _write(f"{folder}/cgroup.subtree_control", f"+{name}")
    with contextlib.suppress(OSError):
        return "memory" in read(f"{folder}/cgroup.subtree_control").split()
    return False


def find() -> str | None:
    """Return a folder in which groups can be made that bound memory at least; None: there is none."""
    return next((each for each in _own_folders() if os.access(each, os.W_OK) and _bounds_memory(each)), None)


def settings(limits: dict[str, Any]) -> dict[str, str]:
    """Return what is written to which file."""
    return {
        "memory.max": str(limits["memory"]), "memory.swap.max": "0", "memory.oom.group": "0",
        "pids.max": str(limits["processes"] + SPARE), "cpu.max": f"{int(limits['cpus'] * PERIOD)} {PERIOD}",
    }  # fmt: skip


def make(parent: str, number: int, limits: dict[str, Any]) -> Group:
    """Make the group of a launcher's sandbox."""
    folder = f"{parent}/{own_name()}{number}"
    os.mkdir(folder)
    try:
        for file, text in settings(limits).items():
            if os.path.exists(f"{folder}/{file}"):  # swap may not be counted here, a controller not be there
                _write(f"{folder}/{file}", text)
        events = os.open(f"{folder}/memory.events", os.O_RDONLY)
        return Group(folder, os.open(f"{folder}/cgroup.procs", os.O_WRONLY), events)
    except OSError:
        os.rmdir(folder)
        raise


def kills(events: int) -> int:
    """Return how many processes were killed for want of memory so far."""
    words = os.pread(events, 4096, 0).decode().split()
    return int(words[words.index("oom_kill") + 1])


def start_time(pid: int) -> int:
    """Return when a process started, in ticks since the machine did: with its pid it names it for ever. 0: it has ended."""
    try:
        words = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if words[0] in {"Z", "X"} else int(words[19])


def namespace() -> int:
    """Return which process namespace pids are of."""
    return os.stat("/proc/self/ns/pid").st_ino


def own_name(kind: str = "") -> str:
    """Return how the name of what belongs to this process begins, so that it is known as stale when the process has ended."""
    return f"etude-{kind}{namespace()}-{os.getpid()}-{start_time(os.getpid())}-"


def stale(folder: str) -> list[str]:
    """Return what lies in a folder and is named after a process that has ended."""
    owned = [match for match in map(NAME.match, os.listdir(folder)) if match and int(match[1]) == namespace()]
    return [f"{folder}/{match.string}" for match in owned if start_time(int(match[2])) != int(match[3])]


def remove_stale(parent: str) -> None:
    """Remove groups whose launcher is dead."""
    for folder in stale(parent):
        with contextlib.suppress(OSError):  # its last process is still ending, or another launcher was faster
            os.rmdir(folder)
