"""One place on a cluster and whoever works there: asked with a time limit, and when it is lost, lost with a reason.

`Supervisor` is the actor for parts that are processes of their own (a rank of the trainer, an engine): it starts one, tells how it
ended and what it said last, and dies with it: the process is bound to the actor (rl/processes.py), the actor by Ray to its node and
to the driver. So kill −9 of anything leaves nothing behind. `Host` is the driver's side of any actor; a lost one is made anew in its
bundle of the placement group, which Ray moves to another node when its own is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

import etude
from etude.errors import one_line
from etude.rl.processes import Child, ending, last_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from etude.cluster.placement import Placement

OWN = "python"  # first word of a command: the Python of the node, with Etude in it
ANSWER = 60.0  # seconds within which a small question is answered
LOOKING = 300.0  # seconds to import vLLM on a cold disk
NEWS = 10.0  # seconds between two lines that say what is waited for
GRACE = 30.0  # seconds that a process is given to end by itself


class Lost(Exception):  # noqa: N818 - a state, not a mistake
    """An actor, its node or its process is gone, or does not answer; the text is the reason."""


@dataclass(frozen=True)
class About:
    """Where somebody is, and what there is."""

    node: str  # Ray's name of it
    address: str
    host: str
    gpus: tuple[str, ...]
    pid: int
    versions: dict[str, str]  # python, ray, etude
    time: float
    interface: str  # of the network that the address is on

    @property
    def place(self) -> str:
        return f"{self.host} ({self.address}, node {self.node[:8]})"


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    said: str  # its last lines
    memory: int  # bytes that it had at most
    free: int  # bytes of the node's memory that are free now

    def __str__(self) -> str:
        memory = f"{self.memory / 1e9:.1f} GB at most, {self.free / 1e9:.1f} GB free on the node"
        return f"{ending(self.status)} (memory: {memory}), after: {self.said}"


def about() -> About:
    """Return where this process is."""
    context = ray.get_runtime_context()
    address = ray.util.get_node_ip_address()
    names = [name for name, each in psutil.net_if_addrs().items() if any(one.address == address for one in each)]
    versions = {"python": platform.python_version(), "ray": ray.__version__, "etude": etude.__version__}
    gpus = tuple(map(str, ray.get_gpu_ids()))
    return About(
        context.get_node_id(), address, socket.gethostname(), gpus, psutil.Process().pid, versions, time.time(), (names or [""])[0]
    )  # fmt: skip


class Supervisor:
    """An actor with one process."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def about(self) -> About:
        return about()

    async def sees(self, path: str, word: str) -> bool:
        """Return whether this node reads in a file what the driver wrote there."""
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="utf-8") == word
        return False

    async def refuses_vllm(self, python: str) -> str:
        """Return why the vLLM of another environment on this node cannot be used; empty: it can."""
        words = [python, "-P", "-m", "etude.inference.vllm_plugin"]
        run = partial(subprocess.run, words, capture_output=True, text=True, timeout=LOOKING, check=False)
        try:
            done = await asyncio.to_thread(run)
        except (OSError, subprocess.TimeoutExpired) as error:
            return one_line(error)
        return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:300]

    async def free_port(self) -> int:
        """Return a port that nobody listens at; who takes it in the meantime makes the process fail, and another is tried."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    async def run(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> Ended:
        """Run a process to its end."""
        words = [sys.executable if command[0] == OWN else command[0], *command[1:]]
        self._child = Child("process", words, Path(log), grace=GRACE, environment=environment)
        try:
            status = await self._child.run_once()
        finally:
            await self._child.end()
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return Ended(status, last_lines(Path(log), 3), peak, psutil.virtual_memory().available)

    async def process(self) -> int | None:
        """Return the number of the process, for those who look."""
        return self._child.pid if self._child else None

    async def stop(self) -> None:
        """Ask the process to end; end it when it takes too long."""
        if self._child:
            await self._child.end()

    async def kill(self) -> None:
        if self._child:
            self._child.kill()


@dataclass(eq=False)
class Host:
    """An actor in a bundle, as the driver has it."""

    name: str  # as it is called in messages
    placement: Placement
    bundle: int
    say: Callable[[str], None]
    kind: type = Supervisor
    arguments: tuple[Any, ...] = ()
    at_once: int = 1000  # calls; they wait most of the time
    actor: Any = None
    known: About | None = field(default=None)

    async def open(self) -> About:
        """Make the actor, and wait until it is there: its node may have to come first."""
        self.drop()
        options = {**self.placement.options(self.bundle), "max_concurrency": self.at_once, "max_restarts": 0}
        self.actor = ray.remote(self.kind).options(**options).remote(*self.arguments)
        answer, waited = asyncio.ensure_future(_future(self.actor.about.remote())), 0.0
        while not (await asyncio.wait([answer], timeout=NEWS))[0]:
            waited += NEWS
            self.say(f"{self.name} waits for a place since {waited:.0f} s: {self.placement.state(self.bundle)}")
        try:
            self.known = await answer
        except RayError as error:
            raise Lost(f"{self.name} could not begin: {reason(error)}") from None
        assert self.known is not None
        return self.known

    async def ask(self, method: str, *arguments: Any, seconds: float | None = ANSWER) -> Any:
        """Call a method and return what it returns, or raise what it raised; `seconds` None: it may take as long as it likes."""
        assert self.actor is not None
        where = f"{self.name} on {self.known.place}" if self.known else self.name
        called = getattr(self.actor, method).remote(*arguments)
        try:
            async with asyncio.timeout(seconds):
                return await _future(called)
        except TimeoutError:
            raise Lost(f"{where} did not answer `{method}` within {seconds:.0f} s") from None
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, GetTimeoutError, RayError) as error:
            raise Lost(f"{where} is lost: {reason(error)}") from None
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                ray.cancel(called)
            raise

    def drop(self) -> None:
        """End the actor, if there is one, with all that it started."""
        if self.actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(self.actor)
        self.actor = None


async def _future(called: Any) -> Any:
    """Wait for a call. Who stops waiting cancels nothing of Ray's: its client would print a traceback for every such call."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def copy(done: Any) -> None:
        if answer.done():
            return
        try:
            answer.set_result(done.result())
        except Exception as error:  # noqa: BLE001 - whatever the call raised
            answer.set_exception(error)

    def settle(done: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(copy, done)

    called.future().add_done_callback(settle)
    return await answer


def reason(error: Exception) -> str:
    """Return what Ray knows of a loss, without its table of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line
        for line in lines
        if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:"))
    ]
    return " ".join(told)[:600]
