"""The process that samples: a model on its device, asked over a link, that follows the weights as the trainer publishes them.

    python -m etude.rl.engine JOB.json

It begins with the model's folder, which is version 0, and goes straight to the newest version there is. New weights are read, checked
and brought to the device while tokens are written; what remains for the pause between two steps is to copy them over the old ones.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from etude.inference.weight_sync import BrokenStore, WeightStore
from etude.rl.link import Server, Swap
from etude.rl.processes import as_child, load_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.inference.local import LocalPolicy
    from etude.inference.weight_sync import Held
    from etude.rl.processes import RlJob

POLL = 0.05  # seconds between two looks for new weights


class Follower:
    """Keeps a policy at the newest weights of a store."""

    def __init__(self, policy: LocalPolicy, store: WeightStore, say: Callable[[str], None] = lambda _: None) -> None:
        self.policy, self.store, self.say = policy, store, say
        self.version = policy.statistics()["version"]
        self._held: Held | None = None
        self._said = ""
        # A version that could not be had: reading it all again twenty times a second helps nobody.
        self._out_of_reach = -1

    async def run(self, on_swap: Callable[[Swap], None]) -> None:
        """Follow until cancelled. A policy that has died raises; a version that cannot be had is waited out."""
        while True:
            if swap := await self.step():
                on_swap(swap)
            await asyncio.sleep(POLL)

    async def step(self) -> Swap | None:
        """Take over the newest version, if it is newer than the one in use."""
        newest = await asyncio.to_thread(self.store.newest)
        if newest is None or newest <= max(self.version, self._out_of_reach):
            return None
        began = time.perf_counter()
        try:
            held = await asyncio.to_thread(self.store.pull, newest, self._held)
        except BrokenStore as error:
            self._say_once(str(error))
            self._out_of_reach = newest
            return None
        for why in held.passed_over:
            self._say_once(f"passed over: {why}")
        staged = await asyncio.to_thread(self.policy.stage, held.tensors)
        paused = await self.policy.update(staged, newest)
        self._held, self.version = held, newest
        return Swap(newest, held.bytes, time.perf_counter() - began, paused)

    def _say_once(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self.say(line)


async def serve(job: RlJob, say: Callable[[str], None]) -> None:
    """Answer and follow until this process is ended; raise when the engine breaks, for another one to begin."""
    policy = await asyncio.to_thread(open_policy, job, say)
    try:
        server, follower = Server(policy), Follower(policy, WeightStore(job.weights, job.settings.anchor_every), say)
        if swap := await follower.step():  # before anybody is answered: old weights would write what is soon too old
            server.swapped(swap)
        tasks = [asyncio.create_task(server.run(job.socket)), asyncio.create_task(follower.run(server.swapped))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # neither ends but by raising
        done.pop().result()
    finally:
        await policy.close()


def open_policy(job: RlJob, say: Callable[[str], None]) -> LocalPolicy:
    """Return the policy at version 0. Heads are left out: they would not be trained, and seeded requests do not guess."""
    import torch

    from etude.inference.local import LocalPolicy

    own = job.settings
    return LocalPolicy.open(
        job.model, device=own.device, dtype=None if own.dtype == "auto" else getattr(torch, own.dtype),
        context=own.length or None, memory=int(own.engine_memory * 1e9) or None, guess=False, say=say,
    )  # fmt: skip


def main() -> None:
    """Do the job of a file."""
    asyncio.run(serve(load_job(Path(sys.argv[1])), lambda line: print(line, flush=True)))  # noqa: T201 - its log


if __name__ == "__main__":
    as_child(main)
