"""The orchestrator among fakes: what it writes down, in which order, and that any end of a session is a place to go on from."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from etude.agent.trace import Node, Trace
from etude.errors import UserError, storage_error
from etude.files import write_json
from etude.inference.policy import Completion, PolicyInfo, Sampling, Token
from etude.inference.weight_sync import Swap
from etude.jsonl import MetricsLog, read_rows
from etude.lineage.compute import ComputeShape, forward_flops
from etude.progress import Reporter
from etude.rl.environment import Episode, InfrastructureError, Item
from etude.rl.exchange import Exchange, Report, episode_file
from etude.rl.ledger import Batched, Closed, Event, Failed, Finished, Ledger, Trained, Weighted
from etude.rl.orchestrator import GIVE_UP, Orchestrator
from etude.rl.processes import LEDGER, WISH
from etude.rl.settings import RlSettings
from etude.rl.view import View
from etude.work import Work
from tests.rl.toy import settings_of

SHAPE = ComputeShape(1000, ())


class Stopped(Exception):  # noqa: N818 - as a user does
    """The session ends here."""


@dataclass
class Environment:
    """Three tokens an episode; the reward is drawn by its seed. `fails`: causes of the machinery, by name and attempt."""

    tasks: int = 40
    fails: dict[str, list[str]] = field(default_factory=dict)
    down: bool = False
    played: Counter[str] = field(default_factory=Counter)

    @property
    def items(self) -> list[Item]:
        return [Item(f"t{number}") for number in range(self.tasks)]

    async def run_episode(self, item: str, policy: Any, talk: Any, *, name: str, seed: int, journal: Path) -> Episode:
        self.played[name] += 1
        journal.write_text("half an episode")
        done = await policy.generate([1, 2], Sampling(max_tokens=3, seed=seed))
        if causes := self.fails.get(name):
            raise InfrastructureError(causes.pop())
        if self.down:
            raise InfrastructureError("sandbox: none can be opened")
        trace = Trace(name, item)
        trace.nodes = [Node(None, "opening", [1, 2], ""),
                       Node(0, "turn", done.token_ids, "", sampled=True, logprobs=done.logprobs, raw_logprobs=done.logprobs,
                            versions=done.versions)]  # fmt: skip
        drawn = random.Random(seed)
        trace.rewards = {"outcome": drawn.random(), "length": -drawn.random()}
        return Episode(trace, "pass", {"turns": 1.0})


@dataclass
class Parts:
    """An engine and a trainer that take no time; the engine takes each version over when it was asked `slow` times for it."""

    exchange: Exchange
    slow: int = 0
    held: int = 0
    asked: int = 0

    @property
    def policy(self) -> Parts:
        return self

    @property
    def follower(self) -> Parts:
        return self

    async def generate(self, prompt: list[int], sampling: Sampling, **_: Any) -> Completion:
        await asyncio.sleep(0)
        return Completion([Token(7, -1.0, -1.0, self.held)] * sampling.max_tokens, "length")

    async def engine(self) -> None:
        await asyncio.Event().wait()

    async def trainer(self) -> None:
        step = 1
        while not self.exchange.stopped:
            if self.exchange.batch(step):
                self.exchange.put_report(Report(step, step, {"tokens": 10, "flops": 100.0, "seconds": 0.0}))
                step += 1
            await asyncio.sleep(0)

    async def ready(self) -> PolicyInfo:
        return PolicyInfo("fake", 100, 100)

    @property
    def version(self) -> int:
        newest = max((step for step in range(1, 100) if self.exchange.report(step)), default=0)
        self.asked = self.asked + 1 if newest > self.held else 0
        if self.asked > self.slow:
            self.held = newest
        return self.held

    def swaps(self) -> list[Swap]:
        return []

    def sampled(self) -> None:
        pass

    def trained(self) -> None:
        pass


@dataclass
class Run:
    """A run in a folder."""

    folder: Path
    settings: RlSettings
    environment: Environment
    said: list[str] = field(default_factory=list)
    slow: int = 0

    def session(self, ticks: int | None = None, each: Any = lambda _conductor: None) -> None:
        """Go on, to the end or for some turns of the loop."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with MetricsLog(self.folder / "metrics.jsonl") as metrics:
            asyncio.run(self._session(metrics, ticks, each))

    async def _session(self, metrics: MetricsLog, ticks: int | None, each: Any) -> None:
        reporter, left = Reporter(quiet=True), iter(range(10**6 if ticks is None else ticks))
        reporter.say = lambda line, **_: self.said.append(line)  # type: ignore[method-assign]
        work, parts = (
            Work(self.folder, metrics, reporter, self.folder),
            Parts(Exchange(self.folder / "exchange"), self.slow),
        )

        def check_stop() -> None:
            each(orchestrator)
            if next(left, None) is None:
                raise Stopped

        with View(reporter, self.settings.steps) as view:
            orchestrator = Orchestrator(self.environment, parts, None, self.settings, work, 5, SHAPE, view)  # type: ignore[arg-type]
            reporter.check_stop = check_stop
            try:
                async with asyncio.TaskGroup() as group:
                    trainer = group.create_task(parts.trainer())
                    await orchestrator.run(group)
                    await trainer
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    def events(self) -> list[Event]:
        return Ledger(self.folder / LEDGER).read()[0]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events() if isinstance(event, kind)]

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["key"].startswith("train/")]


