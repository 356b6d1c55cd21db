"""A policy over a socket: what it says is what was sampled, and a request outlives the process that began it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from etude.errors import UserError
from etude.inference.local import LocalPolicy
from etude.inference.policy import Busy, Completion, PolicyInfo, Sampling, Token
from etude.rl.link import Link, Server, Swap, numbers_of, pack, read_frame, tokens_of
from etude.rl.processes import Child
from tests.inference.engines import (
    assert_greedy,
    engine_of,
    greedy,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
)

GREEDY = Sampling(16, temperature=0)
LONG = Sampling(400, temperature=0)
PROMPTS = prompts_of(1, 8, 30, 33)


@pytest.fixture
def socket() -> Iterator[Path]:
    """A name for a socket that is short enough."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "s"


@lru_cache
def the_model() -> Any:
    return model_of(num_hidden_layers=1)


def policy_of(queue: int = 64) -> LocalPolicy:
    return LocalPolicy(engine_of(the_model(), page=16, context=500), "tiny", queue=queue)


@contextlib.asynccontextmanager
async def served(policy: LocalPolicy, socket: Path) -> AsyncIterator[Server]:
    """Serve a policy; at the end all connections break, as if the process had been killed."""
    server = Server(policy)
    task = asyncio.create_task(server.run(socket))
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.wait([task])
        await policy.close()


@contextlib.asynccontextmanager
async def linked(socket: Path, **wish: Any) -> AsyncIterator[Link]:
    link = Link(socket, **wish)
    try:
        yield link
    finally:
        await link.close()


async def begun(link: Link, prompt: list[int], streamed: list[Token]) -> asyncio.Task[Completion]:
    """Return a long request of which some tokens have come."""
    first = asyncio.Event()

    def listen(new: list[Token]) -> None:
        streamed.extend(new)
        first.set()

    task = asyncio.create_task(link.generate(prompt, LONG, on_tokens=listen))
    await asyncio.wait_for(first.wait(), 60)
    assert not task.done()
    return task


LOGPROB = some.floats(max_value=0, allow_nan=False)
TOKENS = some.tuples(some.integers(0, 2**31), LOGPROB, LOGPROB, some.integers(0, 2**31)).map(lambda four: Token(*four))


@given(some.lists(TOKENS))
def test_tokens_come_as_they_were_sent_to_the_last_bit(tokens: list[Token]) -> None:
    assert tokens_of(numbers_of(tokens)) == tokens


def test_many_requests_over_one_link_each_get_their_own(socket: Path) -> None:
    async def main() -> None:
        policy = policy_of()
        async with served(policy, socket), linked(socket) as link:
            streams: list[list[Token]] = [[] for _ in range(12)]
            calls = [link.generate(PROMPTS[i % 4], GREEDY, on_tokens=streams[i].extend) for i in range(12)]
            done = await asyncio.gather(*calls)
            expected = [greedy(the_model(), prompt, 16) for prompt in PROMPTS]
            assert [each.token_ids for each in done] == [expected[i % 4] for i in range(12)]
            assert [each.tokens for each in done] == streams
            assert stat.S_IMODE(socket.stat().st_mode) == 0o600
            assert link.info == policy.info

    asyncio.run(main())


def test_what_is_sampled_is_told_as_the_policy_itself_tells_it(socket: Path) -> None:
    sampling = Sampling(
        40, temperature=0.8, top_p=0.9, top_k=50, seed=3, stop_tokens=frozenset({7, 8, 9, *range(20, 40)})
    )

    async def main() -> None:
        policy = policy_of()
        async with served(policy, socket), linked(socket) as link:
            direct = await policy.generate([5], sampling)  # of one token nothing can be cached: all is computed twice
            assert await link.generate([5], sampling) == direct
            assert direct.finish_reason == "stop"

    asyncio.run(main())


def test_what_is_wrong_with_a_request_is_told_to_its_caller(socket: Path) -> None:
    async def main() -> None:
        async with served(policy_of(queue=1), socket), linked(socket) as link:
            with pytest.raises(UserError, match="token 1000 is not in the model's vocabulary of 320"):
                await link.generate([1000], GREEDY)
            with pytest.raises(UserError, match="whole numbers"):
                await link.generate([1.5], GREEDY)  # type: ignore[list-item]
            with pytest.raises(UserError, match="not told over a link"):
                await link.generate([1], Sampling(4, stop=("end",)))
            running = await begun(link, PROMPTS[0], [])
            with pytest.raises(Busy) as busy:
                await link.generate(PROMPTS[1], GREEDY)
            assert busy.value.after == 1.0
            running.cancel()

    asyncio.run(main())


