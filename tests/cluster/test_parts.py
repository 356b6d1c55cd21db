"""Ranks and engines on places that do as they are told: what is lost is started again, with a reason; no Ray is needed."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import ActorDiedError

from etude.cluster import connect, engines, host, placement
from etude.cluster.engines import Engine, Fleet
from etude.cluster.host import About, Ended, Host, Lost
from etude.cluster.placement import Bundle, Placement
from etude.cluster.trainer import Ranks
from etude.errors import UserError
from etude.inference.client import ServerFailed
from etude.inference.weight_sync import Swap
from etude.recipe.cluster import EnginePlaces
from etude.rl.processes import NOT_OURS, RlJob
from etude.rl.settings import RlSettings

FULL = "cannot use /shared/weights: no space left on the disk; free some and run the same command"


def about(node: str, gpu: str = "", address: str = "") -> About:
    versions = {"python": "3.11.7", "ray": "2.60.0", "etude": "0.1.0"}
    return About(node, address or f"10.0.0.{node}", f"host-{node}", (gpu,) * bool(gpu), 1, versions, 0.0, "eth0")


def ended(status: int, said: str = "the last line") -> Ended:
    return Ended(status, said, memory=7_500_000_000, free=100_000_000)


class Place:
    """A `Host` whose processes end as was written down, one after the other; `None`: runs until it is killed."""

    def __init__(self, where: About, *ends: Ended | Lost | None, bundle: int = 0) -> None:
        self.where, self.ends, self.bundle = where, list(ends), bundle
        self.actor, self.asked = object(), list[str]()
        self.environments: list[dict[str, str]] = []
        self.killed = asyncio.Event()

    async def open(self) -> About:
        self.killed = asyncio.Event()
        return self.where

    async def ask(self, method: str, *given: Any, seconds: float | None = 0.0) -> Any:
        self.asked.append(method)
        if method in {"kill", "stop"}:
            self.killed.set()
        if method != "run":
            return 4321
        self.environments.append(given[1])
        end = self.ends.pop(0)
        if isinstance(end, Lost):
            raise end
        if end is None:
            await self.killed.wait()
        return end or ended(-9)

    def drop(self) -> None:
        self.actor = None


def limited(work: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(run())


def ranks_of(places: list[Place], said: list[str]) -> Ranks:
    return Ranks(places, ["-m", "part"], Path("/logs"), said.append)  # type: ignore[arg-type]


def test_ranks_are_numbered_by_node_and_gpu_and_meet_at_the_first() -> None:
    wheres = [about("2", "1"), about("1", "3"), about("2", "0"), about("1", "0")]
    places = [Place(where, ended(0), bundle=number) for number, where in enumerate(wheres)]
    limited(ranks_of(places, []).run())
    told = [place.environments[0] for place in places]
    assert [each["RANK"] for each in told] == ["3", "1", "2", "0"]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"], each["WORLD_SIZE"]) for each in told} == {
        ("10.0.0.1", "4321", "4")
    }
    assert {each["GLOO_SOCKET_IFNAME"] for each in told} == {"eth0"}


@pytest.mark.parametrize("loss", [ended(-9), Lost("the actor of rank 1 on host-2 is lost: its node died")])
def test_a_lost_rank_ends_all_which_are_started_again_and_why_is_said(loss: Ended | Lost) -> None:
    said: list[str] = []
    places = [Place(about("1"), None, ended(0)), Place(about("2"), loss, ended(0))]
    limited(ranks_of(places, said).run())
    assert [len(place.environments) for place in places] == [2, 2]
    assert "kill" in places[0].asked
    (line,) = said
    assert "rank 1" in line
    assert "host-2" in line
    assert "all ranks are started again and go on from the last checkpoint" in line
    if isinstance(loss, Ended):
        assert "was ended by SIGKILL (memory: 7.5 GB at most, 0.1 GB free on the node), after: the last line" in line


def test_a_full_disk_in_the_weight_store_is_one_line_and_nothing_is_started_again() -> None:
    places = [Place(about("1"), ended(NOT_OURS, f"step 7 | {FULL}")), Place(about("2"), None)]
    with pytest.raises(UserError, match=re.escape(f"the trainer: {FULL}")) as error:
        limited(ranks_of(places, []).run())
    assert "\n" not in str(error.value)
    assert [len(place.environments) for place in places] == [1, 1]
    assert all({"kill", "stop"} & {*place.asked} for place in places)


def test_ranks_that_are_lost_again_and_again_are_given_up_unless_a_step_was_trained_between() -> None:
    said: list[str] = []
    with pytest.raises(UserError, match=r"the trainer was lost 3 times in a row: rank 0 .*see /logs/trainer-\*\.log"):
        limited(ranks_of([Place(about("1"), *[ended(1)] * 3)], said).run())
    assert len(said) == 2
    ranks = ranks_of([Place(about("1"), *[ended(1)] * 4, ended(0))], said)
    ranks.say = lambda _: ranks.progressed()
    limited(ranks.run())
    assert ranks.deaths == 4


class Control:
    """The client of an engine; `fails` says at which version of which engine an update fails, `hangs` which one stops to answer."""

    fails: ClassVar[set[tuple[str, int]]] = set()
    hangs: ClassVar[set[str]] = set()
    took: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, address: str, *_: Any) -> None:
        self.address = address

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def update_weights(self, version: int) -> Swap:
        if (self.address, version) in Control.fails:
            raise ServerFailed(f"{self.address} broke off")
        Control.took.append((self.address, version))
        return Swap(version, 1, 0.1, 0.1)

    async def watch(self, _: float, on_hung: Callable[[], None]) -> None:
        if self.address in Control.hangs:
            on_hung()
        await asyncio.Event().wait()


class Seats(Place):
    """A place on which every engine has an address of its own: http://10.0.0.1:1, :2, …"""

    async def ask(self, method: str, *given: Any, seconds: float | None = 0.0) -> Any:
        answer = await super().ask(method, *given, seconds=seconds)
        return len(self.environments) + 1 if method == "free_port" else answer


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(engines, "RemotePolicy", Control)
    Control.fails, Control.hangs, Control.took = set(), set(), []
    said: list[str] = []
    job = RlJob(tmp_path, tmp_path, tmp_path / "s", RlSettings(tasks="none"), 0)
    store: Any = SimpleNamespace(number=3)
    store.newest = lambda: store.number
    made = Fleet(job, store, 10, said.append, patience=7.0)
    made.told = said  # type: ignore[attr-defined]
    return made


