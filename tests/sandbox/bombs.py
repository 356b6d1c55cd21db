"""Uses of resources without end, run inside a sandbox: `python3 bombs.py NAME < LIMITS` prints a JSON list of bounds it went beyond."""

# ruff: noqa: PTH102, T201
from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

MIB = 1 << 20
Bounds = dict[str, int]


def many_processes(limits: Bounds) -> list[str]:
    count = 0
    with contextlib.suppress(OSError):
        while count < 5000:
            if os.fork() == 0:
                os.setsid()
                signal.pause()
            count += 1
    return [f"{count} processes"] if count > limits["processes"] else []


def many_threads(limits: Bounds) -> list[str]:
    hold, count = threading.Event(), 0
    with contextlib.suppress(RuntimeError, MemoryError):
        while count < 5000:
            threading.Thread(target=hold.wait, daemon=True).start()
            count += 1
    print(json.dumps([f"{count} threads"] if count > limits["processes"] else []), flush=True)
    os._exit(0)


def fork_bomb(limits: Bounds) -> list[str]:
    """Never ends by itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os.setsid()


def _touch(area: mmap.mmap | bytearray) -> None:
    for start in range(0, len(area), 4096):
        area[start] = 1


def memory_of_one(limits: Bounds) -> list[str]:
    _touch(bytearray(2 * limits["memory"]))
    return ["memory"]


def shared_memory(limits: Bounds) -> list[str]:
    _touch(mmap.mmap(-1, 2 * limits["memory"], flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
    return ["shared memory"]


def memory_of_many(limits: Bounds) -> list[str]:
    """Each has less than the bound, all together twice as much."""
    reading, writing = os.pipe()
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(limits["memory"] // 4)  # by a name: it is there until the end
            _touch(held)
            os.write(writing, b"x")
            time.sleep(3)  # a watchdog looks now and then
            os.write(writing, b"y")
            os._exit(0)
    os.close(writing)
    got = b""
    while piece := os.read(reading, 100):
        got += piece
    return ["memory of many"] if got.count(b"y") == 8 else []


def memory_files(limits: Bounds) -> list[str]:
    """Files in memory that no folder shows."""
    kept, piece = 0, b"x" * MIB
    with contextlib.suppress(OSError):
        file = os.memfd_create("hidden")
        while kept < 2 * limits["memory"]:
            kept += os.write(file, piece)
    return ["memory files"] if kept >= 2 * limits["memory"] else []


def disk(limits: Bounds) -> list[str]:
    total = 0
    for folder in (".", "/tmp", "/dev/shm", "/run", "/var/tmp", "/dev", "/etc", "/"):
        with contextlib.suppress(OSError), Path(folder, "fill").open("wb", buffering=0) as file:
            while total < 4 * limits["disk"]:
                total += file.write(b"x" * (MIB // 4))
    return [f"{total} bytes"] if total > limits["most_disk"] else []


def inodes(limits: Bounds) -> list[str]:
    count = 0
    for folder in ("many", "/tmp/many", "/dev/shm/many"):
        with contextlib.suppress(OSError):
            os.mkdir(folder)
            while count < 10 * limits["files"]:
                Path(folder, str(count)).touch()
                count += 1
    return [f"{count} files"] if count > limits["most_files"] else []


def many_descriptors(limits: Bounds) -> list[str]:
    opened: list[int] = []
    with contextlib.suppress(OSError):
        while len(opened) < 200_000:
            opened.append(os.dup(0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [f"{len(opened)} descriptors of {hard}"] if len(opened) > 70_000 else []


def deep_folders(limits: Bounds) -> list[str]:
    os.mkdir("deep")
    os.chdir("deep")
    with contextlib.suppress(OSError):
        for _ in range(1500):
            os.mkdir("d" * 30)
            os.chdir("d" * 30)
    return []


def sparse_files(limits: Bounds) -> list[str]:
    for index in range(20):
        with contextlib.suppress(OSError), Path(f"sparse-{index}").open("wb") as file:
            file.truncate(1 << 40 if index % 2 else limits["disk"] - 4096)
    return []


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    print(json.dumps(globals()[sys.argv[1]](json.load(sys.stdin))))
