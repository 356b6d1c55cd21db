"""The orchestrator: lets episodes be played, puts them into groups and groups into batches, and tells how it goes.

It decides nothing itself. What to do next is State's to say, and State is what the ledger adds up to; so a restart reads the ledger
and goes on. The order of writing makes a kill harmless: an episode's trace is there before the ledger names it, a step's row before
the ledger says it is trained, and a batch that the ledger names is put again, the same, if its file is not there. Events are written
together (`_flush`), before an episode begins, a batch is put or a journal goes: a flush takes a slow disk longer than an event comes.

Engine and trainer as the orchestrator has them: in processes of their own, or in this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from etude.agent.formats import choose_format
from etude.agent.trace import from_json, to_json
from etude.errors import UserError
from etude.files import digest_of, whole_file
from etude.inference.client import OUTLIVING, ClientSettings, RemotePolicy, ServerFailed
from etude.inference.weight_sync import Receiver, Swap, WeightStore
from etude.models.load import load_tokeniser
from etude.models.shape import model_shape
from etude.rewards.reward import reweighted, weights
from etude.rl.engine import Follower, VllmWeights, open_policy
from etude.rl.environment import Environment, Episode, InfrastructureError
from etude.rl.exchange import Batch, Exchange, TrainedEpisode, TrainedGroup, episode_file
from etude.rl.ledger import Event, Failed, Finished, Ledger, Trained, Weighted
from etude.rl.metrics import StepMetrics, starting
from etude.rl.monitor import Monitor, keep_samples
from etude.rl.processes import JOB, LAUNCH, LEDGER, WISH, Child, RlJob, load_job
from etude.rl.state import State
from etude.rl.view import View

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from etude.inference.policy import Completion, OnTokens, Policy, PolicyInfo, Sampling
    from etude.rl.settings import RlSettings
    from etude.rl.trainer import Trainer

    Say = Callable[[str], None]
    Doing = Callable[[], Coroutine[Any, Any, None]]
    from collections.abc import Awaitable, Callable

    from etude.agent.formats import ChatFormat
    from etude.agent.trace import Trace
    from etude.lineage.compute import ComputeShape
    from etude.work import Work


PATIENCE = (
    300.0  # seconds without an answer until an engine counts as hung; a large model is compiled for minutes at first
)
STRICT = ClientSettings(require_logprob=True)


class Following(Protocol):
    """Who brings new weights to whoever samples."""

    @property
    def version(self) -> int:
        """Return the version of the weights that are sampled from: where several sample, the oldest."""
        ...

    def swaps(self) -> list[Swap]:
        """Return the changes of weights since this was asked last."""
        ...


@dataclass(frozen=True)
class Parts:
    """The other two parts of a run."""

    policy: Policy
    follower: Following
    engine: Doing  # runs the engine until cancelled
    trainer: Doing  # runs the trainer until it is asked to stop and the model is saved
    ready: Callable[[], Coroutine[Any, Any, PolicyInfo]]  # waits until the engine answers
    # An engine that died before an episode was played, and a trainer before a step, have come back to life by these.
    sampled: Callable[[], None] = lambda: None
    trained: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class TimedPolicy:
    """The policy as episodes have it: the metrics count when they wait for tokens, and not for tools and tests."""

    policy: Policy
    step_metrics: StepMetrics

    @property
    def info(self) -> PolicyInfo:
        return self.policy.info

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        with self.step_metrics.busy("sampling", "scoring"):
            return await self.policy.generate(prompt, sampling, session=session, on_tokens=on_tokens)

    async def close(self) -> None:
        """Leave the policy open: others play on."""


def _apart(job: RlJob, say: Say) -> Parts:
    """Return parts that are started again when they die, but for an engine that is somebody else's."""
    path, store = str(job.save()), _store(job)

    def child(module: str) -> Child:
        command = [sys.executable, "-P", "-c", LAUNCH, f"etude.rl.{module}", path]
        return Child(module, command, job.folder / f"{module}.log", say)

    trainer = child("trainer")
    if job.settings.engine:
        policy = RemotePolicy(job.settings.engine, len(load_tokeniser(job.model)), settings=STRICT)
        weights = VllmWeights(policy, job.model, store)
        follower = Follower(store, weights.update, say)
        return Parts(policy, follower, follower.run, trainer.run, weights.ready, trained=trainer.progressed)
    engine = child("engine")
    policy = RemotePolicy(f"unix:{job.socket}", 0, settings=OUTLIVING)

    async def update(version: int) -> Swap:
        try:
            return await policy.update_weights(version)
        except ServerFailed as error:  # a failed update is a lost engine
            say(f"the engine failed to take version {version} of the weights and is started again: {error}")
            engine.kill()
            return await policy.update_weights(version)

    follower = Follower(store, update, say)

    async def run() -> None:
        await policy.connect()
        async with asyncio.TaskGroup() as group:
            group.create_task(policy.watch(PATIENCE, engine.kill))
            group.create_task(follower.run())

    async def engine_and_weights() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            group.create_task(run())

    return Parts(
        policy, follower, engine_and_weights, trainer.run, policy.connect, engine.progressed, trainer.progressed
    )


