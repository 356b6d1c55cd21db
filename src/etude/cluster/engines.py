"""Engines on a cluster: plain HTTP servers with the one token API, each under an actor, that come, follow the weights, and go.

An engine is used only when it answers and has the newest weights of the store, so that a late one catches up before it is asked
anything. It follows the store by itself from then on: a slow one holds nobody up. One that dies, hangs, or fails to take a version
is taken off the list, ended, and started again, wherever Ray finds room; others take its sessions meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from etude.cluster.host import OWN, Host, Lost
from etude.cluster.router import Endpoint, Router
from etude.errors import UserError
from etude.inference.client import OUTLIVING, RemotePolicy, ServerFailed
from etude.models.load import saved_dtype
from etude.rl.engine import Follower, VllmWeights
from etude.rl.processes import DEATHS, NOT_OURS, WITH_ALL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from etude.inference.weight_sync import Swap, WeightStore
    from etude.recipe.cluster import EnginePlaces
    from etude.rl.processes import RlJob

    Say = Callable[[str], None]

FETCHING = "etude.inference.vllm_plugin.Fetching"
REST = 10.0  # seconds before an engine that dies again and again is started once more, while others work


class Engine:
    """One place for an engine."""

    def __init__(self, number: int, settings: EnginePlaces, host: Host, fleet: Fleet) -> None:
        self.number, self.settings, self.host, self.fleet = number, settings, host, fleet
        self.follower = Follower(fleet.store, self._update, fleet.say)
        self.endpoint: Endpoint | None = None  # while it is ready
        self.in_a_row = 0
        self._weights: Callable[[int], Awaitable[Swap]]

    async def run(self) -> None:
        """See that an engine is here, until cancelled."""
        while True:
            try:
                how = await self._once()
            except Lost as lost:
                how = str(lost)
            self.in_a_row += 1
            if self.in_a_row >= DEATHS and not self.fleet.endpoints:
                raise UserError(f"engine {self.number} was lost {DEATHS} times in a row: {how}; see {self._log}")
            self.fleet.say(f"engine {self.number}: {how}; another is started in its place")
            if self.in_a_row >= DEATHS:
                await asyncio.sleep(REST)

    @property
    def _log(self) -> Path:
        return self.fleet.logs / f"engine-{self.number}.log"

    async def _once(self) -> str:
        """Start an engine and return how it was lost."""
        place = await self.host.open()
        port = await self.host.ask("free_port")
        address = f"http://{place.address}:{port}"
        command, environment = self._command(place.address, port)
        process = asyncio.create_task(self.host.ask("run", command, environment, str(self._log), seconds=None))
        using = asyncio.create_task(self._use(address))
        try:
            await asyncio.wait([process, using], return_when=asyncio.FIRST_COMPLETED)
            if using.done():  # before its process did: it hangs, or failed to take weights
                return f"on {place.place}: {using.exception() or 'it did not answer'}"
            ended = await process
            if ended.status == NOT_OURS:
                raise UserError(f"engine {self.number}: {ended.said.split(' | ')[-1]}")
            return f"on {place.place} {ended}"
        finally:
            using.cancel()
            self.endpoint = None
            await asyncio.wait([using])
            await self.fleet.changed()
            with contextlib.suppress(Lost):
                await self.host.ask("kill")
            process.cancel()

    def _command(self, host: str, port: int) -> tuple[list[str], dict[str, str]]:
        job, own = self.fleet.job, self.settings
        if own.kind == "etude":
            listen = [host, str(port), str(self.fleet.token_file)]
            return [OWN, "-P", "-m", "etude.rl.engine", str(job.folder / "job.json"), *listen], {}
        serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(job.model), "--host", host, "--port", str(port),
                 "--enable-scale-out", "--weight-transfer-config", '{"backend": "etude"}', "--worker-extension-cls", FETCHING,
                 "--tensor-parallel-size", str(max(1, own.gpus)), "--seed", str(job.seed)]  # fmt: skip
        serve += ["--max-model-len", str(job.settings.length)] if job.settings.length else []
        # By itself it makes float32 half of that.
        serve += ["--dtype", str(saved_dtype(job.model)).removeprefix("torch.")]
        return [OWN, "-I", "-S", "-c", WITH_ALL, own.python, "-P", *serve], {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": self.fleet.token,
        }

    async def _use(self, address: str) -> None:
        """Bring it the newest weights, then let it be asked and follow the store, until it hangs or fails."""
        vocabulary = self.fleet.vocabulary if self.settings.kind == "vllm" else 0
        control = RemotePolicy(address, vocabulary, self.fleet.token, OUTLIVING)
        hung = asyncio.Event()
        try:
            if self.settings.kind == "vllm":
                weights = VllmWeights(control, self.fleet.job.model, self.fleet.store)
                self._weights = weights.update
                await weights.ready()
            else:
                self._weights = control.update_weights
                await control.connect()
            self.follower.version = 0
            await self.follower.step()
            self.endpoint = Endpoint(self.number, address, vocabulary)
            await self.fleet.changed()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(control.watch(self.fleet.patience, hung.set))
                following = group.create_task(self.follower.run())
                await hung.wait()
                watching.cancel()
                following.cancel()
            raise Lost(f"it did not answer for {self.fleet.patience:.0f} s")
        except ExceptionGroup as errors:
            raise Lost(str(errors.exceptions[0])) from None
        except UserError as error:
            raise Lost(str(error)) from None
        finally:
            await control.close()

    async def _update(self, version: int) -> Swap:
        try:
            return await self._weights(version)
        except ServerFailed as error:  # what it would sample with now, nobody knows
            raise Lost(f"it failed to take version {version} of the weights: {error}") from None


class Fleet:
    """All engines of a run, and whoever wants to know which of them are ready."""

    def __init__(
        self, job: RlJob, store: WeightStore, vocabulary: int, say: Say, *, patience: float
    ) -> None:  # fmt: skip
        self.job, self.store, self.vocabulary, self.say, self.patience = job, store, vocabulary, say, patience
        self.logs = job.folder / "cluster"
        self.token, self.token_file = secrets.token_urlsafe(32), self.logs / "token"
        self.engines: list[Engine] = []
        self.router = Router(self.token)
        self.listeners: list[Callable[[Sequence[Endpoint]], Awaitable[Any]]] = [self.router.set_engines]
        self._last = 0

    def write_token(self) -> None:
        """Write the engines' token where every node of the run can read it, and nobody else."""
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        self.token_file.unlink(missing_ok=True)
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(self.token, encoding="utf-8")

    @property
    def endpoints(self) -> list[Endpoint]:
        return [engine.endpoint for engine in self.engines if engine.endpoint]

    @property
    def version(self) -> int:
        """Return the oldest version that is sampled from; while no engine is ready, the last one that was."""
        self._last = min((each.follower.version for each in self.engines if each.endpoint), default=self._last)
        return self._last

    def swaps(self) -> list[Swap]:
        return [swap for engine in self.engines for swap in engine.follower.swaps()]

    def progressed(self) -> None:
        """Say that an episode was played: deaths before that do not count any more."""
        for engine in self.engines:
            engine.in_a_row = 0

    async def changed(self) -> None:
        """Tell everybody which engines are ready."""
        for listener in self.listeners:
            await listener(self.endpoints)

    async def run(self) -> None:
        """Keep all engines going until cancelled."""
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.run())
