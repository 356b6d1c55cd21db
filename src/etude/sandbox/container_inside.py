"""What runs inside a container, in the image's own Python: process 1, and what reads and writes files there.

Only the standard library, and nothing newer than Python 3.8: the text of this file is handed over on a command line.
The file commands run while nothing else does, with the workload's rights.
"""

# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH115, PTH118, PTH120, PTH123, PTH208, T201
from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import tarfile
import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKSPACE = "/workspace"
DEEPEST, LONGEST = 200, 3000  # a folder beyond cannot be told: the system's bound on a path is 4,096 bytes
MISSING, TOO_LARGE, REFUSED = 3, 4, 5  # exit codes; REFUSED says why on its error output


def init() -> None:
    """Be process 1: at every line on the input kill all others, and say how many were ever killed for want of memory."""
    if os.getpid() != 1:
        sys.exit("not process 1: would kill the machine's processes")
    os.chmod(WORKSPACE, 0o777)  # noqa: S103 - Podman gives it the mode of the image's folder
    os.chmod("/tmp", 0o1777)  # noqa: S103, S108
    print(_kills(), flush=True)
    for _ in sys.stdin:
        while _kill_others():
            time.sleep(0.001)
        print(_kills(), flush=True)


def _kill_others() -> bool:
    """Return whether there were any: also those that are dead and not yet reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kills() -> int:
    for name in ("memory.events", "memory/memory.oom_control"):  # cgroup v2, v1
        with contextlib.suppress(OSError), open("/sys/fs/cgroup/" + name, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0


def read(path: str, limit: str) -> None:
    """Write a file's content to the output."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            sys.exit(MISSING)
        if found.st_size > int(limit):
            sys.exit(TOO_LARGE)
        sys.stdout.buffer.write(file.read(int(limit)))


def write(path: str, mode: str) -> None:
    """Make a file of the input: beside, then renamed, so that a full disk leaves the old one."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        sys.exit(MISSING)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    beside = os.path.join(folder, ".etude-" + os.urandom(8).hex())
    try:
        with open(beside, "xb") as file:
            file.write(sys.stdin.buffer.read())
        os.chmod(beside, int(mode))
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def listing(path: str, _: str) -> None:
    """Write name, mode and size of all that is in a folder."""
    with os.scandir(path) as found:
        rows = [(each.name, each.stat(follow_symlinks=False)) for each in found]
    json.dump([(name, status.st_mode, status.st_size) for name, status in rows], sys.stdout)


def pack(path: str, budget: str) -> None:
    """Write the workspace as a tar. What cannot be told, as a file larger than what is left of the budget, is made a FIFO."""
    left = int(budget)
    os.chdir(path)
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT) as out:
        for name, status in _walk(""):
            info, mode = tarfile.TarInfo(name), status.st_mode
            info.mode = stat.S_IMODE(mode)
            content = None
            if stat.S_ISDIR(mode) and _reachable(name):
                info.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name)
            elif not stat.S_ISREG(mode) or status.st_size > left:
                info.type = tarfile.FIFOTYPE
            else:
                left -= status.st_size
                info.size = status.st_size
                content = _opened(name, mode)
            out.addfile(info, content)
            if content is not None:
                content.close()


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(os.listdir(folder or ".")):
        path, status = folder + name, os.lstat(folder + name)
        yield path, status
        if stat.S_ISDIR(status.st_mode) and _reachable(path):
            os.chmod(path, 0o700)  # its owner may have shut himself out
            yield from _walk(path + "/")
            os.chmod(path, stat.S_IMODE(status.st_mode))


def _reachable(folder: str) -> bool:
    return folder.count("/") < DEEPEST and len(os.fsencode(folder)) < LONGEST


def _opened(path: str, mode: int) -> IO[bytes]:
    if mode & stat.S_IRUSR:
        return open(path, "rb")
    os.chmod(path, 0o600)
    try:
        return open(path, "rb")
    finally:
        os.chmod(path, stat.S_IMODE(mode))


def main(words: list[str]) -> None:
    """Do what the words say; a path must lead to the workspace, links and all."""
    if words[0] == "init":
        return init()
    name = bytes.fromhex(words[1]).decode(errors="surrogateescape")  # an engine keeps no names that are not text
    path = os.path.realpath(os.path.join(WORKSPACE, name))
    if os.path.commonpath([path, WORKSPACE]) != WORKSPACE:
        sys.exit(MISSING)
    commands: dict[str, Callable[[str, str], None]]
    commands = {"read": read, "write": write, "list": listing, "pack": pack}
    try:
        return commands[words[0]](path, words[2])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError):
        sys.exit(MISSING)
    except OSError as error:
        sys.stderr.write(str(error))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:])