def traces(folder: Path) -> dict[str, tuple[int, bytes, tuple[int, int]]]:
    """Return times, contents and places of all traces."""
    found = sorted(folder.glob("episodes/*/*.json"))
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes(), (int(p.parent.name), int(p.stem))) for p in found}


def check_whole(run: Run) -> None:
    """Every step is trained once from its batch, every task at most once, every episode finished once and counted once."""
    steps, groups, size = run.settings.steps, run.settings.groups, run.settings.group_size
    assert (
        [event.step for event in run.of(Trained)]
        == [event.step for event in run.of(Batched)]
        == list(range(1, steps + 1))
    )
    finished = {(event.group, event.episode): event for event in run.of(Finished)}
    assert len(finished) == len(run.of(Finished))
    closed = {event.group: event for event in run.of(Closed)}
    exchange, tasks = Exchange(run.folder / "exchange"), []
    for event in run.of(Batched):
        batch = exchange.batch(event.step)
        assert batch is not None
        assert tuple(group.group for group in batch.groups) == event.groups
        for group in batch.groups:
            tasks.append(group.task)
            wanted = [
                (episode_file(group.group, episode), reward) for episode, reward in closed[group.group].rewards.items()
            ]
            assert [(each.file, each.reward) for each in group.episodes] == wanted
            assert len(group.episodes) == size
            assert all((run.folder / each.file).exists() for each in group.episodes)
    assert len(tasks) == len(set(tasks)) == steps * groups
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    last = max(place for place, event in enumerate(run.events()) if isinstance(event, Trained))
    counted = [event for event in run.events()[:last] if isinstance(event, Finished)]
    assert sum(row["episodes"] for row in rows) == len(counted)
    assert sum(row["flops"] for row in rows) == len(counted) * forward_flops(SHAPE, 5) + 100.0 * steps
    every = read_rows(run.folder / "metrics.jsonl")  # what came too late for a step was sampled all the same
    assert sum(row.get("sampling_flops", 0) for row in every) == len(finished) * forward_flops(SHAPE, 5)
    assert sum(row.get("flops", 0) for row in every if row["key"] == "rest") == (
        len(finished) - len(counted)
    ) * forward_flops(SHAPE, 5)
    assert not list(run.folder.glob("episodes/*/*.part"))
    for step in range(1, steps + 1):
        assert (run.folder / "samples" / f"{step:08d}" / "best.json").exists()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_trains_every_step_once(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path / "run", settings_of(steps=4, mode=mode), Environment())
    run.session()
    check_whole(run)
    weights = run.of(Weighted)[0].weights
    for event in run.of(Closed):
        expected = {e.episode: weights["outcome"] * e.parts["outcome"] + weights["length"] * e.parts["length"]
                    for e in run.of(Finished) if e.group == event.group}  # fmt: skip
        assert event.rewards == pytest.approx(expected)


@examples(max_examples=25)
@given(st.lists(st.integers(0, 12), max_size=6), st.sampled_from(["async", "sync"]))
def test_wherever_sessions_end_the_run_goes_on_and_plays_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], mode: str
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), settings_of(steps=3, mode=mode), Environment())
    for ticks in ends:
        known = {(event.group, event.episode) for event in run.of(Finished)}
        before = {path: each for path, each in traces(run.folder).items() if each[2] in known}
        played = run.environment.played.copy()
        with contextlib.suppress(Stopped):
            run.session(ticks)
        again = run.environment.played - played
        assert not [name for name in again if tuple(map(int, name.split("-"))) in known]
        assert before.items() <= traces(run.folder).items()
    run.session()
    check_whole(run)


