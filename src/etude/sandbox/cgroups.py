"""Control groups, version 2 or 1: what bounds memory, processes and CPU of a sandbox as a whole. Standard library only.

A launcher makes the groups of a sandbox and removes them; its keeper joins them once, and all it starts is born in them. (Joining
costs 15 ms, for the kernel waits until all its processors have noticed: too much for every call.) What the keeper starts offers itself
to be killed first when memory runs out, and its processes are bounded by a rlimit slightly below the group's bound.
A group's name tells whose it is: process namespace, launcher's pid and start time. Groups of dead launchers are removed.
"""

# pathlib is slow to import, and a launcher must start fast.
# ruff: noqa: PTH102, PTH106, PTH110, PTH112, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
SPARE = 16  # processes that the keeper can always start
PERIOD = 100_000  # microseconds, over which CPU time is shared out
NAME = re.compile(r"etude-(?:\w+-)?(\d+)-(\d+)-(\d+)-")


@dataclass(frozen=True)
class Parents:
    """Folders in which groups can be made, by controller. In version 2 they are one and the same."""

    version: int
    folders: dict[str, str]


@dataclass
class Groups:
    """The groups of one sandbox."""

    folders: list[str] = field(default_factory=list)
    join: list[int] = field(default_factory=list)  # descriptors: write 0 to join
    events: int | None = None  # descriptor that tells of processes killed for want of memory


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _mounts() -> tuple[str | None, dict[str, str]]:
    """Return where version 2 is mounted, and where each controller of version 1 is."""
    second, first = None, {}
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            second = second or point
        elif kind == "cgroup":
            first.update({name: point for name in CONTROLLERS if name in options.split(",")})
    return second, first


def _own_paths() -> dict[str, str]:
    """Return this process's group by controller; that of version 2 by the empty name."""
    lines = (line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines())
    return {name: path for _, names, path in lines for name in names.split(",")}


def _upwards(mount: str, path: str) -> list[str]:
    """Return the folder of a group and those above it, the nearest first."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [os.path.join(mount, *parts[:count]) for count in range(len(parts), -1, -1)]


def _enabled(folder: str) -> set[str]:
    """Switch controllers on for the groups in a folder, where that is allowed, and return those that are on."""
    for name in CONTROLLERS:
        try:
            _write(f"{folder}/cgroup.subtree_control", f"+{name}")
        except OSError:  # not ours, not there, or the folder has processes of its own
            continue
    try:
        return set(_read(f"{folder}/cgroup.subtree_control").split()) & set(CONTROLLERS)
    except OSError:
        return set()


def find() -> Parents | None:
    """Return where groups can be made that bound memory at least; None: nowhere."""
    second, first = _mounts()
    own = _own_paths()
    if second and "" in own:
        for folder in _upwards(second, own[""]):
            if os.access(folder, os.W_OK) and "memory" in (names := _enabled(folder)):
                return Parents(2, {name: folder for name in CONTROLLERS if name in names})
    folders = {}
    for name, mount in first.items():
        nearest = next((folder for folder in _upwards(mount, own.get(name, "/")) if os.path.isdir(folder)), None)
        if nearest and os.access(nearest, os.W_OK):
            folders[name] = nearest
    return Parents(1, folders) if "memory" in folders else None


def settings(version: int, limits: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return what is written to which file, by controller. Memory that is swapped out counts as memory."""
    cpu = int(limits["cpus"] * PERIOD)
    if version == 2:
        return {
            "memory": [("memory.max", str(limits["memory"])), ("memory.swap.max", "0"), ("memory.oom.group", "0")],
            "pids": [("pids.max", str(limits["processes"] + SPARE))],
            "cpu": [("cpu.max", f"{cpu} {PERIOD}")],
        }
    return {
        "memory": [
            ("memory.limit_in_bytes", str(limits["memory"])),
            ("memory.memsw.limit_in_bytes", str(limits["memory"])),
        ],
        "pids": [("pids.max", str(limits["processes"] + SPARE))],
        "cpu": [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(cpu))],
    }


def start_time(pid: int) -> int:
    """Return when a process started, in ticks since the machine did: with its pid it names it for ever. 0: it has ended."""
    try:
        words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if words[0] in {"Z", "X"} else int(words[19])


def namespace() -> int:
    """Return which process namespace pids are of."""
    return os.stat("/proc/self/ns/pid").st_ino


def make(parents: Parents, number: int, limits: dict[str, Any]) -> Groups:
    """Make the groups of a launcher's sandbox."""
    name = f"etude-{namespace()}-{os.getpid()}-{start_time(os.getpid())}-{number}"
    groups = Groups()
    values = settings(parents.version, limits)
    try:
        for parent in sorted(set(parents.folders.values())):
            folder = f"{parent}/{name}"
            os.mkdir(folder)
            groups.folders.append(folder)
            groups.join.append(os.open(f"{folder}/cgroup.procs", os.O_WRONLY))
        for controller, parent in parents.folders.items():
            for file, text in values[controller]:
                if os.path.exists(f"{parent}/{name}/{file}"):  # swap may not be counted on this machine
                    _write(f"{parent}/{name}/{file}", text)
        events = "memory.events" if parents.version == 2 else "memory.oom_control"
        groups.events = os.open(f"{parents.folders['memory']}/{name}/{events}", os.O_RDONLY)
    except OSError:
        remove(groups)
        raise
    return groups


def close(groups: Groups) -> None:
    """Close the descriptors."""
    for descriptor in [*groups.join, *([] if groups.events is None else [groups.events])]:
        os.close(descriptor)
    groups.join, groups.events = [], None


def remove(groups: Groups) -> None:
    """Remove the groups, whose processes have ended."""
    close(groups)
    for folder in groups.folders:
        os.rmdir(folder)
    groups.folders = []


def kills(events: int) -> int:
    """Return how many processes were killed for want of memory so far."""
    words = os.pread(events, 4096, 0).decode().split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def stale(folder: str) -> list[str]:
    """Return what lies in a folder and is named after a process that has ended."""
    matches = filter(None, map(NAME.match, os.listdir(folder)))
    own = namespace()
    return [
        f"{folder}/{match.string}"
        for match in matches
        if int(match[1]) == own and start_time(int(match[2])) != int(match[3])
    ]


def remove_stale(parents: Parents) -> None:
    """Remove groups whose launcher is dead."""
    for parent in set(parents.folders.values()):
        for folder in stale(parent):
            with contextlib.suppress(OSError):  # its last process is still ending, or another launcher was faster
                os.rmdir(folder)