async def _together(job: RlJob, say: Say) -> Parts:
    """Return parts that are threads of this process, for tests and for looking at one thing at a time."""
    from etude.rl.trainer import Trainer

    trainer = await asyncio.to_thread(Trainer, job.model, job.settings, job.trainer, say=say)
    policy = await asyncio.to_thread(open_policy, job, say)
    follower = Follower(_store(job), Receiver(policy, _store(job), say).update, say)

    async def ready() -> PolicyInfo:
        return policy.info

    return Parts(policy, follower, follower.run, partial(_learn, job, trainer), ready)


async def _learn(job: RlJob, trainer: Trainer) -> None:
    from etude.rl.trainer import run_trainer

    leave = threading.Event()
    given = job, trainer, Exchange(job.exchange), _store(job), leave
    thread = asyncio.create_task(asyncio.to_thread(run_trainer, *given))
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


POLL = 0.05  # seconds between looks at what the trainer has done
TRIES = 3  # of an episode whose machinery fails; then its group goes without it
REST = "rest"  # key of what was sampled and came too late for any step: it was spent
GIVE_UP = 20  # episodes in a row that failed so, of whatever cause: more would be spent in vain


async def orchestrate(
    environment: Environment, model: Path, settings: RlSettings, work: Work, seed: int,
    before: Callable[[], Awaitable[None]] | None = None,
    opening: Callable[[Path, Path, RlSettings, int, Say], contextlib.AbstractAsyncContextManager[Parts]] = open_parts,
) -> None:  # fmt: skip
    """Train the model of a folder, or go on with that, until its child lies in `work.folder / "model"`.

    `before`: what must be found to hold before the first episode; it is found out while the model is loaded.
    `opening`: where engine and trainer are: here, or on a cluster.
    """
    if not environment.items:
        raise UserError("there is no task to play; make some with `etude tasks make`")
    tokeniser, shape = load_tokeniser(model), model_shape(model)
    opened = opening(model, work.folder, settings, seed, work.reporter.say)
    try:
        async with opened as parts, asyncio.TaskGroup() as group:
            trainer, engine = group.create_task(parts.trainer()), group.create_task(parts.engine())
            loading = group.create_task(parts.ready())
            if before:
                await before()
            if (known := (await loading).vocabulary) < len(tokeniser):
                apart = f"the policy knows {known} tokens, its tokeniser {len(tokeniser)}"
                raise UserError(f"{model}: {apart}; take a model whose files belong together")
            with View(work.reporter, settings.steps, list(work.metrics.rows("train/"))) as view:
                talk = choose_format(tokeniser)
                orchestrator = Orchestrator(environment, parts, talk, settings, work, seed, shape.compute, view)
                await orchestrator.run(group)
            await trainer
            orchestrator.count_again()
            engine.cancel()
    except ExceptionGroup as errors:
        raise _first(errors) from None


def _first(errors: ExceptionGroup) -> Exception:
    """Return what a user can put right, if it is among what was raised."""
    every: list[Exception] = [_first(each) if isinstance(each, ExceptionGroup) else each for each in errors.exceptions]
    return next((each for each in every if isinstance(each, UserError)), every[0])


