"""A container of a benchmark's own image, as that benchmark runs it: with its user and files, and with background processes kept.

The isolation is weaker than that of the other sandboxes: root may write everywhere in the container, and only the engine's own filter
and rights apply. Nothing of the host is mounted, there is no network unless the benchmark asks for one, and memory and processes are
bounded. The container ends when the input of its first process ends, so it cannot outlive this process. A command that takes too long
is killed by `timeout`, which the image must have, as it must have sh and tar; tools that read and change files also need python3.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etude.sandbox import inside
from etude.sandbox.box import Limits, Place, Result, SandboxError
from etude.sandbox.container import PATIENCE, EngineSandbox, bounded, env_words, filled, gathered, result_of
from etude.sandbox.keeper import Clip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

LIMITS = Limits(memory=8 << 30, processes=4096, cpus=4.0, output=64 << 20, seconds=3600.0)
LARGEST = 1 << 30  # bytes of what is taken out
LATE = 124  # the exit code of `timeout`


class ImageSandbox(EngineSandbox):
    """One container."""

    root = "/"

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, engine: str, image: str, *, network: bool = False, root: str = "", limits: Limits = LIMITS,
        env: Mapping[str, str] | None = None,
    ) -> AsyncIterator[ImageSandbox]:  # fmt: skip
        """Start a container, and end it after the body. `root`: the folder that is worked in; none: the image's own."""
        box = cls(engine, image, Place((), env=env or {}, limits=limits))
        words = [engine, "run", "-i", "--rm", "--name", box.name, "--log-driver", "none", "--pull", "never"]
        words += ["--entrypoint", "sh", *([] if network else ["--network", "none"])]
        words += ["--security-opt", "no-new-privileges", "--memory", str(limits.memory), "--cpus", str(limits.cpus)]
        words += ["--pids-limit", str(limits.processes), *bounded(), image, "-c", "echo up; cat > /dev/null"]
        try:
            await box._run(words, b"up\n", "sh")
            box.root = root or (await box.exec("pwd")).out.decode().strip()
            yield box
        finally:
            await box.close()

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
        call = [self.engine, "exec", "-i", *where, *env_words(self.place.env, env), self.name]
        call += ["timeout", "-s", "KILL", str(max(1, round(seconds))), *words]
        clips, began = (Clip(limits.output), Clip(limits.output)), time.monotonic()
        with filled(stdin) as given:
            process = await asyncio.create_subprocess_exec(*call, stdin=given, stdout=out or pipe, stderr=pipe)
        try:
            async with asyncio.timeout(seconds + PATIENCE):
                await gathered(process, clips)
        except TimeoutError:
            raise SandboxError(f"{self.backend}: exec did not end") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        took = time.monotonic() - began
        late = took >= seconds and process.returncode in {LATE, 128 + 9}
        return result_of(process, clips, timed_out=late, seconds=took)

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        text = Path(inside.__file__).read_text(encoding="utf-8").replace(f'"{inside.WORKSPACE}"', repr(self.root), 1)
        done = await self.exec(["python3", "-I", "-S", "-c", text, json.dumps(header)], stdin=payload)
        return self._answer(header["op"], done, done.out)

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
            why = done.err.decode(errors="replace")[-300:]
            raise SandboxError(f"cannot put {source.name} into the container: {why}")

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
            nothing, words = asyncio.subprocess.DEVNULL, (self.engine, "rm", "-f", "-t", "0", self.name)
            removal = await asyncio.create_subprocess_exec(*words, stdout=nothing, stderr=nothing)
            await asyncio.gather(removal.wait(), process.communicate())