def served(
    fleet: Fleet, place: Place, until: Callable[[], bool], then: Callable[[], Any] = lambda: None
) -> list[list[str]]:
    """Run one engine until something holds, `then` until it holds again; return which engines could be asked, whenever that changed."""
    lists: list[list[str]] = []

    async def listen(endpoints: Any) -> None:
        lists.append([each.address for each in endpoints])

    async def run() -> None:
        fleet.listeners = [listen]
        fleet.engines = [Engine(0, EnginePlaces(cpus=1), place, fleet)]  # type: ignore[arg-type]
        running = asyncio.create_task(fleet.run())
        for each in (None, then):
            if each:
                each()
            while not until():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    limited(run())
    return lists


def test_a_failed_update_is_a_lost_engine_and_never_a_mixture(fleet: Fleet) -> None:
    Control.fails = {("http://10.0.0.1:1", 4)}
    lists = served(fleet, Seats(about("1"), None, None), lambda: bool(fleet.endpoints) and fleet.version == fleet.store.newest(),
                   lambda: setattr(fleet.store, "number", 4))  # fmt: skip
    assert lists[:3] == [["http://10.0.0.1:1"], [], ["http://10.0.0.1:2"]]
    assert Control.took == [("http://10.0.0.1:1", 3), ("http://10.0.0.1:2", 4)]
    (line,) = fleet.told  # type: ignore[attr-defined]
    assert "failed to take version 4 of the weights" in line
    assert "another is started in its place" in line