@dataclass
class Orchestrator:
    """One session of one run."""

    environment: Environment
    parts: Parts
    talk: ChatFormat
    settings: RlSettings
    work: Work
    seed: int
    shape: ComputeShape
    view: View
    step_metrics: StepMetrics = field(default_factory=StepMetrics)
    monitor: Monitor = field(default_factory=Monitor)
    playing: dict[tuple[int, int], asyncio.Task[None]] = field(default_factory=dict)
    failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        """Go on from where the ledger ends."""
        self.folder = self.work.folder
        self.state = State(self.environment.items, self.settings, self.seed)
        self.exchange, self.ledger = Exchange(self.folder / "exchange"), Ledger(self.folder / LEDGER)
        self.policy, self.news = TimedPolicy(self.parts.policy, self.step_metrics), asyncio.Event()
        self.wish = ""
        self.unwritten: list[Event] = []
        self.journals: list[Path] = []  # of episodes that are over when the ledger knows it
        self._recall()
        self.idle = self.state.wanted()  # episodes to run that are not under way, as a heap
        for step in range(self.state.trained + 1, self.state.batched + 1):
            self._put_batch(step)

    def _recall(self) -> None:
        events, torn = self.ledger.read()
        if torn:
            self.work.reporter.say(f"rl: dropped {torn} bytes after the last whole line of {LEDGER}")
        for event in events:
            self._apply(event)
        for row in self.work.metrics.rows("train/"):
            self.monitor.add(row["step"], starting(row, "behaviour_"))
        trained = max((place for place, event in enumerate(events) if isinstance(event, Trained)), default=-1)
        for event in events[trained + 1 :]:  # what they cost is in no row yet
            if isinstance(event, Finished):
                path = self.folder / episode_file(event.group, event.episode)
                self.step_metrics.sampled(from_json(path.read_bytes(), str(path)), self.shape, event.seconds)
        self.step_metrics.resumed()
        if not events:
            self._record(Weighted(weights(self.settings.rewards), step=1))

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Train all steps, or as many as there are tasks for; then tell the trainer that there is no more."""
        try:
            await self._run(group)
        finally:
            self._flush()
        if REST not in self.work.metrics:
            self.work.metrics.put(REST, **self.step_metrics.unwritten())
        if self.state.trained < self.settings.steps:
            self._say_early_end()
        self.exchange.stop()

    async def _run(self, group: asyncio.TaskGroup) -> None:
        while self.state.trained < self.settings.steps and not self.state.exhausted:
            self._flush()
            self.work.reporter.check_stop()
            self._read_wish()
            self._read_reports()
            self._sort_groups()
            if may := self._may_begin():
                self._begin(group)
            if self.settings.mode == "async" and self.settings.late == "wait":
                self.step_metrics.pace(held_back=not may or self.state.held_back)
            self.view.pulse(self._queues(), self._share())
            await self._wait()
        for task in self.playing.values():
            task.cancel()
        await asyncio.gather(*self.playing.values(), return_exceptions=True)

    def _say_early_end(self) -> None:
        done, wanted, counts = self.state.trained, self.settings.steps, self.state.counts
        why = f"of {counts['opened']} groups {counts['flat']} were flat (rewards alike), {counts['void']} void (too few episodes)"
        if not done:
            raise UserError(
                f"no group of these tasks gave a training signal: {why}; take easier or harder ones, or larger groups"
            )
        self.work.reporter.say(
            f"rl: no task is left after {done} of {wanted} steps; {why}; more tasks or epochs would give more"
        )

    def _may_begin(self) -> bool:
        """Return whether what begins now is as new as State takes it to be; it matters where nothing may come too late."""
        patient = self.settings.mode == "sync" or self.settings.late == "wait"
        return not patient or self.parts.follower.version >= self.state.version

    async def _wait(self) -> None:
        """Wait for an episode to end, but not longer than the trainer may be left unheard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL):
                await self.news.wait()
        self.news.clear()
        await asyncio.sleep(0)  # whoever ended with an error has cancelled us by then

    def _record(self, event: Event) -> None:
        self.unwritten.append(event)
        self._apply(event)

    def _flush(self) -> None:
        """Write what was recorded; what was kept in case it had not been goes."""
        if self.unwritten:
            self.ledger.append(*self.unwritten)
            self.unwritten.clear()
        while self.journals:
            self.journals.pop().unlink(missing_ok=True)

    def _apply(self, event: Event) -> None:
        """Take note of an event, new or read from the ledger: both must leave the same behind."""
        self.state.apply(event)
        self.step_metrics.apply(event)

    def _queues(self) -> dict[str, int]:
        return {"episodes": len(self.playing), **self.state.queues}

    def _share(self) -> float:
        """Return how much of the next step is done: its episodes that have ended."""
        size, queues = self.settings.group_size, self.state.queues
        begun = (queues["open"] + queues["ready"] + queues["training"]) * size
        return min((begun - self.state.unplayed) / (self.settings.groups * size), 0.99)

    def _read_wish(self) -> None:
        """Take over the weights of the reward that a user wrote meanwhile."""
        path = self.folder / WISH
        if not path.exists() or (text := path.read_text(encoding="utf-8")) == self.wish:
            return
        self.wish = text
        try:
            wanted = reweighted(self.state.weights, json.loads(text))
        except (UserError, ValueError, AttributeError) as error:
            self.work.reporter.say(f"rl: {path} is passed over: {error}", style="yellow")
            return
        if wanted != self.state.weights:
            self._record(Weighted(wanted, step=self.state.batched + 1))
            self.work.reporter.say(f"rl: weights of the reward from step {self.state.batched + 1} on: {wanted}")

    def _read_reports(self) -> None:
        while report := self.exchange.report(self.state.trained + 1):
            for swap in self.parts.follower.swaps():
                self.step_metrics.swapped(asdict(swap))
            self.step_metrics.trained(report)
            self._write_row(report.step)
            self._record(Trained(report.step, report.version))
            self.parts.trained()
            self.count_again()

    def count_again(self) -> None:
        """Count what a killed trainer did once more: it was spent."""
        seen: Counter[int] = Counter()
        for report in self.exchange.spent_again():
            seen[report.step] += 1
            key = f"again/{report.step:08d}-{seen[report.step]:03d}"
            if key not in self.work.metrics:
                self.work.metrics.put(key, **{name: report.metrics[name] for name in ("tokens", "flops")})

    def _write_row(self, step: int) -> None:
        """Write what is known of a step, unless a kill came between that and the ledger."""
        key = f"train/{step:08d}"
        if key in self.work.metrics:
            return
        groups = [self.state.group(number) for number in self.state.groups_of(step)]
        keep_samples(
            self.folder, step, [(group.finished[e], reward) for group in groups for e, reward in group.rewards.items()]
        )
        row: dict[str, Any] = self.step_metrics.row(step, self._queues())
        if flags := self.monitor.add(step, starting(row, "behaviour_")):
            row["flags"] = {flag.behaviour: str(flag) for flag in flags}
        self.view.step(self.work.metrics.put(key, **row))

    def _sort_groups(self) -> None:
        """Close groups that are complete, drop those too old, give the trainer what it can take."""
        for closed in self.state.closing():
            self._record(closed)
        for stale in self.state.stale():
            self._record(stale)
        while batch := self.state.batch():
            self._record(batch)
            self._flush()
            self._put_batch(batch.step)

    def _put_batch(self, step: int) -> None:
        groups = [self.state.group(number) for number in self.state.groups_of(step)]
        chosen = [
            TrainedGroup(group.number, group.task, tuple(
                TrainedEpisode(episode_file(group.number, episode), reward) for episode, reward in group.rewards.items()
            )) for group in groups
        ]  # fmt: skip
        self.exchange.put_batch(Batch(step, tuple(chosen)))

    def _begin(self, group: asyncio.TaskGroup) -> None:
        """Open groups and begin episodes, as many as may be played at once."""
        while opened := self.state.next_group():
            self._record(opened)
            for episode in range(self.settings.group_size):
                heapq.heappush(self.idle, (opened.group, episode))
        self._flush()
        while self.idle and len(self.playing) < self.settings.at_once:
            place = heapq.heappop(self.idle)
            self.playing[place] = group.create_task(self._episode(*place))

    async def _episode(self, number: int, episode: int) -> None:
        """Play one episode and write down what became of it."""
        tries, path = self.state.attempts(number, episode), self.folder / episode_file(number, episode)
        journal = path.with_suffix(".part")
        journal.parent.mkdir(parents=True, exist_ok=True)
        seed, began = int(digest_of([self.seed, number, episode, tries])[:12], 16), time.monotonic()
        try:
            with self.step_metrics.busy("scoring"):
                name, task = f"{number:06d}-{episode:03d}", self.state.group(number).task
                play = self.environment.run_episode
                played = await play(task, self.policy, self.talk, name=name, seed=seed, journal=journal)
            played.trace.made_by["reward_weights"] = dict(self.state.weights)
            await asyncio.to_thread(_write, path, played.trace)
            event = finished(number, episode, played, time.monotonic() - began, self.state.version)
            self._record(event)
            self.step_metrics.sampled(played.trace, self.shape, event.seconds)
            self.parts.sampled()
            self.failed_in_a_row = 0
        except InfrastructureError as error:
            self._failed(Failed(number, episode, str(error), final=tries + 1 >= TRIES))
        finally:
            del self.playing[number, episode]
            self.news.set()
        self.journals.append(journal)

    def _failed(self, event: Failed) -> None:
        self._record(event)
        self.failed_in_a_row += 1
        if not event.final:
            heapq.heappush(self.idle, (event.group, event.episode))
        if self.failed_in_a_row >= GIVE_UP:
            message = f"the last {GIVE_UP} episodes were invalid: {event.cause}"
            raise UserError(f"{message}; put that right and run the same command to go on")


def _write(path: Path, trace: Trace) -> None:
    with whole_file(path) as beside:
        beside.write_bytes(to_json(trace))


def finished(group: int, episode: int, played: Episode, seconds: float, version: int) -> Finished:
    """Return what the ledger says of an episode; `version`: of one that came to no token, as its task was longer than the context."""
    sampled = [node for node in played.trace.nodes if node.sampled]
    versions = [each for node in sampled for each in node.versions]
    return Finished(
        group, episode, played.outcome, dict(played.trace.rewards), dict(played.behaviour), min(versions, default=version),
        max(versions, default=version), sampled=len(versions), turns=sum(node.kind == "turn" for node in sampled),
        seconds=round(seconds, 3),
    )  # fmt: skip
