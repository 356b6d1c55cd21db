"""A container of a benchmark's own image, as that benchmark runs it: its user and files, and what an agent started still running.

It is a place to work in, not a jail as strong as the others: its root may write everywhere in the container, and the engine's own
filter and rights hold. Nothing of the host is mounted, there is no network unless the benchmark asks for one, and memory and
processes are bounded. The end of its first process's input ends it; so it cannot outlive this process. A command that takes too long
is killed with its group (by `timeout`, which the image must have, as it must have sh and tar; tools that read and change files ask for
python3 as well).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etude.sandbox import inside
from etude.sandbox.box import Limits, Place, Result, Sandbox, SandboxError, answered
from etude.sandbox.container import PATIENCE, bounded
from etude.sandbox.keeper import Clip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

LIMITS = Limits(memory=8 << 30, processes=4096, cpus=4.0, output=64 << 20, seconds=3600.0)
LARGEST = 1 << 30  # bytes of what is taken out
LATE = 124  # the exit code of `timeout`


class ImageSandbox(Sandbox):
    """One container."""

    def __init__(self, engine: str, image: str, limits: Limits = LIMITS, env: Mapping[str, str] | None = None) -> None:
        self.engine, self.image, self.place = engine, image, Place((), env=env or {}, limits=limits)
        self.backend, self.root = f"{Path(engine).name}:{image}", "/"
        self.name = f"etude-{secrets.token_hex(8)}"
        self.process: asyncio.subprocess.Process | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, engine: str, image: str, *, network: bool = False, root: str = "", limits: Limits = LIMITS,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[ImageSandbox]:  # fmt: skip
        """Start a container, and end it after the body. `root`: the folder that is worked in; none: the image's own."""
        box = cls(engine, image, limits, env)
        try:
            await box._start(network, root)
            yield box
        finally:
            await box.close()

    async def _start(self, network: bool, root: str) -> None:  # noqa: FBT001
        limits, pipe = self.place.limits, asyncio.subprocess.PIPE
        words = [self.engine, "run", "-i", "--rm", "--name", self.name, "--log-driver", "none", "--pull", "never"]
        words += ["--entrypoint", "sh"]
        words += [] if network else ["--network", "none"]
        words += ["--security-opt", "no-new-privileges", "--memory", str(limits.memory), "--cpus", str(limits.cpus)]
        words += ["--pids-limit", str(limits.processes), *bounded(), self.image, "-c", "echo up; cat > /dev/null"]
        self.process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        try:
            first = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        except TimeoutError:
            raise SandboxError(f"{self.backend}: no container within {PATIENCE:.0f} s") from None
        if first != b"up\n":
            said = (await self.process.stderr.read(2000)).decode(errors="replace").split("\n")[0]
            raise SandboxError(f"{self.backend}: no container was started: {said or 'no sh?'}")
        self.root = root or (await self.exec("pwd")).out.decode().strip()

    async def exec(
        self, command: str | Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None, stdin: bytes = b"",
        cwd: str = "", out: IO[bytes] | None = None,
    ) -> Result:  # fmt: skip
        if self.process is None or self.process.returncode is not None:
            raise SandboxError(f"the container of {self.backend} has ended")
        limits, pipe = self.place.limits, asyncio.subprocess.PIPE
        seconds = limits.seconds if timeout is None else timeout
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        where = ["--workdir", cwd or self.root] if cwd or self.root != "/" else []
        given = [
            word for key, value in {**self.place.env, **(env or {})}.items() for word in ("--env", f"{key}={value}")
        ]
        call = [
            self.engine,
            "exec",
            "-i",
            *where,
            *given,
            self.name,
            "timeout",
            "-s",
            "KILL",
            str(max(1, round(seconds))),
            *words,
        ]
        clips, began = (Clip(limits.output), Clip(limits.output)), time.monotonic()
        with tempfile.TemporaryFile() as fed:
            fed.write(stdin)
            fed.seek(0)
            process = await asyncio.create_subprocess_exec(*call, stdin=fed, stdout=out or pipe, stderr=pipe)
        streams = zip((process.stdout, process.stderr), clips, strict=True)
        waits = [asyncio.create_task(_drain(stream, clip)) for stream, clip in streams if stream is not None]
        try:
            async with asyncio.timeout(seconds + PATIENCE):
                await asyncio.gather(process.wait(), *waits)
        except TimeoutError:
            raise SandboxError(f"{self.backend}: exec did not end") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        rc, took = process.returncode or 0, time.monotonic() - began
        late = took >= seconds and rc in {LATE, 128 + 9}
        rc, cut = 128 - rc if 128 < rc < 128 + 65 else rc, (clips[0].cut, clips[1].cut)
        return Result(rc, bytes(clips[0]), bytes(clips[1]), timed_out=late, cut=cut, seconds=took)

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        text = Path(inside.__file__).read_text(encoding="utf-8").replace(f'"{inside.WORKSPACE}"', repr(self.root), 1)
        done = await self.exec(["python3", "-I", "-S", "-c", text, json.dumps(header)], stdin=payload)
        try:
            return answered(json.loads(done.err), done.out)
        except ValueError:
            why = done.err.decode(errors="replace")[-300:] or f"it ended with {done.rc}"
            raise SandboxError(f"cannot {header['op']} files in the container: {why}") from None

    async def put(self, source: Path, place: str) -> None:
        """Copy a file or what a folder holds to a place in the container, owned by its user."""
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
                tar.add(source, "." if source.is_dir() else Path(place).name)
            packed.seek(0)
            target = place if source.is_dir() else str(Path(place).parent)
            words = ["sh", "-c", 'mkdir -p "$0" && tar -x -f - -C "$0" --no-same-owner', target]
            done = await self.exec(words, stdin=packed.read())
        if done.rc:
            raise SandboxError(
                f"cannot put {source.name} into the container: {done.err.decode(errors='replace')[-300:]}"
            )

    async def get(self, place: str) -> bytes:
        """Return a tar of a file or folder of the container, as it is named in it; nothing if it is not there."""
        with tempfile.TemporaryFile() as sent:
            done = await self.exec(["tar", "-c", "-f", "-", "-C", "/", place.lstrip("/")], out=sent)
            if sent.tell() > LARGEST:
                raise SandboxError(f"{place} in the container holds more than {LARGEST >> 30} GiB")
            sent.seek(0)
            return b"" if done.rc else sent.read()

    async def close(self) -> None:
        """End the container: by the end of its input, or by force."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.close()
            removal = await asyncio.create_subprocess_exec(
                self.engine,
                "rm",
                "-f",
                "-t",
                "0",
                self.name,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            await asyncio.gather(removal.wait(), process.communicate())


async def _drain(stream: asyncio.StreamReader, clip: Clip) -> None:
    while block := await stream.read(1 << 16):
        clip.add(block)
