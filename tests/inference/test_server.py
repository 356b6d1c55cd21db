"""The token API over our engine, through the one client: what it says is what was sampled, over TCP and over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.errors import UserError
from etude.inference.client import OUTLIVING, ClientSettings, RemotePolicy, ServerFailed
from etude.inference.http import Limits, Served, bind, server_of
from etude.inference.local import LocalPolicy
from etude.inference.policy import Busy, Completion, Sampling, Token
from etude.inference.server import build_app
from etude.inference.weight_sync import BrokenStore, Receiver, WeightStore
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


@lru_cache
def the_model(seed: int = 0) -> Any:
    return model_of(seed=seed, num_hidden_layers=1)


def policy_of() -> LocalPolicy:
    return LocalPolicy(engine_of(the_model(), page=16, context=500), "tiny")


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address that is free, and short enough for the name of a socket."""
    if request.param == "tcp":
        with bind("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"unix:{folder}/s"


@pytest.fixture
def unix() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"unix:{folder}/s"


@contextlib.asynccontextmanager
async def serving(
    policy: LocalPolicy, address: str, store: WeightStore | None = None, **limited: Any
) -> AsyncIterator[LocalPolicy]:
    """Serve a policy; at the end all connections break, as if the process had been killed."""
    limits = Limits(drain=0, **limited)
    app = build_app(Served(policy, limits), {"id": "tiny"}, frozenset(), Receiver(policy, store) if store else None)
    if address.startswith("unix:"):
        listening = socket.socket(socket.AF_UNIX)
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)
        listening.bind(address.removeprefix("unix:"))
    else:
        listening = bind("127.0.0.1", int(address.rpartition(":")[2]))
    listening.listen(100)
    server = server_of(app, limits)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment] # signals are pytest's
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield policy
    finally:
        server.should_exit = True
        await asyncio.wait([task])
        listening.close()


@contextlib.asynccontextmanager
async def opened(address: str, settings: ClientSettings = OUTLIVING) -> AsyncIterator[RemotePolicy]:
    policy = await RemotePolicy.open(address, settings=settings)
    try:
        yield policy
    finally:
        await policy.close()


async def begun(policy: RemotePolicy, prompt: list[int], heard: list[Token]) -> asyncio.Task[Completion]:
    """Return a long request of which some tokens have come."""
    first = asyncio.Event()

    def listen(new: list[Token]) -> None:
        heard.extend(new)
        first.set()

    task = asyncio.create_task(policy.generate(prompt, LONG, on_tokens=listen))
    await asyncio.wait_for(first.wait(), 60)
    assert not task.done()
    return task


def test_many_requests_each_get_their_own(address: str) -> None:
    async def main() -> None:
        async with serving(policy_of(), address) as own, opened(address) as policy:
            streams: list[list[Token]] = [[] for _ in range(12)]
            calls = [policy.generate(PROMPTS[i % 4], GREEDY, on_tokens=streams[i].extend) for i in range(12)]
            done = await asyncio.gather(*calls)
            expected = [greedy(the_model(), prompt, 16) for prompt in PROMPTS]
            assert [each.token_ids for each in done] == [expected[i % 4] for i in range(12)]
            assert [each.tokens for each in done] == streams
            assert (policy.info.name, policy.info.context, policy.info.vocabulary) == ("tiny", 500, own.info.vocabulary)

    asyncio.run(main())


def test_what_is_sampled_is_what_the_policy_itself_says(address: str) -> None:
    stops = frozenset({7, 8, 9, *range(20, 40)})
    sampling = Sampling(40, temperature=0.8, top_p=0.9, top_k=50, seed=3, stop_tokens=stops)

    async def main() -> None:
        async with serving(policy_of(), address) as own, opened(address) as policy:
            direct = await own.generate([5], sampling)  # of one token nothing can be cached: all is computed twice
            assert await policy.generate([5], sampling) == direct
            assert direct.finish_reason == "stop"
            likely = await own.generate([5], Sampling(6, seed=1, alternatives=3))
            assert await policy.generate([5], Sampling(6, seed=1, alternatives=3)) == likely
            await policy.generate(PROMPTS[3], GREEDY, session="talk")
            assert (await policy.generate(PROMPTS[3], GREEDY, session="talk")).cached > 0

    asyncio.run(main())


def test_what_is_wrong_with_a_request_is_said_to_its_caller(unix: str) -> None:
    async def main() -> None:
        async with serving(policy_of(), unix, max_queue=1), opened(unix) as policy:
            with pytest.raises(UserError, match="token id 1000 is outside the vocabulary of 320"):
                await policy.generate([1000], GREEDY)
            with pytest.raises(UserError, match="experts were asked for, but this model has no routers"):
                await policy.generate([1], Sampling(2, experts=True))
            running = await begun(policy, PROMPTS[0], [])
            with pytest.raises(Busy) as busy:
                await policy.generate(PROMPTS[1], GREEDY)
            assert busy.value.after == 2.0
            running.cancel()

    asyncio.run(main())


