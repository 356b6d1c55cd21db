"""The router alone, before engines that do as they are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from etude.cluster import router
from etude.cluster.router import Endpoint, Router
from etude.inference.client import ServerFailed
from etude.inference.policy import Completion, PolicyInfo, Sampling, Token


class Engine:
    """Writes the position of each token, so that whoever goes on after another is seen to go on."""

    fails: ClassVar[dict[str, int]] = {}  # by address: after how many tokens; −1: hangs until it is closed
    held: ClassVar[dict[str, asyncio.Event]] = {}  # by address: it writes nothing until then
    asked: ClassVar[Counter[str]] = Counter()
    prompts: ClassVar[dict[str, int]] = {}  # tokens of the last prompt
    server = "etude"

    def __init__(self, address: str, *_: object) -> None:
        self.address, self.card, self.closed = address, dict[str, Any](), asyncio.Event()
        self.info = PolicyInfo("x", 1000, 1000, {"server": Engine.server})

    async def connect(self) -> PolicyInfo:
        self.card = {"id": "x"}
        return self.info

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None, on_tokens: Any
    ) -> Completion:
        Engine.asked[self.address] += 1
        Engine.prompts[self.address] = len(prompt)
        if self.address in Engine.held:
            await Engine.held[self.address].wait()
        tokens = [Token(len(prompt) + place, 0.0, 0.0, 0) for place in range(sampling.max_tokens)]
        if (after := Engine.fails.get(self.address)) is None:
            return Completion(tokens, "length")
        if after < 0:
            await self.closed.wait()
        on_tokens(tokens[: max(0, after)])
        raise ServerFailed(f"{self.address} is gone")

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "RemotePolicy", Engine)
    monkeypatch.setattr(router, "ASIDE", 0.01)
    Engine.fails, Engine.asked, Engine.prompts, Engine.server, Engine.held = {}, Counter(), {}, "etude", {}


ENGINES = [Endpoint(number, f"e{number}") for number in range(4)]
SAMPLING = Sampling(8)


def placed(sessions: Sequence[str], engines: Sequence[Endpoint]) -> dict[str, str]:
    """Return which engine each session goes to."""

    async def ask() -> dict[str, str]:
        made, found = Router("t"), {}
        await made.set_engines(engines)
        for session in sessions:
            Engine.asked.clear()
            await made.generate([1], SAMPLING, session=session)
            found[session] = next(iter(Engine.asked))
        return found

    return asyncio.run(ask())


def test_a_session_stays_where_it_is_and_only_those_of_a_lost_engine_move() -> None:
    sessions = [f"s{number}" for number in range(200)]
    before, after = placed(sessions, ENGINES), placed(sessions, ENGINES[1:])
    assert before == placed(sessions, ENGINES[::-1])
    assert min(Counter(before.values()).values()) > 30
    assert {session for session in sessions if before[session] != after[session]} == {
        s for s in sessions if before[s] == "e0"
    }


@pytest.mark.parametrize(("server", "kept"), [("etude", 3), ("vLLM", 0)])
def test_a_request_goes_on_after_the_tokens_that_came(server: str, kept: int) -> None:
    """Of vLLM they are sampled anew: it says only at the end which weights wrote what."""
    Engine.fails, Engine.server = {"e0": 3}, server
    seen: list[int] = []

    async def ask() -> Completion:
        made = Router("t")
        await made.set_engines(ENGINES[:1])
        asking = asyncio.create_task(
            made.generate([1, 2], SAMPLING, session="s", on_tokens=lambda new: seen.extend(t.id for t in new))
        )
        while not Engine.asked["e0"]:
            await asyncio.sleep(0)
        await made.set_engines(ENGINES[1:2])
        return await asking

    done = asyncio.run(ask())
    assert done.token_ids == list(range(2, 10))
    assert seen == [2, 3, 4]
    assert Engine.asked == {"e0": 1, "e1": 1}
    assert Engine.prompts == {"e0": 2, "e1": 2 + kept}


def test_an_engine_that_is_taken_off_the_list_loses_its_requests_at_once() -> None:
    Engine.fails = {"e0": -1}

    async def ask() -> Completion:
        made = Router("t")
        await made.set_engines(ENGINES[:1])
        asking = asyncio.create_task(made.generate([1], SAMPLING, session="s"))
        while not Engine.asked["e0"]:
            await asyncio.sleep(0)
        await made.set_engines([Endpoint(0, "replacement")])
        return await asking

    assert asyncio.run(ask()).token_ids == list(range(1, 9))
    assert Engine.asked == {"e0": 1, "replacement": 1}


def test_a_slow_engine_holds_its_share_of_the_sessions_and_the_others_go_on() -> None:
    """Eight sessions at once on two engines, one of which answers nobody: four wait for it at most, a hundred others are served."""
    ended: list[str] = []

    async def play(made: Router, names: list[str]) -> None:
        while names:
            name = names.pop()
            for _ in range(3):  # turns
                await made.generate([1], SAMPLING, session=name)
                await asyncio.sleep(0)  # a command
            ended.append(name)

    async def run() -> None:
        Engine.held = {"e0": asyncio.Event()}
        made = Router("t")
        await made.set_engines(ENGINES[:2])
        names = [f"s{number}" for number in range(100)]
        players = [asyncio.create_task(play(made, names)) for _ in range(8)]
        while names:
            await asyncio.sleep(0)
        assert 1 <= Engine.asked["e0"] <= 4
        assert len(ended) >= 100 - 8
        Engine.held["e0"].set()  # slow, not lost
        await asyncio.gather(*players)
        assert sorted(ended) == sorted(f"s{number}" for number in range(100))
        assert sum(Engine.asked.values()) == 300

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_session_stays_with_its_engine_whoever_is_less_busy_later() -> None:
    async def run() -> None:
        Engine.held = {"e0": asyncio.Event()}
        made = Router("t")
        await made.set_engines(ENGINES[:2])
        mine = next(name for name in map(str, range(100)) if made._engine(name, ENGINES[:2]) == ENGINES[0])
        waiting = asyncio.create_task(made.generate([1], SAMPLING, session=mine))
        while not Engine.asked["e0"]:
            await asyncio.sleep(0)
        again = asyncio.create_task(made.generate([1, 2], SAMPLING, session=mine))
        while Engine.asked["e0"] < 2:
            await asyncio.sleep(0)
        Engine.held["e0"].set()
        await asyncio.gather(waiting, again)
        assert not Engine.asked["e1"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_request_that_fails_everywhere_is_given_up_with_the_reason() -> None:
    Engine.fails = {"e0": 0, "e1": 0}

    async def ask() -> None:
        made = Router("t")
        await made.set_engines(ENGINES[:2])
        await made.generate([1], SAMPLING, session="s")

    with pytest.raises(ServerFailed, match=r"failed 12 times, on whatever engine; the last time: e[01] is gone"):
        asyncio.run(ask())


def test_all_of_it_came_though_nobody_said_so() -> None:
    Engine.fails = {"e0": 8}

    async def ask() -> Completion:
        made = Router("t")
        await made.set_engines(ENGINES[:1])
        return await made.generate([1], SAMPLING, session="s")

    assert asyncio.run(ask()) == Completion([Token(place, 0.0, 0.0, 0) for place in range(1, 9)], "length")
