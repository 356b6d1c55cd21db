"""What the hostile tests put on the host: secrets that must not be reached, listeners that must hear nothing; and what is left behind."""

# ruff: noqa: PTH115, PTH208
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import re
import secrets
import shutil
import socket
import termios
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Host:
    """What must not be reached, and who listens."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secret, self.token = folder, f"secret-{secrets.token_hex(8)}", f"token-{secrets.token_hex(8)}"
        self.layer, self.outside = folder / "task" / "layer", folder / "outside"
        self.seen: list[bytes] = []
        self.layer.mkdir(parents=True)
        self.outside.mkdir()
        (self.layer / "kept.txt").write_text("as it was")
        for name in ("attacks.py", "bombs.py"):
            shutil.copy(HERE / name, self.layer / name)
        hidden = [
            folder / "task" / "check.py",
            folder / "home" / ".netrc",
            Path("/dev/shm") / self.token,
            self.outside / self.token,
        ]
        for path in hidden:
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.secret)
        os.environ["HOSTILE_SECRET"] = self.secret
        self.open_file = os.open(hidden[0], os.O_RDONLY)
        os.set_inheritable(self.open_file, True)
        self.facts: dict[str, Any] = {
            "secret": self.secret,
            "token": self.token,
            "outside": str(self.outside),
            "secrets": list(map(str, hidden)),
        }
        self.facts |= {
            "shm_key": int.from_bytes(secrets.token_bytes(3), "big"),
            "terminal": self._terminal(),
            **self._listen(),
        }
        libc, key = ctypes.CDLL(None), self.facts["shm_key"]
        self.shm, self.queue = libc.shmget(key, 4096, 0o1666), libc.msgget(key, 0o1666)
        self.semaphore = libc.semget(key, 1, 0o1666)
        libc.mq_open(f"/{self.token}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)

    def _terminal(self) -> str:
        """Take a terminal of our own: the sandbox must not get at it."""
        self.master, terminal = pty.openpty()
        with contextlib.suppress(OSError):
            os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 1)
        return os.ttyname(terminal)

    def _listen(self) -> dict[str, Any]:
        tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        tcp.bind(("0.0.0.0", 0))
        udp.bind(("0.0.0.0", 0))
        path.bind(str(self.folder / "socket"))
        abstract.bind("\0" + self.token)
        (self.folder / "socket").chmod(0o777)
        for each in (tcp, path, abstract):
            each.listen()
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()
        threading.Thread(target=self._answer, args=(udp,), daemon=True).start()
        with socket.socket(type=socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        here = {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "address": locals().get("address", "127.0.0.1"),
        }
        return here | {"unix": str(self.folder / "socket"), "abstract": self.token}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with listener.accept()[0] as made:
                self.seen.append(made.recv(100))

    def _answer(self, listener: socket.socket) -> None:
        while True:
            asked, who = listener.recvfrom(1000)
            self.seen.append(asked)
            listener.sendto(asked, who)

    def harm(self) -> list[str]:
        """Return what has changed outside, and forget it."""
        found = [f"the host heard {each!r}" for each in self.seen]
        self.seen.clear()
        if (self.layer / "kept.txt").read_text() != "as it was":
            found.append("the layer has changed")
            (self.layer / "kept.txt").write_text("as it was")
        if sorted(os.listdir(self.outside)) != [self.token] or (self.outside / self.token).read_text() != self.secret:
            found.append("the folder outside has changed")
        return found

    def remove(self) -> None:
        """Leave nothing: a System V segment would stay for ever."""
        libc = ctypes.CDLL(None)
        libc.shmctl(self.shm, 0, None)
        libc.msgctl(self.queue, 0, None)
        libc.semctl(self.semaphore, 0, 0, None)
        libc.mq_unlink(f"/{self.token}".encode())
        Path("/dev/shm", self.token).unlink()


def processes(marker: str) -> list[int]:
    """Return the processes whose command line has a word, but not this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def remains() -> dict[str, set[str]]:
    """Return what could be left behind: mounts but those of tests beside this one, cgroups, files in shared memory, processes and
    descriptors of ours.
    """
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {
        "processes": {str(pid) for pid in ours},
        "mounts": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/pytest-of-" not in line},
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob("**/") if _is_ours(path.name, ours)},
        "shared memory": {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name},
        "descriptors": {
            f"{name} {os.readlink(f'/proc/self/fd/{name}')}" for name in os.listdir("/proc/self/fd") if _open(name)
        },
    }


def _is_ours(group: str, ours: set[int]) -> bool:
    """Whether a cgroup is a container's, or of a launcher of this process: others may be at work on this machine."""
    return group.startswith("libpod-") or (
        group.startswith("etude-") and bool(ours & {int(n) for n in re.findall(r"\d+", group)})
    )


def _open(name: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(int(name)))
    return False
