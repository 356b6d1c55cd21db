"""A stand-in for a sandbox that isolates nothing: commands run in a folder of the test. Faults can be put in its way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.sandbox.box import Place, Result, Sandbox, SandboxError


class BareSandbox(Sandbox):
    """Runs commands in a folder; counts them, and how many ran at once."""

    backend = "none: a test's stand-in"
    place = Place(())

    def __init__(self, folder: Path, result: Result | None = None, failure: SandboxError | None = None) -> None:
        self.folder, self.result, self.failure = folder, result, failure
        self.started: list[Sequence[str] | str] = []
        self.running = self.most_running = 0

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        cwd: str = ".",
    ) -> Result:
        self.started.append(command)
        if self.failure:
            raise self.failure
        if self.result:
            return self.result
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *words, cwd=self.folder / cwd, stdin=-1, stdout=-1, stderr=-1, start_new_session=True
        )
        talk = asyncio.ensure_future(process.communicate(stdin))
        done, _ = await asyncio.wait([talk], timeout=timeout)
        if not done:
            os.killpg(process.pid, signal.SIGKILL)
        out, err = await talk
        self.running -= 1
        return Result(process.returncode or 0, out, err, timed_out=not done, seconds=time.perf_counter() - began)

    async def _ask(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        raise NotImplementedError

    async def close(self) -> None:
        pass
