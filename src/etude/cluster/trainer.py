"""The ranks of the trainer on a cluster: processes as torchrun would start them, each under an actor of its own.

When one is lost all of them are: collectives have no way to go on without it. They are started again together and go on from their
last checkpoint (rl/trainer.py), while rollouts go on; a rank whose node is gone waits for another node. What was done twice is the
steps since that checkpoint, which come out the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from etude.cluster.host import GRACE, OWN, Ended, Host, Lost
from etude.errors import UserError
from etude.rl.processes import DEATHS, NOT_OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from etude.cluster.host import About


class Ranks:
    """Processes that train together. `command`: after the node's own Python."""

    def __init__(self, hosts: Sequence[Host], command: Sequence[str], logs: Path, say: Callable[[str], None]) -> None:
        self.hosts, self.command, self.logs, self.say = list(hosts), [OWN, *command], logs, say
        self.deaths = 0  # in all
        self._in_a_row = 0

    def progressed(self) -> None:
        """Say that a step was trained: deaths before that do not count any more."""
        self._in_a_row = 0

    async def run(self) -> None:
        """See that they run until they end by themselves. UserError: to start them again would be in vain."""
        try:
            while how := await self._together():
                self.deaths += 1
                self._in_a_row += 1
                if self._in_a_row >= DEATHS:
                    raise UserError(
                        f"the trainer was lost {DEATHS} times in a row: {how}; see {self.logs}/trainer-*.log"
                    )
                self.say(f"trainer: {how}; all ranks are started again and go on from the last checkpoint")
        finally:
            await asyncio.gather(*(self._end(host) for host in self.hosts))

    async def _together(self) -> str:
        """Start all ranks; return why they must be started again, or nothing when they came to their end."""
        try:
            places = await asyncio.gather(*(host.open() for host in self.hosts))
            order = sorted(
                zip(self.hosts, places, strict=True), key=lambda each: (each[1].node, each[1].gpus, each[0].bundle)
            )
            port = await order[0][0].ask("free_port")
        except Lost as lost:
            return str(lost)
        tasks = {}
        for rank, (host, place) in enumerate(order):
            environment = self._environment(rank, port, [each for _, each in order])
            log = str(self.logs / f"trainer-{rank}.log")
            tasks[asyncio.create_task(host.ask("run", self.command, environment, log, seconds=None))] = rank, place
        try:
            return await self._first_loss(tasks)
        finally:
            for host in self.hosts:
                with contextlib.suppress(Lost):
                    await host.ask("kill")
            await asyncio.wait(tasks)

    async def _first_loss(self, tasks: dict[asyncio.Task[Ended], tuple[int, About]]) -> str:
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    rank, place = tasks[task]
                    if lost := task.exception():
                        return f"rank {rank}: {lost}"
                    if (ended := task.result()).status == NOT_OURS:
                        raise UserError(f"the trainer: {ended.said.split(' | ')[-1]}")
                    if ended.status:
                        return f"rank {rank} on {place.place} {ended}"
        except asyncio.CancelledError:  # they are let save what they have
            await asyncio.gather(*(self._end(host) for host in self.hosts))
            raise
        return ""

    @staticmethod
    def _environment(rank: int, port: int, places: Sequence[About]) -> dict[str, str]:
        """Return what torch.distributed reads. Ray shows each rank its own GPU only, so that it is the first there."""
        own, first = places[rank], places[0]
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0"}
        network = {"MASTER_ADDR": first.address, "MASTER_PORT": str(port)}
        if own.interface and len({place.address for place in places}) > 1:  # a machine may have several networks
            network |= {"GLOO_SOCKET_IFNAME": own.interface, "NCCL_SOCKET_IFNAME": own.interface}
        return ranks | network

    @staticmethod
    async def _end(host: Host) -> None:
        if host.actor is not None:
            with contextlib.suppress(Lost):
                await host.ask("stop", seconds=2 * GRACE)
