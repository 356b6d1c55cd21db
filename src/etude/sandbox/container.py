"""A sandbox in a container of Docker or Podman, for machines where an engine runs and plain namespaces are refused.

The engine is driven by its command line, and only by `run`, `exec` and `rm`. Process 1 of the container is `inside.init`, root without
any right but CAP_KILL: a line on its input makes it kill all others and answer when it is alone; the end of its input ends the
container. So nothing outlives a call, nor this process. Commands run by `exec` as an id that owns nothing outside.

Unlike `local`: the image must have python3, sh and tar; the layers are copied in and lie in memory; calls wait for each
other, as what one has left running cannot be told from another; an end by signal n and an exit with 128 + n are the same;
`Place.warm` makes nothing faster; /tmp has a bound of its own, as large as the workspace's; Podman bounds files by memory alone.

Layers are copied in as one tar; files are read and written by `inside`, whose source is passed to the image's Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import platform
import posixpath
import re
import resource
import secrets
import tarfile
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etude.errors import UserError
from etude.sandbox import inside, isolate
from etude.sandbox.box import WORKSPACE, Place, Result, Sandbox, SandboxError, answered, plain_path
from etude.sandbox.keeper import Clip
from etude.sandbox.layers import Below
from etude.sandbox.local import BASE_ENV, shown

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


BLOCK = 4096


Packed = IO[bytes]


def pack_layers(layers: Iterable[Path], file: Packed, fixed: Collection[str] = (), owned: Packed | None = None) -> int:
    """Write what the layers show as a tar; return the bytes that takes in memory.

    `fixed` files and the folders above them go into a tar of their own, which root unpacks: what is in a folder with the sticky bit,
    nobody but its owner can remove or rename, nor can the folder be.
    """
    held, kept = 0, {path.rpartition("/")[0] for path in fixed}
    kept |= {"/".join(folder.split("/")[:depth]) for folder in kept for depth in range(1, folder.count("/") + 1)}
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as out, ExitStack() as stack:
        own = stack.enter_context(tarfile.open(fileobj=owned, mode="w", format=tarfile.GNU_FORMAT)) if owned else out
        for path, place in _shown(Below(tuple(layers)), ""):
            about = own if path in kept or path in fixed else out
            about.inodes = {}  # type: ignore[attr-defined]  # two names of one file in a layer are two files
            about.add(place, path, recursive=False, filter=_fixed if about is own and owned else None)
            held += (place.lstat().st_size // BLOCK + 2) * BLOCK
    return held


def _fixed(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mode = 0o1777 if entry.isdir() else entry.mode & 0o755 | 0o444
    return entry


def _shown(below: Below, prefix: str) -> Iterator[tuple[str, Path]]:
    for name in sorted(below.names()):
        child = below.child(name)
        yield prefix + name, child.file or child.folders[0]
        yield from _shown(child, f"{prefix}{name}/")


WORKLOAD = "61185:61185"
_runs: set[tuple[str, str, Path]] = set()  # engines, images and Pythons of this machine that were tried and work
PATIENCE = 300.0  # seconds for what the engine itself has to do: on a crowded machine starting takes minutes
RUN = '(cd "$0" && exec "$@"); rc=$?; kill -9 -1 2>/dev/null; exit $rc'  # a daemon must not hold the call's pipes open


def run_words(engine: str, image: str, place: Place, name: str, held: int, filtering: str) -> list[str]:
    """Return the command that starts a container whose layers hold so many bytes, under the filter in a file."""
    limits = place.limits
    disk = limits.disk + held
    bounds = {"core": 0, "cpu": limits.cpu_seconds, "fsize": disk}
    special = f"nr_inodes={limits.files}" if Path(engine).name == "docker" else "notmpcopyup"
    shared = f"rw,exec,nosuid,nodev,size={disk},{special}"
    words = [engine, "run", "-i", "--rm", "--name", name, "--log-driver", "none", "--pull", "never"]
    words += ["--network", "none", "--hostname", "sandbox", "--user", "0:0", "--read-only"]
    words += ["--cap-drop", "ALL", "--cap-add", "KILL"]
    words += ["--security-opt", "no-new-privileges", "--security-opt", f"seccomp={filtering}"]
    words += ["--memory", str(limits.memory + held), "--memory-swap", str(limits.memory + held)]
    words += ["--pids-limit", str(limits.processes + 2), "--cpus", str(limits.cpus)]  # process 1 and what `exec` needs
    words += [*bounded(), *(word for key, bound in bounds.items() for word in ("--ulimit", f"{key}={bound}:{bound}"))]
    words += ["--tmpfs", f"{WORKSPACE}:{shared},mode=0777", "--tmpfs", f"/tmp:{shared},mode=1777"]  # noqa: S108 - inside
    mounts = {str(folder): str(folder) for folder in place.readonly} | shown(place)
    if any(f"{path}/".startswith("/root/") for path in mounts):  # which images close to all but root
        words += ["--tmpfs", "/root:rw,size=65536,mode=0755"]
    words += [word for path, source in mounts.items() for word in ("--volume", f"{source}:{path}:ro")]
    words += [word for folder in place.hidden for word in ("--tmpfs", f"{folder}:ro,size=4096,mode=0755")]
    return [*words, image, *_python()]


def bounded() -> list[str]:
    """Return how many files and processes an engine is to allow: what it would set itself may be more than this process may."""
    words = []
    # Processes are counted by id, and other containers use the same.
    for key, which, wanted in (("nofile", resource.RLIMIT_NOFILE, 4096), ("nproc", resource.RLIMIT_NPROC, 20_000)):
        own = resource.getrlimit(which)[1]
        most = min(wanted, own if own >= 0 else wanted)
        words += ["--ulimit", f"{key}={most}:{most}"]
    return words


def profile() -> dict[str, Any]:
    """Return our own filter as an engine's: what the engines refuse by themselves differs, and Podman's allows user namespaces."""
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}

    def masked(index: int, mask: int, value: int) -> dict[str, object]:
        return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

    def equal(index: int, value: int) -> dict[str, object]:
        return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}

    flags = [1 << bit for bit in range(32) if isolate.NAMESPACES >> bit & 1]
    families = sorted(set(range(46)) - {isolate.UNIX, isolate.INET, isolate.INET6, isolate.NETLINK})
    absent = sorted(["clone3", *isolate.ABSENT])
    rules = [{"names": sorted(isolate.REFUSED), **refuse}, {"names": absent, **refuse, "errnoRet": errno.ENOSYS}]
    rules += [{"names": ["clone"], **refuse, "args": [masked(0, flag, flag)]} for flag in flags]
    rules += [{"names": ["socket"], **refuse, "args": [equal(0, family)]} for family in families]
    routes = {"index": 2, "value": 0, "op": "SCMP_CMP_NE"}
    rules += [{"names": ["socket"], **refuse, "args": [equal(0, isolate.NETLINK), routes]}]
    rules += [{"names": ["ioctl"], **refuse, "args": [equal(1, number)]} for number in isolate.TERMINAL_INJECTION]
    rules += [{"names": ["ioctl"], **refuse, "args": [masked(1, 0xFF00, kind)]} for kind in isolate.FILE_SYSTEM_IOCTLS]
    rules += [{"names": ["fcntl"], **refuse, "args": [equal(1, number)]} for number in isolate.FILE_CONTROLS]
    rules += [{"names": ["mknod"], **refuse, "args": [masked(1, 0xF000, kind)]} for kind in isolate.DEVICE_KINDS]
    rules += [{"names": ["mknodat"], **refuse, "args": [masked(2, 0xF000, kind)]} for kind in isolate.DEVICE_KINDS]
    native = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[platform.machine()]
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [native], "syscalls": rules}


def _python(*words: str) -> list[str]:
    text = Path(inside.__file__).read_text(encoding="utf-8")
    return ["python3", "-I", "-S", "-c", text, *words]


async def _drain(stream: asyncio.StreamReader, clip: Clip) -> None:
    while block := await stream.read(1 << 16):
        clip.add(block)


def gathered(process: Process, clips: tuple[Clip, Clip]) -> asyncio.Future[Any]:
    """Return what is done when a process has ended and the clips hold all that it wrote."""
    streams = zip((process.stdout, process.stderr), clips, strict=True)
    waits = [asyncio.create_task(_drain(stream, clip)) for stream, clip in streams if stream is not None]
    return asyncio.gather(process.wait(), *waits)


def result_of(process: Process, clips: tuple[Clip, Clip], **how: Any) -> Result:
    """Return how a call ended; an exit with 128 + n is taken for an end by signal n."""
    rc = process.returncode or 0
    rc = 128 - rc if 128 < rc < 128 + 65 else rc
    return Result(rc, bytes(clips[0]), bytes(clips[1]), cut=(clips[0].cut, clips[1].cut), **how)


def env_words(*variables: Mapping[str, str] | None) -> list[str]:
    """Return variables as options of an engine, the last of one name."""
    merged = {name: value for each in variables if each for name, value in each.items()}
    return [word for name, value in merged.items() for word in ("--env", f"{name}={value}")]


@contextlib.contextmanager
def filled(content: bytes = b"") -> Iterator[IO[bytes]]:
    """Give a temporary file with some content, at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


