"""Uses of resources without end, run inside a sandbox: `python3 bombs.py NAME < LIMITS` prints a JSON list of bounds it went beyond."""

# ruff: noqa: PTH102, T201
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MIB = 1 << 20
HOLDERS = 12
libc = ctypes.CDLL(None, use_errno=True)
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
    with contextlib.suppress(PermissionError):
        _touch(mmap.mmap(-1, 2 * limits["memory"], flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
        return ["shared memory"]
    return []


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


def _held_by_children(limits: Bounds, hold: Callable[[], Iterator[int]]) -> list[str]:
    """Have half as much again held as is allowed, by some children; name it if it is still held when a watchdog has surely looked.

    Not by more of them than it takes: what they are themselves would be too much, and hide that what they hold is not counted.
    """
    reading, writing = os.pipe()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(HOLDERS):
        if os.fork() == 0:
            os.close(reading)
            with contextlib.suppress(OSError, MemoryError):
                for size in hold():
                    os.write(writing, struct.pack("Q", size))
            os.close(writing)
            signal.pause()
    os.close(writing)
    kept = 0
    while kept < 1.5 * limits["memory"] and (piece := os.read(reading, 8)):
        kept += struct.unpack("Q", piece)[0]
    if kept < 1.5 * limits["memory"]:
        return []
    time.sleep(3)
    return [f"{kept} bytes"]


def _filled(files: Iterable[int]) -> int:
    """Return how many bytes could be written."""
    total = 0
    for file in files:
        os.set_blocking(file, False)
        with contextlib.suppress(BlockingIOError):
            while total < 64 * MIB:
                total += os.write(file, bytes(1 << 16))
    return total


def unix_socket_buffers(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        pairs = []
        while True:
            pairs.append(socket.socketpair())
            for each in pairs[-1]:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
            yield _filled(each.fileno() for each in pairs[-1])

    return _held_by_children(limits, hold)


def datagram_buffers(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        held = []
        while True:
            held.append((socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)))
            one, other = held[-1]
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
            one.bind(("127.0.0.1", 0))
            yield sum(other.sendto(bytes(1 << 15), one.getsockname()) for _ in range(6))

    return _held_by_children(limits, hold)


def tcp_buffers(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        server, held = socket.create_server(("127.0.0.1", 0)), []
        while True:
            held += [socket.create_connection(server.getsockname()), server.accept()[0]]
            yield _filled(each.fileno() for each in held[-2:])

    return _held_by_children(limits, hold)


def pipe_buffers(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        held = []
        while True:
            held.append(os.pipe())
            with contextlib.suppress(OSError):
                fcntl.fcntl(held[-1][1], 1031, MIB)  # F_SETPIPE_SZ
            yield _filled([held[-1][1]])

    return _held_by_children(limits, hold)


def _map(size: int, access: int, flags: int, file: int = -1) -> int:
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address: int = libc.mmap(None, size, access, flags, file, 0) or 0
    if address in {0, (1 << 64) - 1}:
        raise MemoryError
    return address


def page_tables(limits: Bounds) -> list[str]:
    """Read from a vast mapping, which has one page of zeros everywhere and costs a page of tables for every two megabytes."""

    def hold() -> Iterator[int]:
        size = 1 << 40
        start = _map(size, 1, 0x4022)  # private, anonymous, not reserved
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 15)  # no huge pages
        for at in range(start, start + size, 2 * MIB):
            ctypes.c_char.from_address(at).value  # noqa: B018
            yield 4096

    return _held_by_children(limits, hold)


def hidden_mappings(limits: Bounds) -> list[str]:
    """Shared mappings of which all but a page was unmapped: what was written is still there."""

    def hold() -> Iterator[int]:
        size = 8 * MIB
        for file, flags in ((-1, 0x21), (os.open("/dev/zero", os.O_RDWR), 0x1)):
            with contextlib.suppress(MemoryError):
                for _ in range(40):
                    start = _map(size, 3, flags, file)
                    ctypes.memset(start, 1, size)
                    libc.munmap(ctypes.c_void_p(start + 4096), ctypes.c_size_t(size - 4096))
                    yield size

    return _held_by_children(limits, hold)


def semaphores(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        while libc.semget(0, 32000, 0o1600) >= 0:
            yield 32000 * 64

    return _held_by_children(limits, hold)


def messages(limits: Bounds) -> list[str]:
    def hold() -> Iterator[int]:
        while (queue := libc.msgget(0, 0o1600)) >= 0:
            yield 8000 * sum(libc.msgsnd(queue, struct.pack("l", 1) + bytes(8000), 8000, 0o4000) == 0 for _ in range(2))

    return _held_by_children(limits, hold)


def spliced_pages(limits: Bounds) -> list[str]:
    """A pipe that holds one page of each of several huge ones keeps them whole when they are unmapped."""

    def hold() -> Iterator[int]:
        held, huge = [], 2 * MIB
        while True:
            held.append(os.pipe())
            start = _map(4 * huge, 3, 0x22)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(4 * huge), 14)
            ctypes.memset(start, 1, 4 * huge)
            pages = [(start // huge + 1 + at) * huge for at in range(3)]
            kept = sum(libc.vmsplice(held[-1][1], (ctypes.c_size_t * 2)(page, 4096), 1, 2) == 4096 for page in pages)
            libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(4 * huge))
            if not kept:
                return
            yield kept * huge

    return _held_by_children(limits, hold)


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