def test_a_cancelled_request_is_cancelled_over_there(socket: Path) -> None:
    async def main() -> None:
        policy = policy_of()
        async with served(policy, socket), linked(socket) as link:
            running = await begun(link, PROMPTS[0], [])
            running.cancel()
            await asyncio.wait([running])
            assert (await link.generate(PROMPTS[1], GREEDY)).token_ids == greedy(the_model(), PROMPTS[1], 16)
            assert policy.statistics()["cancelled"] == 1

    asyncio.run(main())


def test_a_request_goes_on_where_it_was_when_another_process_takes_over(socket: Path) -> None:
    """Of the same weights, so it must be as if nothing had happened; only the versions tell."""

    async def main() -> None:
        streamed: list[Token] = []
        async with linked(socket) as link:
            async with served(policy_of(), socket):
                running = await begun(link, PROMPTS[2], streamed)
            second = policy_of()
            await second.update({}, 5)
            async with served(second, socket):
                done = await asyncio.wait_for(running, 120)
                assert link.version == 5
                assert second.statistics()["written_tokens"] == done.versions.count(5) < 400
        assert_greedy(the_model(), PROMPTS[2], done)
        assert done.versions == [0] * done.versions.count(0) + [5] * done.versions.count(5)
        assert done.tokens == streamed
        assert done.versions.count(0)
        assert done.finish_reason == "length"

    asyncio.run(main())


def test_an_engine_that_breaks_ends_its_server_and_leaves_the_request_to_the_next(socket: Path) -> None:
    async def main() -> None:
        async with linked(socket) as link:
            first = policy_of()
            left = iter(range(100))

            def fail(*_: Any) -> None:
                if next(left, None) is None:
                    raise ValueError("the device is lost")

            first.engine.runner.model.get_output_embeddings().register_forward_pre_hook(fail)
            running = asyncio.create_task(link.generate(PROMPTS[0], LONG))
            with pytest.raises(RuntimeError, match="the engine has stopped: the device is lost"):
                await asyncio.wait_for(Server(first).run(socket), 60)
            async with served(policy_of(), socket):
                assert_greedy(the_model(), PROMPTS[0], await asyncio.wait_for(running, 120))
            await first.close()

    asyncio.run(main())


def test_changes_of_weights_are_told_those_before_the_link_included(socket: Path) -> None:
    async def main() -> None:
        before, after = Swap(3, 1000, 0.5, 0.01), Swap(4, 10, 0.25, 0.005)
        policy = policy_of()
        async with served(policy, socket) as server, linked(socket) as link:
            await policy.update({}, 3)
            server.swapped(before)
            await link.ready()
            assert (link.version, link.swaps()) == (3, [before])
            server.swapped(after)
            await link.generate(PROMPTS[0], GREEDY)
            assert (link.version, link.swaps(), link.swaps()) == (4, [after], [])

    asyncio.run(main())


# ---- a peer that misbehaves


Answer = Callable[[int], bytes]  # to the request of a number


@contextlib.asynccontextmanager
async def peer(socket: Path, answers: list[Answer | None]) -> AsyncIterator[list[asyncio.Queue[dict[str, Any]]]]:
    """Serve a connection after the other: say hello, answer the first request with bytes and hang up, or (None) never answer."""
    heard: list[asyncio.Queue[dict[str, Any]]] = []

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        heard.append(inbox)
        answer = answers[len(heard) - 1]
        writer.write(pack({"hello": asdict(PolicyInfo("peer", 64, 320)), "version": 0, "swaps": []}))
        while frame := await read_frame(reader):
            if "generate" in frame[0]:
                inbox.put_nowait(frame[0])
                if answer is not None:
                    writer.write(answer(frame[0]["generate"]))
                    break
        writer.close()

    server = await asyncio.start_unix_server(attend, socket)
    try:
        yield heard
    finally:
        server.close()


def one_token(number: int) -> bytes:
    return pack({"tokens": [[number, 1]]}, numbers_of([Token(7, -1.0, -1.0, 0)]))


def cut_off(number: int) -> bytes:
    return one_token(number)[:-1]


