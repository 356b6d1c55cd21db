"""What runs inside a sandbox: a call's first process, a warm Python, reading and writing files; and process 1 of a container.

Everything here but a keeper's `walk` and a container's `init` runs with the workload's rights and no others. Standard library only,
and nothing newer than Python 3.8: a container is handed the text of this file on a command line.

Messages between host, keeper and children are a JSON header and raw bytes, both with their lengths before them.
File names are any bytes: they are decoded with surrogateescape, which JSON carries as escapes.
"""

# pathlib is slow to import, and a launcher must start fast.
# ruff: noqa: PTH101, PTH109, PTH115, PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import signal
import stat
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Header = dict[str, Any]

WORKSPACE = "/workspace"
STATUS = 3  # the descriptor on which a child says how it ended
DEEPEST, LONGEST = 200, 3000  # folders, and bytes of a path that every program can still name
BLOCK = 1 << 18
FOLDER = os.O_RDONLY | os.O_DIRECTORY
ANY_FILE = os.O_NONBLOCK | os.O_NOCTTY  # also a FIFO or a terminal, which must not hold us up
LENGTHS = struct.Struct(">IQ")


def pack(header: Header, payload: bytes = b"") -> bytes:
    """Return one message as bytes."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def take(buffer: bytearray) -> Iterator[tuple[Header, bytes]]:
    """Yield the whole messages at the beginning of a buffer and remove them from it."""
    begin = 0
    while len(buffer) - begin >= LENGTHS.size:
        header_size, payload_size = LENGTHS.unpack_from(buffer, begin)
        middle = begin + LENGTHS.size + header_size
        end = middle + payload_size
        if len(buffer) < end:
            break
        yield json.loads(buffer[begin + LENGTHS.size : middle]), bytes(buffer[middle:end])
        begin = end
    del buffer[:begin]


def report(**words: Any) -> None:
    """Tell the keeper how it ended."""
    os.write(STATUS, json.dumps(words).encode())


def kind_of(mode: int) -> str:
    return {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}.get(stat.S_IFMT(mode), "other")


def run_as_first_process(request: Header, warm: str | None) -> None:
    """Start the command and wait for it; everything else it started dies with this process."""
    try:
        os.chdir(posixpath.join(WORKSPACE, request["cwd"]))
    except (OSError, ValueError) as error:
        report(missing=f"{request['cwd']!r}: {error}")
        return
    pid = os.fork() if warm else spawn(request["words"], request["env"])
    if warm and pid == 0:
        os.close(STATUS)
        run_module(warm, request["words"][3:], request["env"])
    ended = -1
    while ended != pid:
        ended, status = os.wait()
    report(rc=os.waitstatus_to_exitcode(status))


def spawn(words: list[str], env: dict[str, str]) -> int:
    """Start the command and return its pid, or say why not and end as a shell does. Cheaper than a fork of this Python."""
    os.environ["PATH"] = env.get("PATH", os.defpath)  # where it is looked for
    closing, ignored_by_python = [(os.POSIX_SPAWN_CLOSE, STATUS)], [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        return os.posix_spawnp(words[0], words, env, file_actions=closing, setsigdef=ignored_by_python)
    except (OSError, ValueError) as error:  # the latter: a zero in a word, or what is no text
        os.write(2, f"{words[0]!r}: {error}\n".encode(errors="backslashreplace"))
        report(rc=127 if isinstance(error, FileNotFoundError) else 126)
        os._exit(0)


def run_module(module: str, arguments: list[str], env: dict[str, str]) -> None:
    """Do what `python -m MODULE` does, in this Python as it is, and end."""
    import atexit
    import runpy
    import threading
    import traceback

    from etude.sandbox import isolate

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
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        os._exit(code & 0xFF)


def _inside(descriptor: int) -> int:
    """Return a descriptor whose file lies in the workspace; any other is missing."""
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
        raise FileNotFoundError(2, "outside the workspace")
    return descriptor


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _open_file(path: str, flags: int, mode: int = 0, folder: int | None = None) -> int:
    """Open what is a file of the workspace, and nothing else."""
    descriptor = _inside(os.open(path, flags | ANY_FILE, mode, dir_fd=folder))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise FileNotFoundError(2, "not a file")
    return descriptor


def read(request: Header, _: bytes) -> None:
    """Send a file's content."""
    source, left = _open_file(posixpath.join(WORKSPACE, request["path"]), os.O_RDONLY), request["limit"]
    while block := os.read(source, BLOCK):
        left -= len(block)
        if left < 0:
            report(error=f"{request['path']!r} is larger than {request['limit']} bytes")
            return
        write_all(1, block)
    report()


def _folder(path: str) -> int:
    """Open a folder of the workspace, made where it is not there."""
    folder = os.open(WORKSPACE, FOLDER)
    for part in path.split("/"):
        try:
            below = os.open(part or ".", FOLDER, dir_fd=folder)
        except FileNotFoundError:
            os.mkdir(part, dir_fd=folder)
            below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        os.close(folder)
        folder = _inside(below)
    return folder


def write(request: Header, content: bytes) -> None:
    """Write a file. It is cut only once it is known to be a file of the workspace; a read-only one is replaced."""
    above, name = posixpath.split(request["path"])
    folder, flags = _folder(above), os.O_WRONLY | os.O_CREAT
    try:
        target = _open_file(name, flags, request["mode"], folder)
    except PermissionError:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise
        os.unlink(name, dir_fd=folder)
        target = _open_file(name, flags, request["mode"], folder)
    os.ftruncate(target, 0)
    write_all(target, content)
    os.fchmod(target, request["mode"])
    report()


