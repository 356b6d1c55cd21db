"""What runs in the short-lived children of a keeper: a call's first process, a warm Python, reading and writing files.

Everything here but `walk` runs with the workload's rights and no others. Standard library only.
"""

# pathlib is slow to import, and a launcher must start fast.
# ruff: noqa: PTH109, PTH115, PTH208

from __future__ import annotations

import json
import os
import posixpath
import signal
import stat
import sys
from typing import TYPE_CHECKING, Any

from etude.sandbox import isolate, wire
from etude.sandbox.isolate import WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Callable

STATUS = 3  # the descriptor on which a child tells its keeper how it ended
LONGEST = 3000  # bytes of a path that every program can still name
BLOCK = 1 << 18


def report(**words: Any) -> None:
    """Tell the keeper."""
    os.write(STATUS, json.dumps(words).encode())


def kind_of(mode: int) -> str:
    """Return what box.Kind calls such a file."""
    return {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(mode), "other")


def run_as_first_process(request: dict[str, Any], warm: str | None) -> None:
    """Start the command and wait for it; everything else it started dies with this process."""
    try:
        os.chdir(posixpath.join(WORKSPACE, request["cwd"]))
    except (OSError, ValueError) as error:
        report(missing=f"{request['cwd']!r}: {error}")
        return
    pid = fork_module(warm, request) if warm else spawn(request["words"], request["env"])
    while True:
        ended, status = os.wait()
        if ended == pid:
            break
    report(rc=os.waitstatus_to_exitcode(status))


def spawn(words: list[str], env: dict[str, str]) -> int:
    """Start the command and return its pid, or say why not and end as a shell does. Cheaper than a fork of this Python."""
    os.environ["PATH"] = env.get("PATH", os.defpath)  # where it is looked for
    ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        return os.posix_spawnp(
            words[0], words, env, file_actions=[(os.POSIX_SPAWN_CLOSE, STATUS)], setsigdef=ignored_by_python
        )
    except (OSError, ValueError) as error:  # the latter: a zero in a word, or what is no text
        os.write(2, f"{words[0]!r}: {error}\n".encode(errors="backslashreplace"))
        report(rc=127 if isinstance(error, FileNotFoundError) else 126)
        os._exit(0)


def fork_module(module: str, request: dict[str, Any]) -> int:
    """Start a warm module and return its pid."""
    pid = os.fork()
    if pid == 0:
        os.close(STATUS)
        run_module(module, request["words"][3:], request["env"])
    return pid


def run_module(module: str, arguments: list[str], env: dict[str, str]) -> None:
    """Do what `python -m MODULE` does, in this Python as it is, and end."""
    import runpy
    import threading
    import traceback

    isolate.prctl(isolate.PR_SET_DUMPABLE, 1)  # as for every program: it may look at itself
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
        del sys.modules[name]
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = [module, *arguments]
    sys.path[:0] = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(":"))]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if leaving.code is not None and not isinstance(leaving.code, int):
            sys.stderr.write(f"{leaving.code}\n")
    except BaseException:  # noqa: BLE001 - as Python itself does at its outermost
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads, as Python's own end does
        import atexit

        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os._exit(code & 0xFF)


def _inside(descriptor: int) -> int:
    """Return a descriptor whose file lies in the workspace; any other is missing."""
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
        raise FileNotFoundError(2, "outside the workspace")
    return descriptor


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def read(request: dict[str, Any], _: bytes) -> None:
    """Send a file's content."""
    source = _inside(os.open(posixpath.join(WORKSPACE, request["path"]), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
    if not stat.S_ISREG(os.fstat(source).st_mode):
        raise FileNotFoundError(2, "not a file")
    left = request["limit"]
    while block := os.read(source, BLOCK):
        left -= len(block)
        if left < 0:
            report(error=f"{request['path']!r} is larger than {request['limit']} bytes")
            return
        _write_all(1, block)
    report()


def _folder(path: str) -> int:
    """Open a folder of the workspace, made where it is not there."""
    folder = os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)
    for part in path.split("/"):
        try:
            below = os.open(part or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        except FileNotFoundError:
            os.mkdir(part, dir_fd=folder)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        os.close(folder)
        folder = _inside(below)
    return folder


def write(request: dict[str, Any], content: bytes) -> None:
    """Write a file. It is cut only once it is known to be a file of the workspace."""
    above, name = posixpath.split(request["path"])
    target = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, request["mode"], dir_fd=_folder(above)
    )
    _inside(target)
    if not stat.S_ISREG(os.fstat(target).st_mode):
        raise FileNotFoundError(2, "not a file")
    os.ftruncate(target, 0)
    _write_all(target, content)
    os.fchmod(target, request["mode"])
    report()


def list_folder(request: dict[str, Any], _: bytes) -> None:
    """Send a message for each thing in a folder."""
    folder = _inside(os.open(posixpath.join(WORKSPACE, request["path"]), os.O_RDONLY | os.O_DIRECTORY))
    for name in sorted(os.listdir(folder)):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # another call has just removed it
            continue
        path = posixpath.normpath(posixpath.join(request["path"], name))
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        _write_all(
            1, wire.pack({"path": path, "kind": kind_of(found.st_mode), "mode": found.st_mode & 0o7777, "size": size})
        )
    report()


def walk(request: dict[str, Any], upper: int) -> None:
    """Send a message for each thing written above the layers, with its content; for a folder also all names now seen in it.

    This one keeps the keeper's rights, for it must read what its owner has closed. It follows no link and opens only files
    and folders. What has gone is not sent: the host finds it as what the layers have and the folder no longer shows.
    """
    left = request["limit"]
    merged = os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)
    pending = [(os.dup(upper), merged, "")]
    while pending:
        above, seen, path = pending.pop()
        names = os.listdir(seen)
        mode = os.fstat(seen).st_mode & 0o7777
        _write_all(1, wire.pack({"path": path, "kind": "folder", "mode": mode, "names": names}))
        for name in os.listdir(above):
            below = f"{path}/{name}" if path else name
            found = os.stat(name, dir_fd=above, follow_symlinks=False)
            kind = kind_of(found.st_mode)
            content = b""
            if kind == "other" and found.st_rdev == 0 and stat.S_ISCHR(found.st_mode):
                continue  # the overlay's mark for what has gone
            if kind == "folder" and len(os.fsencode(below)) <= LONGEST:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                pending.append((os.open(name, flags, dir_fd=above), os.open(name, flags, dir_fd=seen), below))
                continue
            if kind == "folder":
                kind = "other"
            elif kind == "link":
                content = os.fsencode(os.readlink(name, dir_fd=above))
            elif kind == "file":
                whole = _content(name, above, left)
                kind, content = ("other", b"") if whole is None else ("file", whole)
                left -= len(content)
            header = {"path": below, "kind": kind, "mode": found.st_mode & 0o7777}
            _write_all(1, wire.pack(header, content))
        os.close(above)
        os.close(seen)
    report()


def _content(name: str, folder: int, limit: int) -> bytes | None:
    """Return a file's content, unless it has more bytes than the sandbox's disk has left: then most of it are gaps."""
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(source, "rb") as file:
        content = file.read(limit + 1)
    return content if len(content) <= limit else None


FILE_WORK: dict[str, Callable[[dict[str, Any], bytes], None]] = {"read": read, "write": write, "list": list_folder}


def do(request: dict[str, Any], payload: bytes) -> None:
    """Run file work and tell how it ended. What the file system refuses the workload is the workload's affair."""
    try:
        FILE_WORK[request["op"]](request, payload)
    except (OSError, ValueError) as error:
        report(missing=f"{request['path']!r}: {error}")