def test_experts_come_as_vllm_sends_them(unix: str) -> None:
    from tests.inference.test_routing import moe

    async def main() -> None:
        own = LocalPolicy(engine_of(moe("mixtral"), page=16, context=200), "moe")
        async with serving(own, unix), opened(unix) as policy:
            sampling = Sampling(5, temperature=0, experts=True)
            direct, done = await own.generate([3, 4, 5], sampling), await policy.generate([3, 4, 5], sampling)
            assert done.token_ids == direct.token_ids
            assert np.array_equal(done.experts, np.asarray(direct.experts))

    asyncio.run(main())


def test_vllms_fields_and_a_whole_reply(unix: str) -> None:
    async def main() -> None:
        transport = httpx2.AsyncHTTPTransport(uds=unix.removeprefix("unix:"))
        async with (
            serving(policy_of(), unix),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            body: dict[str, Any] = {
                "token_ids": PROMPTS[1],
                "sampling_params": {"max_tokens": 3, "temperature": 0, "logprobs": 1},
            }
            reply = (await client.post("/inference/v1/generate", json=body)).json()
            choice = reply["choices"][0]
            assert choice["token_ids"] == greedy(the_model(), PROMPTS[1], 3)
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
            assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 3)
            entry = choice["logprobs"]["content"][0]
            assert (entry["token_id"], entry["logprob"]) == (
                choice["token_ids"][0],
                entry["top_logprobs"][0]["logprob"],
            )
            for wrong, says in (
                ({"n": 2}, "sampling_params.n"),
                ({"min_p": 0.5}, "min_p"),
                ({"max_tokens": 9999}, "context length"),
            ):
                refused = await client.post("/inference/v1/generate", json=body | {"sampling_params": wrong})
                assert refused.status_code == 400
                assert says in refused.text
            assert (await client.post("/pause?mode=keep", json={})).status_code == 404  # no store, no weight routes

    asyncio.run(main())


def test_abort_ends_a_stream_and_says_so(unix: str) -> None:
    async def main() -> None:
        transport = httpx2.AsyncHTTPTransport(uds=unix.removeprefix("unix:"))
        async with (
            serving(policy_of(), unix) as own,
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            sampling = {"max_tokens": 400, "temperature": 0}
            body = {"request_id": "mine", "token_ids": [1], "sampling_params": sampling, "stream": True}
            async with client.stream("POST", "/inference/v1/generate", json=body) as reply:
                lines = reply.aiter_lines()
                await anext(lines)
                await client.post("/inference/v1/abort_requests", json={"request_ids": ["mine", "nobody"]})
                rest = [line async for line in lines]
            assert '"abort"' in "".join(rest)
            async with asyncio.timeout(60):  # the engine's thread counts it at its next step
                while own.statistics()["cancelled"] == 0:
                    await asyncio.sleep(0.001)
            assert own.statistics()["cancelled"] == 1

    asyncio.run(main())


def test_a_cancelled_request_is_cancelled_over_there(unix: str) -> None:
    async def main() -> None:
        async with serving(policy_of(), unix) as own, opened(unix) as policy:
            running = await begun(policy, PROMPTS[0], [])
            running.cancel()
            await asyncio.wait([running])
            assert (await policy.generate(PROMPTS[1], GREEDY)).token_ids == greedy(the_model(), PROMPTS[1], 16)
            while not own.statistics()["cancelled"]:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_request_goes_on_where_it_was_when_another_engine_takes_over(unix: str) -> None:
    """Of the same weights, so it must be as if nothing had happened; only the versions differ."""

    async def main() -> None:
        heard: list[Token] = []
        async with serving(policy_of(), unix):
            policy = await RemotePolicy.open(unix, settings=OUTLIVING)
            running = await begun(policy, PROMPTS[2], heard)
        second = policy_of()
        await second.update({}, 5)
        async with serving(second, unix):
            done = await asyncio.wait_for(running, 120)
            assert second.statistics()["written_tokens"] == done.versions.count(5) < 400
            await policy.close()
        assert_greedy(the_model(), PROMPTS[2], done)
        assert done.versions == [0] * done.versions.count(0) + [5] * done.versions.count(5)
        assert done.tokens == heard
        assert done.versions.count(0)
        assert done.finish_reason == "length"

    asyncio.run(main())


def test_an_engine_that_breaks_leaves_the_request_to_the_next(unix: str) -> None:
    async def main() -> None:
        first = policy_of()
        left = iter(range(100))

        def fail(*_: Any) -> None:
            if next(left, None) is None:
                raise ValueError("the device is lost")

        first.engine.runner.model.get_output_embeddings().register_forward_pre_hook(fail)
        async with serving(first, unix):
            policy = await RemotePolicy.open(unix, settings=OUTLIVING)
            running = asyncio.create_task(policy.generate(PROMPTS[0], LONG))
            while not first._over:
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="the engine has stopped: the device is lost"):
                await first.beat()
        async with serving(policy_of(), unix):
            assert_greedy(the_model(), PROMPTS[0], await asyncio.wait_for(running, 120))
            await policy.close()

    asyncio.run(main())