def list_folder(request: Header, _: bytes) -> None:
    """Send a message for each thing in a folder."""
    folder = _inside(os.open(posixpath.join(WORKSPACE, request["path"]), FOLDER))
    for name in sorted(os.listdir(folder)):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # another call has just removed it
            continue
        path = posixpath.normpath(posixpath.join(request["path"], name))
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        header = {"path": path, "kind": kind_of(status.st_mode), "mode": status.st_mode & 0o7777, "size": size}
        write_all(1, pack(header))
    report()


@contextlib.contextmanager
def _opened(name: str, folder: int, mode: int, *, own: bool) -> Iterator[int]:
    """Open a file or folder, no link. `own`: as its owner, who may have shut himself out."""
    needed = stat.S_IRUSR | stat.S_IXUSR if stat.S_ISDIR(mode) else stat.S_IRUSR
    shut = own and mode & needed != needed
    if shut:
        os.chmod(name, 0o700, dir_fd=folder)
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        if shut:
            os.chmod(name, stat.S_IMODE(mode), dir_fd=folder)


def walk(request: Header, upper: int | None) -> None:
    """Send a message for each thing written above the layers, with its content; for a folder also all names now seen in it.

    With a keeper's rights, for it must read what its owner has closed. It follows no link and opens only files and folders.
    What has gone is not sent: the host finds it as what the layers have and the folder no longer shows.
    `upper`: a descriptor of what was written. None: that cannot be told apart, and all of the workspace is sent, by its owner.
    """
    left, own = request["limit"], upper is None

    def visit(above: int, seen: int, path: str, mode: int) -> None:
        write_all(1, pack({"path": path, "kind": "folder", "mode": stat.S_IMODE(mode), "names": os.listdir(seen)}))
        for name in sorted(os.listdir(above)):
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            if not (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0):  # the overlay's mark for what has gone
                send(name, above, seen, f"{path}/{name}" if path else name, status.st_mode)

    def send(name: str, above: int, seen: int, path: str, mode: int) -> None:
        nonlocal left
        kind, target = kind_of(mode), b""
        if kind == "folder" and len(os.fsencode(path)) <= LONGEST and path.count("/") < DEEPEST:
            with _opened(name, above, mode, own=own) as one, _opened(name, seen, mode, own=False) as two:
                visit(one, two, path, mode)
            return
        if kind == "file":
            with _opened(name, above, mode, own=own) as source:
                size = os.fstat(source).st_size
                if size <= left:  # else it has more bytes than the sandbox's disk: most of it are gaps
                    left -= size
                    _send_file({"path": path, "kind": kind, "mode": stat.S_IMODE(mode)}, source, size)
                    return
        if kind == "link":
            target = os.fsencode(os.readlink(name, dir_fd=above))
        write_all(1, pack({"path": path, "kind": "link" if target else "other", "mode": stat.S_IMODE(mode)}, target))

    root = os.open(WORKSPACE, FOLDER)
    visit(root if upper is None else upper, root, "", 0)
    report()


def _send_file(header: Header, source: int, size: int) -> None:
    """Send so many bytes of a file, block by block; where it has become shorter meanwhile, zeros."""
    text = json.dumps(header).encode()
    write_all(1, LENGTHS.pack(len(text), size) + text)
    while size:
        block = os.read(source, min(size, BLOCK)) or bytes(min(size, BLOCK))
        write_all(1, block)
        size -= len(block)


FILE_WORK: dict[str, Callable[[Header, bytes], None]] = {"read": read, "write": write, "list": list_folder}


def do(request: Header, payload: bytes) -> None:
    """Run file work and tell how it ended. What the file system refuses the workload is the workload's affair."""
    try:
        FILE_WORK[request["op"]](request, payload)
    except (OSError, ValueError) as error:
        report(missing=f"{request['path']!r}: {error}")


def init() -> None:
    """Be process 1 of a container: at every line on the input kill all others, and say how many were killed for want of memory."""
    if os.getpid() != 1:
        sys.exit("not process 1: would kill the machine's processes")
    os.chmod(WORKSPACE, 0o1777)  # noqa: S103 - Podman gives it the mode of the image's folder; files that are root's stay
    os.chmod("/tmp", 0o1777)  # noqa: S103, S108
    if os.path.ismount("/root"):
        os.chmod("/root", 0o755)  # noqa: S103 - an environment lies below it
    print(_kills(), flush=True)  # noqa: T201
    for _ in sys.stdin:
        while _kill_others():
            time.sleep(0.001)
        print(_kills(), flush=True)  # noqa: T201


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
    with contextlib.suppress(OSError), open("/sys/fs/cgroup/memory.events", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0


def main(words: list[str]) -> None:
    """In a container: be its process 1, or do the file work that the words say, while nothing else runs; the status goes to stderr."""
    if not words:
        init()
        return
    os.dup2(2, STATUS)
    request = json.loads(words[0])
    if request["op"] == "walk":
        walk(request, None)
    else:
        do(request, sys.stdin.buffer.read())


if __name__ == "__main__":
    main(sys.argv[1:])