class EngineSandbox(Sandbox):
    """What every container has: an engine's command line drives it, and it ends when the input of its first process ends."""

    def __init__(self, engine: str, image: str, place: Place) -> None:
        self.engine, self.image, self.place = engine, image, place
        self.backend = f"{Path(engine).name}:{image}"
        self.name = f"etude-{secrets.token_hex(8)}"
        self.process: Process | None = None

    async def _run(self, words: list[str], up: bytes, needs: str) -> None:
        """Start the container. `up`: what its first line must match; `needs`: what an image that says nothing may lack."""
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        try:
            first = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        except TimeoutError:
            raise SandboxError(f"{self.backend}: no container within {PATIENCE:.0f} s") from None
        if not re.fullmatch(up, first):
            said = (await self.process.stderr.read(2000)).decode(errors="replace").split("\n")[0]
            raise SandboxError(f"{self.backend}: no container was started: {said or f'no {needs}?'}")

    def _answer(self, op: str, done: Result, content: bytes) -> tuple[dict[str, Any], bytes]:
        """Return what `inside` said on its error stream, and what it sent."""
        try:
            return answered(json.loads(done.err), content)
        except ValueError:
            why = done.err.decode(errors="replace")[-300:] or f"it ended with {done.rc}"
            raise SandboxError(f"cannot {op} files in the container: {why}") from None


