"""One process at a time works on a run.

The kernel holds the lock (`flock`), so it ends with its owner, however that dies; the file beside it only tells who the
owner is. A lock file left by a dead owner therefore stops nobody, and is taken over with a word about it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_FILE = "lock"
LOOKS, LOOK_AGAIN = 10, 0.02  # times, seconds


class RunLock:
    """Holds a run for this process. Use as a context manager."""

    def __init__(self, run: Path, say: Callable[[str], object]) -> None:
        self.path = run / LOCK_FILE
        self.say = say
        self._descriptor = -1

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._take():
            os.close(self._descriptor)
            raise UserError(_refusal(self.path.parent, read_owner(self.path)))
        before = read_owner(self.path)
        if before:
            who = f"process {before['pid']} on {before['host']}"
            self.say(f"taking over {self.path.parent}: its last owner, {who}, ended without finishing")
        owner = {"pid": os.getpid(), "host": platform.node(), "name": _process_name(os.getpid()), "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)
        return self

    def _take(self) -> bool:
        """Take the kernel's lock; look again for a moment, since `etude status` holds it while it looks."""
        for _ in range(LOOKS):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_AGAIN)
            else:
                return True
        return False

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._descriptor, 0)  # an empty file: nobody owns it, and nobody died
        os.close(self._descriptor)


def _refusal(run: Path, owner: dict[str, Any] | None) -> str:
    if owner is None:
        return f"{run} is being used by another process; wait for it"
    who = f"process {owner['pid']} ({owner['name']}) on {owner['host']}"
    if owner["host"] == platform.node() and not Path(f"/proc/{owner['pid']}").exists() and Path("/proc").exists():
        return f"{run}: {who} has ended, but a process it started still holds the run; end that one first"
    return f"{run} is being used by {who}; wait for it, stop it, or choose another folder with --out"


def read_owner(lock_file: Path) -> dict[str, Any] | None:
    """Return who wrote the lock file last, or None if it was left in order."""
    try:
        owner = json.loads(lock_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "name"} <= set(owner) else None


def running_owner(run: Path) -> dict[str, Any] | None:
    """Return the process that works on a run now, or None. Takes nothing over."""
    lock_file = run / LOCK_FILE
    if not lock_file.exists():
        return None
    with lock_file.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_owner(lock_file) or {"pid": 0, "host": "unknown", "name": "unknown"}
    return None


def _process_name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "etude"
    program, *rest = [os.fsdecode(word) for word in words if word]
    return " ".join([Path(program).name, *rest]).replace("\n", " ")[:120]
