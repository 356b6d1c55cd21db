"""Processes that work for this one: started again when they die, and gone when it is gone.

Whatever kills the parent, the system kills its children (PR_SET_PDEATHSIG), before they have done anything they could not do again.
They are in sessions of their own, so that Ctrl-C reaches the parent alone, which then ends them in order.

What engine and trainer are to do is in one file, the same for both (`RlJob`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from etude.errors import UserError, storage_error
from etude.files import write_json
from etude.rl.settings import RlSettings  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEATHS = 3  # in a row, without any progress between: a fourth start would end like these
GRACE = 30.0  # seconds between asking a child to end and ending it
TAIL = 8192  # bytes of a log in which its last lines are looked for
NOT_OURS = 2  # exit status: what a user can put right; to start again would not
# A child must be bound to its parent before it begins, and know if the parent has died before that.
BIND = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""
# A program that starts processes of its own, as vLLM does, is killed with its parent, but they are not. This one stands before it, is
# told of the parent's death by another signal, and ends the whole session; it ends as the program does.
WITH_ALL = """
import ctypes, os, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: os.killpg(0, signal.SIGKILL))
signal.signal(signal.SIGTERM, lambda *_: None)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGUSR2))
if not (child := os.fork()):
    os.execvp(sys.argv[1], sys.argv[1:])
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if status < 0:
    os.killpg(0, -status)
sys.exit(status)
"""
# Imports leave no garbage, and looking for it takes a sixth of their time: `as_child` has it looked for again.
LAUNCH = "import gc, runpy, sys; gc.disable(); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


class Child:
    """One process, which is replaced when it dies."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, say: Callable[[str], None] = lambda _: None, *, grace: float = GRACE,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.command, self.log, self.say, self.grace = name, list(command), log, say, grace
        self.environment = environment  # beside this process's own
        self.deaths = 0  # in all
        self._in_a_row = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Return the number of the process, while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and running else None

    def progressed(self) -> None:
        """Say that it did something useful: deaths before that do not count any more."""
        self._in_a_row = 0

    def kill(self) -> None:
        """End the process at once, because it hangs; it is started again."""
        self._signal(signal.SIGKILL)

    async def run(self) -> None:
        """See that it runs until it ends by itself with status 0. UserError: to start it again would be in vain."""
        try:
            while (status := await self.run_once()) != 0:
                self.deaths += 1
                self._in_a_row += 1
                how = ending(status)
                if status == NOT_OURS:
                    raise UserError(f"the {self.name}: {last_lines(self.log, 1)}")
                if self._in_a_row >= DEATHS:
                    said = last_lines(self.log, 3)
                    often = f"the {self.name} died {DEATHS} times in a row"
                    raise UserError(f"{often}; the last {how}, after: {said}; see {self.log}")
                self.say(f"the {self.name} {how}; starting it again")
        finally:
            await self.end()

    async def run_once(self) -> int:
        """Start it and return how it ended."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        bound = [sys.executable, "-I", "-S", "-c", BIND, str(os.getpid()), *self.command]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *bound, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **(self.environment or {})},
            )  # fmt: skip
        status = await self._process.wait()
        self._signal(signal.SIGKILL)  # what it had started itself and left behind
        return status

    async def end(self) -> None:
        """Ask it to end, then end it; also if this is itself cancelled meanwhile."""
        if self._process is None:
            return
        if self.pid is not None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._process.wait(), self.grace)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            if self._process:
                os.killpg(self._process.pid, number)


def ending(status: int) -> str:
    """Return how a process ended, in words."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log, as one."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-600:] or "nothing"


def as_child(main: Callable[[], None]) -> None:
    """Run what a child is for. What a user can put right becomes the last line of the log, and a status that says so."""
    if not gc.isenabled():
        gc.freeze()  # it is not looked for among what imports left, at the end of the process either
        gc.enable()
    try:
        main()
    except (UserError, OSError) as error:
        explained = storage_error(error) if isinstance(error, OSError) else error
        if not explained:
            raise
        sys.stderr.write(f"{explained}\n")
        sys.exit(NOT_OURS)


JOB = "job.json"
LEDGER, WISH = "ledger.jsonl", "reward_weights.json"


@dataclass(frozen=True)
class RlJob:
    """One run."""

    model: Path  # the folder of the weights at its start: version 0
    folder: Path  # of the run; absolute
    socket: Path  # where the engine listens; short, as the system's names of sockets are
    settings: RlSettings
    seed: int
    apart: bool = False  # whether engine and trainer have GPUs of their own

    @property
    def exchange(self) -> Path:
        """Return the folder of batches and reports."""
        return self.folder / "exchange"

    @property
    def weights(self) -> Path:
        """Return the folder of the WeightStore."""
        return self.folder / "weights"

    @property
    def trainer(self) -> Path:
        """Return the folder of the trainer's checkpoints."""
        return self.folder / "trainer"

    @property
    def result(self) -> Path:
        """Return the folder of the trained model."""
        return self.folder / "model"

    def save(self) -> Path:
        """Write it into the run's folder, and return where."""
        write_json(self.folder / JOB, TypeAdapter(RlJob).dump_python(self, mode="json"))
        return self.folder / JOB


def load_job(path: Path) -> RlJob:
    """Read what `save` wrote."""
    return TypeAdapter(RlJob).validate_json(path.read_bytes())