@pytest.mark.parametrize(
    ("sampling", "finish", "by"),
    [(Sampling(9, stop_tokens=frozenset({7})), "stop", 7), (Sampling(1), "length", None)],
)
def test_a_request_of_which_all_but_the_end_came_is_not_sent_again(
    socket: Path, sampling: Sampling, finish: str, by: int | None
) -> None:
    async def main() -> None:
        async with peer(socket, [one_token, None]) as heard, linked(socket) as link:
            done = await asyncio.wait_for(link.generate([1], sampling), 60)
            assert (done.token_ids, done.finish_reason, done.stopped_by) == ([7], finish, by)
            assert heard[1].empty()

    asyncio.run(main())


def test_a_frame_cut_off_is_not_taken_for_a_whole_one(socket: Path) -> None:
    async def main() -> None:
        async with peer(socket, [cut_off, one_token, None]) as heard, linked(socket) as link:
            running = asyncio.create_task(link.generate([1], Sampling(9)))
            await link.ready()
            while len(heard) < 3:
                await asyncio.sleep(0)
            asked = [(await inbox.get())["sampling"]["max_tokens"] for inbox in heard]
            assert asked == [9, 9, 8]
            running.cancel()

    asyncio.run(main())


def test_a_peer_that_hangs_is_noticed_and_its_requests_go_to_the_next(socket: Path) -> None:
    async def main() -> None:
        hung = asyncio.Event()
        async with (
            peer(socket, [None, one_token, None]) as heard,
            linked(socket, patience=0.2, on_hung=hung.set) as link,
        ):
            done = await asyncio.wait_for(link.generate([1], Sampling(1, stop_tokens=frozenset({7}))), 60)
            assert hung.is_set()
            assert (done.token_ids, [inbox.qsize() for inbox in heard]) == ([7], [1, 1, 0])

    asyncio.run(main())


@pytest.mark.parametrize("there", [True, False], ids=["a peer that does not answer", "nobody"])
def test_closing_ends_what_waits(socket: Path, there: bool) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if there:
                await stack.enter_async_context(peer(socket, [None]))
            link = Link(socket)
            running = asyncio.create_task(link.generate([1], GREEDY))
            await (link.ready() if there else asyncio.sleep(0))
            await link.close()
            with pytest.raises(RuntimeError, match="the link is closed"):
                await asyncio.wait_for(running, 60)
            with pytest.raises(RuntimeError, match="the link is closed"):
                await asyncio.wait_for(link.generate([1], GREEDY), 60)

    asyncio.run(main())


# ---- processes


COUNTING = """
import asyncio, os, sys
from pathlib import Path
from etude.inference.policy import Completion, PolicyInfo, Token
from etude.rl.processes import Child
from etude.rl.link import Server

class Counting:  # writes how long the text is before each token, and as its version which process that was
    info = PolicyInfo("counting", 2000, 2000)
    statistics = staticmethod(lambda: {"version": 0})

    async def beat(self):
        pass

    async def generate(self, prompt, sampling, session, on_tokens):
        tokens = []
        for place in range(len(prompt), len(prompt) + sampling.max_tokens):
            await asyncio.sleep(0.001)  # a model takes its time
            tokens.append(Token(place, -1.0, -1.0, os.getpid()))
            on_tokens(tokens[-1:])
        return Completion(tokens, "length")

asyncio.run(Server(Counting()).run(Path(sys.argv[1])))
"""


def test_a_request_survives_processes_that_are_killed_or_hang(tmp_path: Path, socket: Path) -> None:
    child = Child("counter", [sys.executable, "-c", COUNTING, str(socket)], tmp_path / "log")
    harm = [signal.SIGKILL, signal.SIGSTOP]
    streamed: list[Token] = []

    def listen(new: list[Token]) -> None:
        streamed.extend(new)
        child.progressed()
        if harm and len({token.version for token in streamed}) >= 3 - len(harm):
            os.kill(new[-1].version, harm.pop(0))

    async def main() -> None:
        async with linked(socket, patience=3.0, on_hung=child.kill) as link:
            running = asyncio.create_task(child.run())
            asking = asyncio.create_task(link.generate([0], Sampling(1000), on_tokens=listen))
            await asyncio.wait([running, asking], return_when=asyncio.FIRST_COMPLETED, timeout=120)
            assert asking.done(), (tmp_path / "log").read_text()
            assert asking.result().token_ids == list(range(1, 1001))
            assert asking.result().tokens == streamed
            assert len({*asking.result().versions}) == 1 + child.deaths >= 3
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(main())