def test_an_engine_that_hangs_is_ended_and_replaced(fleet: Fleet) -> None:
    Control.hangs = {"http://10.0.0.1:1"}
    place = Seats(about("1"), None, None)
    lists = served(fleet, place, lambda: [each.address for each in fleet.endpoints] == ["http://10.0.0.1:2"])
    assert lists[:3] == [["http://10.0.0.1:1"], [], ["http://10.0.0.1:2"]]
    assert "kill" in place.asked
    assert "did not answer for 7 s" in fleet.told[0]  # type: ignore[attr-defined]


def test_engines_that_die_at_once_are_given_up_with_the_place_the_memory_and_the_log(fleet: Fleet) -> None:
    place = Seats(about("1"), *[ended(1, "out of memory")] * 3)
    fleet.engines = [Engine(0, EnginePlaces(cpus=1), place, fleet)]  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as errors:
        limited(fleet.run())
    said = str(errors.value.exceptions[0])
    assert "engine 0 was lost 3 times in a row: on host-1 (10.0.0.1, node 1) ended with status 1" in said
    assert "7.5 GB at most" in said
    assert "out of memory" in said
    assert "engine-0.log" in said


class Actor:
    """An actor that answers when it is let."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        def call(*_: Any) -> Any:
            return SimpleNamespace(future=lambda: asyncio.run_coroutine_threadsafe(wait(), asyncio.get_running_loop()))

        async def wait() -> Any:
            return await answer()

        self.about = self.work = SimpleNamespace(remote=call)


def hosted(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Awaitable[Any]], said: list[str]) -> Host:
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: Actor(answer)))
    monkeypatch.setattr(ray, "remote", lambda _: made)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    group: Any = SimpleNamespace(options=lambda _: {}, state=lambda _: "no node has 2 GPUs free (the cluster: 1 GPU)")
    return Host("engine 3", group, 0, said.append)


def test_every_call_ends_in_time_and_says_who_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    made = hosted(monkeypatch, never, [])
    made.actor, made.known = Actor(never), about("1")
    with pytest.raises(Lost, match=r"engine 3 on host-1 \(10\.0\.0\.1, node 1\) did not answer `work` within 0 s"):
        limited(made.ask("work", seconds=0.01))


def test_a_dead_actor_is_not_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead() -> None:
        raise ActorDiedError

    made = hosted(monkeypatch, dead, [])
    made.actor, made.known = Actor(dead), about("1")
    with pytest.raises(Lost, match=r"engine 3 on host-1 \(10\.0\.0\.1, node 1\) is lost: "):
        limited(made.ask("work"))


def test_what_an_actor_waits_for_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    async def late() -> About:
        while len(said) < 3:
            await asyncio.sleep(0)
        return about("1")

    monkeypatch.setattr(host, "NEWS", 0.01)
    assert limited(hosted(monkeypatch, late, said).open()).host == "host-1"
    assert all("engine 3 waits for a place since" in line and "no node has 2 GPUs free" in line for line in said)


def test_a_placement_that_waits_says_for_what_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (placement.NEWS, host.NEWS) == (10.0, 10.0)
    said, answers = list[str](), [False, False, True]
    monkeypatch.setattr(placement, "free", lambda: "1 CPU")
    made = Placement.__new__(Placement)
    made.wanted = [Bundle("trainer", {"CPU": 1})] * 3
    made.group = SimpleNamespace(wait=lambda seconds: answers.pop(0) if seconds == placement.NEWS else None)
    limited(made.ready(said.append))
    assert said == [
        f"cluster: waiting since {seconds} s for 3 places; free now: 1 CPU (others use the rest)"
        for seconds in (10, 20)
    ]


@pytest.mark.parametrize(("failures", "works"), [(0, True), (2, True), (3, False)])
def test_a_head_that_did_not_start_its_process_in_time_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, failures: int, works: bool
) -> None:
    asked: list[str] = []

    def init(address: str, **_: Any) -> None:
        asked.append(address)
        if len(asked) <= failures:
            raise ConnectionAbortedError("Starting Ray client server failed")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with contextlib.nullcontext() if works else pytest.raises(ConnectionAbortedError):
        connect._init("ray://head:10001")
    assert len(asked) == min(failures + 1, 3)