def test_closing_ends_what_waits(unix: str) -> None:
    async def main() -> None:
        policy = RemotePolicy(unix, 10, settings=OUTLIVING)
        waiting = asyncio.create_task(policy.connect())
        await asyncio.sleep(0)
        await policy.close()
        with pytest.raises((ServerFailed, RuntimeError)):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


# ---- weights


def test_weights_come_through_the_life_cycle_into_a_request_that_runs(unix: str, tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path, 4)
        async with serving(policy_of(), unix, WeightStore(tmp_path, 4)), opened(unix) as policy:
            heard: list[Token] = []
            running = await begun(policy, PROMPTS[2], heard)
            store.publish(the_model(1).state_dict(), 3, 3)
            swap = await policy.update_weights(3)
            assert (swap.version, swap.bytes) == (3, (tmp_path / "00000003.anchor").stat().st_size)
            assert 0 < swap.paused < swap.seconds
            assert await policy.update_weights(3) == swap  # again: nothing to do
            done = await running
            assert done.versions == [0] * done.versions.count(0) + [3] * done.versions.count(3)
            assert {*done.versions} == {0, 3}
            assert done.tokens == heard
            assert_greedy(the_model(1), PROMPTS[2], await policy.generate(PROMPTS[2], GREEDY))
            with pytest.raises(BrokenStore, match="no way to version 9"):
                await policy.update_weights(9)
            assert (await policy._connections.fetch("GET", "/weight_info")).json() == {"weight_version": "3"}

    asyncio.run(main())


def test_paused_requests_are_kept(unix: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(policy_of(), unix, WeightStore(tmp_path, 4)) as own, opened(unix) as policy:
            running = await begun(policy, PROMPTS[2], [])
            await policy.tell("/pause?mode=keep")
            before = own.statistics()["written_tokens"]
            await own.beat()
            assert own.statistics()["written_tokens"] == before
            assert (await policy._connections.fetch("GET", "/is_paused")).json() == {"is_paused": True}
            with pytest.raises(UserError, match="mode=keep only"):
                await policy.tell("/pause?mode=abort")
            await policy.tell("/resume")
            assert_greedy(the_model(), PROMPTS[2], await running)

    asyncio.run(main())


# ---- processes


COUNTING = """
import asyncio, os, socket, sys
from etude.inference.http import Limits, Served, server_of
from etude.inference.policy import Completion, PolicyInfo, Token
from etude.inference.server import build_app

class Counting:  # writes how long the text is before each token, and as its version which process that was
    info = PolicyInfo("counting", 2000, 2000)
    statistics = staticmethod(lambda: {"version": 0})

    async def generate(self, prompt, sampling, session, on_tokens):
        tokens = []
        for place in range(len(prompt), len(prompt) + sampling.max_tokens):
            await asyncio.sleep(0.001)  # a model takes its time
            tokens.append(Token(place, -1.0, -1.0, os.getpid()))
            on_tokens(tokens[-1:])
        return Completion(tokens, "length")

    async def close(self):
        pass

limits = Limits(drain=0)
if os.path.exists(sys.argv[1]):
    os.unlink(sys.argv[1])
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
server_of(build_app(Served(Counting(), limits), {"id": "counting"}, frozenset()), limits).run(sockets=[listening])
"""


def test_a_request_survives_processes_that_are_killed_or_hang(tmp_path: Path, unix: str) -> None:
    child = Child("counter", [sys.executable, "-c", COUNTING, unix.removeprefix("unix:")], tmp_path / "log")
    harm = [signal.SIGKILL, signal.SIGSTOP]
    heard: list[Token] = []

    def listen(new: list[Token]) -> None:
        heard.extend(new)
        child.progressed()
        if harm and len({token.version for token in heard}) >= 3 - len(harm):
            os.kill(new[-1].version, harm.pop(0))

    async def main() -> None:
        policy = RemotePolicy(unix, 0, settings=OUTLIVING)
        running = asyncio.create_task(child.run())
        await asyncio.wait_for(policy.connect(), 120)
        watching = asyncio.create_task(policy.watch(3.0, child.kill))
        asking = asyncio.create_task(policy.generate([0], Sampling(1000), on_tokens=listen))
        await asyncio.wait([running, asking], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        assert asking.done(), (tmp_path / "log").read_text()
        assert asking.result().token_ids == list(range(1, 1001))
        assert asking.result().tokens == heard
        assert len({*asking.result().versions}) == 1 + child.deaths >= 3
        for task in (watching, running):
            task.cancel()
            await asyncio.wait([task])
        await policy.close()

    asyncio.run(main())