def test_a_batch_that_a_kill_kept_from_the_trainer_is_put_again(tmp_path: Path) -> None:
    whole = Run(tmp_path / "run", settings_of(steps=2, mode="sync"), Environment())
    whole.session()
    events, exchange = whole.events(), tmp_path / "run" / "exchange"
    batched = next(place for place, event in enumerate(events) if isinstance(event, Batched))
    lines = (whole.folder / LEDGER).read_bytes().splitlines(keepends=True)
    (whole.folder / LEDGER).write_bytes(b"".join(lines[: batched + 1]) + b'{"event": "Tra')
    before = (exchange / "batches" / "00000001.json").read_bytes()
    for path in [*exchange.glob("*/*.json"), exchange / "stop", whole.folder / "metrics.jsonl"]:
        path.unlink()
    whole.session()
    assert (exchange / "batches" / "00000001.json").read_bytes() == before
    assert any("dropped 14 bytes" in line for line in whole.said)
    check_whole(whole)


def test_in_sync_mode_every_token_is_of_the_newest_weights(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings_of(steps=4, mode="sync", staleness=0), Environment(), slow=3)
    run.session()
    check_whole(run)
    step_of = {group: event.step for event in run.of(Batched) for group in event.groups}
    assert {(step_of[e.group] - 1, step_of[e.group] - 1) for e in run.of(Finished)} == {
        (e.oldest, e.newest) for e in run.of(Finished)
    }
    assert all(event.oldest == event.newest == step_of[event.group] - 1 for event in run.of(Finished))


def test_what_the_machinery_spoils_is_tried_again_then_left_out_and_never_scored(tmp_path: Path) -> None:
    fails = {"000000-000": ["hung: a", "hung: b"], "000001-001": ["sandbox: c"] * 3}
    run = Run(tmp_path / "run", settings_of(steps=2, group_size=3), Environment(fails=fails))
    run.session()
    failed = [(event.group, event.episode, event.cause, event.final) for event in run.of(Failed)]
    assert sorted(failed) == sorted([
        (0, 0, "hung: b", False), (0, 0, "hung: a", False), (1, 1, "sandbox: c", False), (1, 1, "sandbox: c", False),
        (1, 1, "sandbox: c", True),
    ])  # fmt: skip
    closed = {event.group: event for event in run.of(Closed)}
    assert set(closed[0].rewards) == {0, 1, 2}
    assert set(closed[1].rewards) == {0, 2}
    assert run.environment.played["000000-000"] == run.environment.played["000001-001"] == 3
    seeds = Counter(row.get("invalid_hung", 0) for row in run.rows())
    assert sum(count * times for count, times in seeds.items()) == 2
    assert not list(run.folder.glob("episodes/*/*.part"))


def test_machinery_that_is_down_stops_the_run_with_its_cause(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings_of(steps=2, groups=8, group_size=4), Environment(down=True))
    with pytest.raises(
        UserError, match="sandbox: none can be opened; put that right and run the same command to go on"
    ):
        run.session()
    assert len(run.of(Failed)) >= GIVE_UP
    run.environment.down = False
    run.session()
    check_whole(run)


def test_weights_of_the_reward_change_in_a_running_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings_of(steps=6, mode="sync"), Environment())

    def wish(orchestrator: Orchestrator) -> None:
        if orchestrator.state.trained == 2:
            write_json(run.folder / WISH, {"outcome": 0.25})
        if orchestrator.state.trained == 4:
            (run.folder / WISH).write_text('{"outcom": 1}')

    run.session(each=wish)
    first, second = run.of(Weighted)
    assert second.weights == {**first.weights, "outcome": 0.25}
    assert second.step == 3
    step_of = {group: event.step for event in run.of(Batched) for group in event.groups}
    parts = {(e.group, e.episode): e.parts for e in run.of(Finished)}
    for event in run.of(Closed):
        weights = first.weights if step_of[event.group] < 3 else second.weights
        for episode, reward in event.rewards.items():
            assert reward == pytest.approx(
                sum(weights[name] * value for name, value in parts[event.group, episode].items())
            )
    assert sum("passed over" in line and "outcom" in line for line in run.said) == 1
    check_whole(run)


def test_a_run_without_enough_tasks_ends_early_and_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings_of(steps=5, groups=2), Environment(tasks=5))
    run.session()
    assert [event.step for event in run.of(Trained)] == [1, 2]
    assert [line for line in run.said if "no task is left after 2 of 5 steps" in line]
    assert Exchange(run.folder / "exchange").stopped


def test_a_full_disk_stops_the_run_in_a_way_that_can_be_told(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", settings_of(steps=2), Environment())
    half = run.folder / "episodes" / "000001" / f".000.json.{os.getpid()}.part"
    half.parent.mkdir(parents=True)
    half.symlink_to("/dev/full")
    with pytest.raises(OSError) as raised:
        run.session()
    assert raised.value.errno == errno.ENOSPC
    assert "no space left" in str(storage_error(raised.value))
    run.session()
    check_whole(run)