class ContainerSandbox(EngineSandbox):
    """One container."""

    def __init__(self, engine: str, image: str, place: Place) -> None:
        super().__init__(engine, image, place)
        self.lock = asyncio.Lock()
        self.oom_kills = 0

    @classmethod
    async def open(cls, engine: str, image: str, place: Place) -> ContainerSandbox:
        """Start a container and fill its workspace. `engine`: the program podman or docker, by its name or its path."""
        box = cls(engine, image, place)
        try:
            await box._start()
        except BaseException:
            await box.close()
            raise
        return box

    async def _start(self) -> None:
        with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as owned:
            fixed = frozenset(self.place.fixed)
            self.held = await asyncio.to_thread(pack_layers, self.place.layers, packed, fixed, owned)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as filtering:
                json.dump(profile(), filtering)
                filtering.flush()
                words = run_words(self.engine, self.image, self.place, self.name, self.held, filtering.name)
                await self._run(words, rb"\s*\d+\s*", "python3")
            for file, user in ((owned, "0:0"), (packed, WORKLOAD)) if fixed else ((packed, WORKLOAD),):
                file.seek(0)
                words = ["tar", "-x", "-p", "--no-same-owner", "-f", "-"]
                done = await self._call(words, stdin=file, timeout=PATIENCE * 10, user=user)
                if done.rc != 0:
                    raise SandboxError(f"the layers do not fit: {done.err.decode(errors='replace')[:300]}")
        if self.place.warm and (self.engine, self.image, self.place.warm[0]) not in _runs:
            await self._try_python(str(self.place.warm[0]))

    async def _try_python(self, python: str) -> None:
        """Refuse an image that cannot run the Python of a codebase: one of this machine, which needs its C library or a newer one."""
        done = await self.exec([python, "-c", "import ssl, ctypes, zlib"], timeout=PATIENCE)
        if done.rc:
            said = done.err.decode(errors="replace").strip().split("\n")[-1][:200]
            needs = "its C library must be as new as this machine's, and for a Python of /usr it must have the same version itself"
            raise UserError(f"the image {self.image} cannot run {python} ({said}): {needs}; choose another image")
        _runs.add((self.engine, self.image, Path(python)))

    async def exec(
        self, command: str | Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None, stdin: bytes = b"",
        cwd: str = ".",
    ) -> Result:  # fmt: skip
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        limits = self.place.limits
        bound = limits.seconds if timeout is None else timeout
        with filled(stdin) as given:
            return await self._call(words, stdin=given, timeout=bound, env=env, cwd=cwd, keep=limits.output)

    async def _call(self, words: list[str], *, stdin: IO[bytes], timeout: float, env: Mapping[str, str] | None = None,
                    cwd: str = ".", keep: int = 1 << 20, out: IO[bytes] | None = None, user: str = WORKLOAD) -> Result:  # fmt: skip
        """Run words, alone; kill what they leave."""
        given = env_words(BASE_ENV, self.place.env, env)
        place = ["--workdir", WORKSPACE, self.name, "sh", "-c", RUN, posixpath.join(WORKSPACE, plain_path(cwd))]
        call = [self.engine, "exec", "-i", "--user", user, *given, *place, *words]
        clips = Clip(keep), Clip(keep)
        async with self.lock:
            began = time.monotonic()
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*call, stdin=stdin, stdout=out or pipe, stderr=pipe)
            ended = gathered(process, clips)
            try:
                done, _ = await asyncio.wait([ended], timeout=timeout)
                seconds = time.monotonic() - began
                oom = await self._clear()
                await asyncio.wait_for(ended, PATIENCE)
            except BaseException as error:  # also when the caller gives up
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await self.close()
                if isinstance(error, TimeoutError):
                    raise SandboxError(f"{self.backend} exec did not end") from error
                raise
        return result_of(process, clips, timed_out=not done, oom=oom, seconds=seconds)

    async def _clear(self) -> bool:
        """Have all killed that runs; return whether something was killed for want of memory since the last time."""
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            raise SandboxError("the sandbox is closed")
        with contextlib.suppress(ConnectionError):
            process.stdin.write(b"\n")
            await process.stdin.drain()
        answer = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        if not answer.strip().isdigit():
            raise SandboxError(f"the container of {self.backend} has ended")
        before, self.oom_kills = self.oom_kills, int(answer)
        return self.oom_kills > before

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        with filled(payload) as given, filled() as sent:
            words = _python(json.dumps(header))
            done = await self._call(words, stdin=given, timeout=PATIENCE * 10, keep=1 << 17, out=sent)
            sent.seek(0)
            return self._answer(header["op"], done, sent.read())

    async def close(self) -> None:
        """End the container: it removes itself when its input ends, and is removed by force where it does not."""
        process, self.process = self.process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                await asyncio.wait_for(process.communicate(), PATIENCE)
            except TimeoutError:
                removal = await asyncio.create_subprocess_exec(self.engine, "rm", "-f", self.name)
                await removal.wait()
