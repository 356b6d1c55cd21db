"""The stages of a recipe with their parts on a cluster; to the runner they are the stages it knows.

RL: the orchestrator, its ledger and its state stay in the process of the command. Ranks, engines and pools of sandboxes are placed
by Ray, all of them in one placement group, and meet in the run's folder (weights, batches, journals) and over the token API.

Other stages that train: the runner stays here, too, and their ranks are processes as torchrun would start them (rank.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cluster.connect import refuse_unlike
from etude.cluster.engines import Engine, Fleet
from etude.cluster.host import Host
from etude.cluster.placement import Placement, bundles, nodes, refuse_impossible
from etude.cluster.rank import FILE, save_training
from etude.cluster.sandboxes import Pool, Pools
from etude.cluster.trainer import Ranks
from etude.errors import UserError
from etude.inference.weight_sync import WeightStore
from etude.models.load import load_tokeniser
from etude.rl.orchestrator import PATIENCE, Parts, orchestrate
from etude.rl.processes import LAUNCH, RlJob
from etude.run.stages import STAGES
from etude.run.stages.rl import RlStage, closing, environment_of
from etude.run.stages.training import TrainingStage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from etude.recipe.cluster import ClusterSettings
    from etude.rl.arenas import Arena
    from etude.rl.environment import CodingEnvironment, Environment
    from etude.rl.settings import RlSettings
    from etude.run.stage import Job, Stage
    from etude.run.stages.rl import Before
    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.work import Work

    Say = Callable[[str], None]


LOOK = 0.5  # seconds between two looks whether the user wants to stop


@dataclass(frozen=True)
class ClusterRun:
    """One run on a cluster that was joined."""

    settings: ClusterSettings
    patience: float = PATIENCE  # seconds without an answer until an engine counts as hung

    async def play(
        self, environment: Environment, make: Callable[[], Environment], model: Path, settings: RlSettings, work: Work, seed: int,
        before: Before | None = None,
    ) -> None:  # fmt: skip
        """Orchestrate with all other parts on the cluster. `make`: makes the environment, on any node."""
        say = work.reporter.say
        wanted = bundles(self.settings)
        placement = Placement(wanted)
        try:
            await placement.ready(say)
            pools = Pools(environment.items, make, say) if self.settings.sandboxes else None
            opening = partial(self.open_parts, placement, pools)
            chosen = settings.model_copy(update={"ranks": self.settings.ranks})
            await orchestrate(pools or environment, model, chosen, work, seed, before, opening)
        finally:
            placement.remove()

    def check(self, folder: Path) -> None:
        """Refuse, before time is spent, what the cluster can never have, and nodes that would fail a run in this folder."""
        refuse_impossible(bundles(self.settings), nodes())
        asyncio.run(refuse_unlike(folder.absolute(), self.settings))

    async def train(self, training: Training, work: Work) -> None:
        """Train a stage on the ranks of the table; the first of them writes its metrics."""
        say, logs = work.reporter.say, training.folder / "cluster"
        placement = Placement([each for each in bundles(self.settings) if each.part == "trainer"])
        try:
            await placement.ready(say)
            say(
                f"{training.kind}: trains on {self.settings.ranks} ranks, whose lines are in {logs}; `etude status` shows progress"
            )
            hosts = [Host(f"the actor of rank {each}", placement, each, say) for each in placement.of("trainer")]
            ranks = Ranks(
                hosts, ["-P", "-m", "etude.cluster.rank", str(save_training(training, work.cache))], logs, say
            )
            await _until_done(ranks, work)
        finally:
            placement.remove()
            work.metrics.reload()
        shutil.rmtree(logs)
        (training.folder / FILE).unlink()

    @contextlib.asynccontextmanager
    async def open_parts(
        self, placement: Placement, pools: Pools | None, model: Path, folder: Path, settings: RlSettings, seed: int, say: Say
    ) -> AsyncIterator[Parts]:  # fmt: skip
        """Open trainer, engines and pools where they were placed."""
        folder = folder.absolute()
        logs = folder / "cluster"
        job = RlJob(model.absolute(), folder, logs / "socket", settings, seed, apart=True)
        path, store = str(job.save()), WeightStore(job.weights, settings.anchor_every)
        fleet = Fleet(job, store, len(load_tokeniser(model)), say, patience=self.patience)
        fleet.write_token()
        kinds = [each for each in self.settings.engines for _ in range(each.count)]
        for number, (bundle, kind) in enumerate(zip(placement.of("engines"), kinds, strict=True)):
            fleet.engines.append(Engine(number, kind, Host(f"engine {number}", placement, bundle, say), fleet))
        hosts = [Host(f"the actor of rank {each}", placement, each, say) for each in placement.of("trainer")]
        trainer = Ranks(hosts, ["-P", "-c", LAUNCH, "etude.rl.trainer", path, "joining"], logs, say)
        if pools:
            given = (pools.make, str(model), fleet.token)
            pools.hosts = [Host(f"pool {number}", placement, bundle, say, Pool, given)
                           for number, bundle in enumerate(placement.of("sandboxes"))]  # fmt: skip
            fleet.listeners.append(pools.set_engines)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(fleet.run())
                if pools:
                    group.create_task(pools.run())

        try:
            yield Parts(fleet.router, fleet, run, trainer.run, fleet.router.ready, fleet.progressed, trainer.progressed)
        finally:
            await fleet.router.close()
            for host in [*hosts, *(engine.host for engine in fleet.engines), *(pools.hosts if pools else [])]:
                host.drop()


async def _until_done(ranks: Ranks, work: Work) -> None:
    """Wait for the ranks; a user's wish to stop ends them, with a checkpoint."""
    running, size = asyncio.create_task(ranks.run()), 0
    try:
        while not (await asyncio.wait([running], timeout=LOOK))[0]:
            work.reporter.check_stop()
            if (now := work.metrics.path.stat().st_size) > size:  # steps were trained
                size = now
                ranks.progressed()
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


