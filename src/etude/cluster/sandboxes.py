"""Sandboxes on a cluster: pools on CPU nodes that play whole episodes there, so that hosts of GPUs run no tests.

A pool has the environment (task files in its own node's cache), harness, sandboxes and scoring, and samples through a router of its
own, straight from the engines. What comes back is the scored episode. To the orchestrator it is an `Environment` like any other.

An episode whose pool is lost is played by another one with the same seed, and goes on from its journal, which lies in the run's
folder: nothing of it is counted twice, and never is it scored as 0. Lost time and again, it is an InfrastructureError.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.formats import choose_format
from etude.cluster.host import ANSWER, Host, Lost, about
from etude.cluster.router import Endpoint, Router
from etude.errors import UserError
from etude.inference.client import ServerFailed
from etude.models.load import load_tokeniser
from etude.rl.environment import Environment, Episode, InfrastructureError
from etude.rl.orchestrator import TimedPolicy
from etude.rl.processes import DEATHS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.agent.formats import ChatFormat
    from etude.cluster.host import About
    from etude.inference.policy import Policy
    from etude.rl.environment import Item

LOSSES = 3  # of the pools that play one episode, in a row
BEAT = 5.0  # seconds between two questions whether a pool is well
LOADING = 3600.0  # seconds to fetch and unpack the tasks on a node


class Pool:
    """An actor that plays episodes."""

    def __init__(self, make: Callable[[], Environment], model: str, token: str) -> None:
        self._make, self._model, self._token = make, model, token
        self._environment: Environment
        self._router: Router
        self._talk: ChatFormat

    async def about(self) -> About:
        return about()

    async def open(self) -> None:
        """Load the tasks."""
        self._talk, self._router = choose_format(load_tokeniser(Path(self._model))), Router(self._token)
        self._environment = await asyncio.to_thread(self._make)

    async def set_engines(self, endpoints: Sequence[Endpoint]) -> None:
        await self._router.set_engines(endpoints)

    async def run_episode(self, item: str, name: str, seed: int, journal: str) -> Episode:
        """Play one episode; the journal is the driver's to remove."""
        await self._router.ready()
        play = self._environment.run_episode
        try:
            return await play(item, self._router, self._talk, name=name, seed=seed, journal=Path(journal))
        except ServerFailed as error:
            raise InfrastructureError(f"engines: {error}") from None


class Pools:
    """The environment as the orchestrator has it. `make`: makes the real one, on any node."""

    def __init__(self, items: Sequence[Item], make: Callable[[], Environment], say: Callable[[str], None]) -> None:
        self.items, self.make, self.say = items, make, say
        self.hosts: list[Host] = []
        self.endpoints: list[Endpoint] = []
        self._busy: dict[Host, int] = {}  # episodes of the pools that are well
        self._ready = asyncio.Event()

    async def set_engines(self, endpoints: Sequence[Endpoint]) -> None:
        """Tell all pools which engines there are."""
        self.endpoints = list(endpoints)
        told = [host.ask("set_engines", self.endpoints) for host in self._busy]
        await asyncio.gather(*told, return_exceptions=True)  # whoever is lost, its own watch will see to it

    async def run(self) -> None:
        """Keep all pools going until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for host in self.hosts:
                    group.create_task(self._keep(host))
        finally:
            for host in self.hosts:
                host.drop()

    async def _keep(self, host: Host) -> None:
        in_a_row = 0
        while True:
            try:
                await host.open()
                await host.ask("open", seconds=LOADING)
                self._busy[host] = in_a_row = 0
                self._ready.set()
                while True:
                    await host.ask("set_engines", self.endpoints, seconds=2 * ANSWER)
                    await asyncio.sleep(BEAT)
            except Lost as lost:
                in_a_row += 1
                self._busy.pop(host, None)
                if in_a_row >= DEATHS and not self._busy:
                    raise UserError(f"sandboxes: a pool was lost {DEATHS} times in a row: {lost}") from None
                self.say(f"sandboxes: {lost}; another pool is started in its place")

    async def run_episode(
        self, item: str, policy: Policy, talk: ChatFormat, *, name: str, seed: int, journal: Path  # noqa: ARG002 - pools have their own
    ) -> Episode:  # fmt: skip
        """See `Environment`."""
        why: Any = ""
        for _ in range(LOSSES):
            host = await self._least_busy()
            self._busy[host] += 1
            try:
                with _sampling(policy):
                    played: Episode = await host.ask("run_episode", item, name, seed, str(journal), seconds=None)
            except Lost as lost:
                why = lost
                self._busy.pop(host, None)
            else:
                return played
            finally:
                if host in self._busy:
                    self._busy[host] -= 1
        raise InfrastructureError(f"sandboxes: {why}")

    async def _least_busy(self) -> Host:
        while not self._busy:
            self._ready.clear()
            await self._ready.wait()
        cores = {host: host.placement.wanted[host.bundle].takes["CPU"] for host in self._busy}
        return min(self._busy, key=lambda host: self._busy[host] / cores[host])


def _sampling(policy: Policy) -> contextlib.AbstractContextManager[None]:
    """Count an episode as sampling as long as it is played: which part of it waits for tokens only its pool knows."""
    return policy.step_metrics.busy("sampling") if isinstance(policy, TimedPolicy) else contextlib.nullcontext()
