"""Engine and trainer as the orchestrator has them: in processes of their own, or in this one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from etude.rl.children import Child
from etude.rl.engine import Follower, open_policy
from etude.rl.exchange import Exchange
from etude.rl.job import JOB, RlJob, load_job
from etude.rl.link import Link
from etude.rl.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from typing import Any

    from etude.inference.policy import Completion, Policy, PolicyInfo, Sampling, Token
    from etude.rl.link import Swap
    from etude.rl.metrics import Meter
    from etude.rl.settings import RlSettings
    from etude.rl.trainer import Trainer

    Say = Callable[[str], None]
    Doing = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parts:
    """The other two parts of a run."""

    policy: Policy
    engine: Doing  # keeps the engine at work until cancelled
    trainer: Doing  # keeps the trainer at work until it was told to stop and the model is saved
    ready: Callable[[], Coroutine[Any, Any, PolicyInfo]]  # waits until the engine answers
    version: Callable[[], int]  # of the weights that are sampled from now
    swaps: Callable[[], list[Swap]]  # of these weights, since this was asked last
    sampled: Callable[
        [], None
    ]  # hears that an episode was played: an engine that died before that has come back to life
    trained: Callable[[], None]  # the same of a step and the trainer


class Seat:
    """The policy as one episode has it: the meter hears when it waits for tokens, and when for tools and tests."""

    def __init__(self, policy: Policy, meter: Meter) -> None:
        self.policy, self.meter = policy, meter
        self.elsewhere = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.elsewhere.enter_context(self.meter.busy("scoring"))
        return self

    def __exit__(self, *_: object) -> None:
        self.elsewhere.close()

    @property
    def info(self) -> PolicyInfo:
        """Return what a caller may want to know beforehand."""
        return self.policy.info

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:  # fmt: skip
        """Return a completion; see Policy."""
        self.elsewhere.close()
        try:
            with self.meter.busy("sampling"):
                return await self.policy.generate(prompt, sampling, session=session, on_tokens=on_tokens)
        finally:
            self.elsewhere.enter_context(self.meter.busy("scoring"))

    async def close(self) -> None:
        """Leave the policy open: others play on."""


def _apart(job: RlJob, say: Say) -> Parts:
    """Return parts that are started again when they die."""
    path = str(job.save())

    def child(module: str) -> Child:
        return Child(module, [sys.executable, "-m", f"etude.rl.{module}", path], job.folder / f"{module}.log", say)

    engine, trainer = child("engine"), child("learner")
    link = Link(job.socket, on_hung=engine.kill)

    at_work, heard = (engine.run, trainer.run), (engine.progressed, trainer.progressed)
    return Parts(link, *at_work, link.ready, lambda: link.version, link.swaps, *heard)


async def _together(job: RlJob, say: Say) -> Parts:
    """Return parts that are threads of this process, for tests and for looking at one thing at a time."""
    from etude.rl.trainer import Trainer

    trainer = await asyncio.to_thread(Trainer, job.model, job.settings, job.trainer, say=say)
    policy = await asyncio.to_thread(open_policy, job, say)
    follower, swaps = Follower(policy, _store(job), say), list["Swap"]()

    async def ready() -> PolicyInfo:
        return policy.info

    def taken() -> list[Swap]:
        found = swaps.copy()
        swaps.clear()
        return found

    doing = partial(follower.run, swaps.append), partial(_learn, job, trainer)
    return Parts(policy, *doing, ready, lambda: follower.version, taken, *[lambda: None] * 2)


async def _learn(job: RlJob, trainer: Trainer) -> None:
    from etude.rl.learner import run_learner

    leave = threading.Event()
    given = job, trainer, Exchange(job.exchange), _store(job), leave
    thread = asyncio.create_task(asyncio.to_thread(run_learner, *given))
    try:
        await asyncio.shield(thread)
    finally:
        leave.set()
        await asyncio.wait([thread])  # a thread cannot be cancelled


def _store(job: RlJob) -> WeightStore:
    return WeightStore(job.weights, job.settings.anchor_every)


@contextlib.asynccontextmanager
async def open_parts(model: Path, folder: Path, settings: RlSettings, seed: int, say: Say) -> AsyncIterator[Parts]:
    """Open both parts of a run where its settings want them."""
    if (left := folder / JOB).exists():  # by a session that was killed
        shutil.rmtree(load_job(left).socket.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="etude-rl-") as short:  # names of sockets must be
        job = RlJob(model.absolute(), folder.absolute(), Path(short) / "engine", settings, seed)
        parts = _apart(job, say) if settings.processes else await _together(job, say)
        try:
            yield parts
        finally:
            await parts.policy.close()