class ClusterRlStage(RlStage):
    """The `rl` stage on a cluster."""

    def __init__(self, run: ClusterRun) -> None:
        self.on = run

    def check(self, settings: RlSettings) -> None:
        """Refuse what names other places than the table does."""
        super().check(settings)
        if not self.on.settings.engines:
            raise UserError("rl: [cluster] has no engines, and rollouts need one; add engines = { gpus = 1 }")
        for name in ("engine", "ranks", "processes"):
            if getattr(settings, name) != _default(name):
                raise UserError(
                    f"rl.{name} is of one machine, and [cluster] says where parts are; leave one of them out"
                )

    def play(
        self, environment: CodingEnvironment | Arena, model: Path, settings: RlSettings, job: Job, before: Before
    ) -> None:
        def found(name: str) -> str:
            """Return a file by its whole path: nodes may have another working directory."""
            path = Path(name).expanduser()
            return str(path.absolute()) if name and path.exists() else name

        own = settings.questions
        questions = own.model_copy(update={"corpus": found(own.corpus), "judge": found(own.judge)})
        whole = settings.model_copy(update={"tasks": found(settings.tasks), "questions": questions})
        make = partial(environment_of, whole, job.work.cache)
        playing = self.on.play(environment, make, model, settings, job.work, job.seed, before)
        asyncio.run(closing(environment, playing, job.work.reporter.say))


def _default(name: str) -> Any:
    from etude.rl.settings import RlSettings

    return RlSettings.model_fields[name].default


def _on_ranks(stage: TrainingStage, on: ClusterRun) -> TrainingStage:
    """Return a stage that is what it was, but trains on the ranks of the cluster."""

    def train(_: TrainingStage, training: Training, world: World, work: Work) -> None:  # noqa: ARG001 - of this process
        asyncio.run(on.train(training, work))

    made: TrainingStage = type(type(stage).__name__, (type(stage),), {"train": train})()
    return made


def cluster_stages(on: ClusterRun) -> Mapping[str, Stage]:
    """Return the stages with their parts on the cluster."""
    trained = {kind: _on_ranks(stage, on) for kind, stage in STAGES.items() if isinstance(stage, TrainingStage)}
    return {**STAGES, **trained, "rl": ClusterRlStage(on)}
