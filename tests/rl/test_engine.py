"""The engine follows the weights while it writes, and a request outlives an engine that is killed or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.errors import UserError
from etude.inference.client import OUTLIVING, RemotePolicy
from etude.inference.local import LocalPolicy
from etude.inference.policy import Completion, Sampling, Token
from etude.inference.weight_sync import Receiver, WeightStore
from etude.rl.engine import Follower, own_socket, serve
from etude.rl.processes import Child, RlJob
from etude.rl.settings import RlSettings
from tests import tiny
from tests.inference.engines import (
    assert_greedy,
    engine_of,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
)

GREEDY = Sampling(16, temperature=0)
LONG = Sampling(400, temperature=0)
PROMPT = prompts_of(60)[0]


@lru_cache
def model_at(version: int) -> Any:
    return model_of(seed=version, num_hidden_layers=1)


def publish(store: WeightStore, *versions: int) -> None:
    for version in versions:
        store.publish(model_at(version).state_dict(), version, version)


def spoil(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextlib.asynccontextmanager
async def policy_of() -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(engine_of(model_at(0), page=16, context=500), "tiny")
    try:
        yield policy
    finally:
        await policy.close()


def following(policy: LocalPolicy, store: WeightStore, say: Callable[[str], None] = lambda _: None) -> Follower:
    return Follower(store, Receiver(policy, store, say).update, say)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def by_hand(prompt: list[int], versions: list[int]) -> tuple[list[int], list[float]]:
    """Write greedily on transformers' own cache, each token with the weights of its version; nothing is computed twice."""
    cache, tokens, written, logprobs = None, prompt, list[int](), list[float]()
    for version in versions:
        out = model_at(version)(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].log_softmax(-1).max(-1)
        cache, tokens = out.past_key_values, [int(best.indices)]
        written += tokens
        logprobs.append(float(best.values))
    return written, logprobs


def test_new_weights_come_into_a_request_that_runs(tmp_path: Path) -> None:
    """Tokens say which weights wrote them, and are what those write on the cache as it was."""

    async def main() -> Completion:
        store = WeightStore(tmp_path, 4)
        async with policy_of() as policy:
            follower, first = following(policy, store), asyncio.Event()
            running = asyncio.create_task(policy.generate(PROMPT, LONG, on_tokens=lambda _: first.set()))
            await first.wait()
            publish(store, 1)
            await follower.step()
            (swap,) = follower.swaps()
            assert (swap.version, swap.bytes) == (1, (tmp_path / "00000001.anchor").stat().st_size)
            assert 0 < swap.paused < swap.seconds
            return await running

    done = asyncio.run(main())
    assert done.versions == [0] * done.versions.count(0) + [1] * done.versions.count(1)
    assert min(done.versions.count(version) for version in (0, 1)) > 0
    written, logprobs = by_hand(PROMPT, done.versions)
    assert done.token_ids == written
    assert done.raw_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_a_prompt_that_old_weights_read_is_read_again_by_new_ones(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path, 4)
        async with policy_of() as policy:
            follower = following(policy, store)
            for version in (0, 1, 2):
                if version:
                    publish(store, version)
                    await follower.step()
                first, second = [await policy.generate(PROMPT, GREEDY, session="one") for _ in range(2)]
                assert (first.cached, second.cached > 0) == (0, True)
                for done in (first, second):
                    assert_greedy(model_at(version), PROMPT, done)
                    assert set(done.versions) == {version}

    asyncio.run(main())


def test_an_engine_that_was_started_again_is_ahead_of_who_asks_for_an_older_version(tmp_path: Path) -> None:
    """It takes the newest version by itself while the orchestrator still asks for the one before."""

    async def main() -> None:
        store = WeightStore(tmp_path, 4)
        publish(store, 1, 2, 3)
        async with policy_of() as policy:
            receiver = Receiver(policy, store)
            await receiver.update(3)
            assert (await receiver.update(2)).version == 3
            assert set((await policy.generate(PROMPT, GREEDY)).versions) == {3}

    asyncio.run(main())


def test_who_joins_late_goes_straight_to_the_newest(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path, 2)
        publish(store, 1, 2, 3, 4)
        async with policy_of() as policy:
            follower = following(policy, WeightStore(tmp_path, 2))
            running = asyncio.create_task(follower.run())
            for version in (4, 5):
                if version == 5:
                    publish(store, 5)
                while follower.version < version:
                    await asyncio.sleep(0.01)
            assert [swap.version for swap in follower.swaps()] == [4, 5]
            assert_greedy(model_at(5), PROMPT, await policy.generate(PROMPT, GREEDY))
            running.cancel()

    asyncio.run(main())


def test_a_broken_delta_is_passed_over_and_a_broken_anchor_waited_out(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        store = WeightStore(tmp_path, 2)
        publish(store, 1)
        async with policy_of() as policy:
            follower = following(policy, WeightStore(tmp_path, 2), said.append)
            await follower.step()
            publish(store, 2, 3)
            spoil(tmp_path / "00000003-00000002.delta")
            spoil(tmp_path / "00000003.anchor")
            for _ in range(3):
                await follower.step()  # no way there
            assert (follower.version, len(said)) == (1, 1)
            assert "no way to version 3" in said[0]
            assert (await policy.generate(PROMPT, GREEDY)).versions == [1] * 16
            publish(store, 4)
            await follower.step()
            assert follower.version == 4
            assert_greedy(model_at(4), PROMPT, await policy.generate(PROMPT, GREEDY))
            near = copy.deepcopy(model_at(4)).state_dict()
            for version in (5, 6):  # so little changes that the deltas are the shorter way
                near["model.norm.weight"][version] += 1
                store.publish(near, version, version)
            spoil(tmp_path / "00000005-00000004.delta")
            await follower.step()
            assert follower.version == 6
            assert "passed over: 00000005-00000004.delta" in said[-1]
            assert torch.equal(policy.engine.runner.model.model.norm.weight, near["model.norm.weight"])

    asyncio.run(main())


def test_weights_that_are_not_numbers_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path, 2)
        weights = {name: tensor.clone() for name, tensor in model_at(1).state_dict().items()}
        weights["model.norm.weight"][3] = float("nan")
        store.publish(weights, 1, 1)
        async with policy_of() as policy:
            with pytest.raises(UserError, match=r"model.norm.weight holds values that are not finite"):
                await following(policy, store).step()
            assert_greedy(model_at(0), PROMPT, await policy.generate(PROMPT, GREEDY))

    asyncio.run(main())


def test_weights_for_an_engine_that_is_dead_raise_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        store = WeightStore(tmp_path, 2)
        async with policy_of() as policy:
            running = asyncio.create_task(following(policy, store).run())
            await policy.close()
            publish(store, 1)
            with pytest.raises(RuntimeError, match="the engine is closed"):
                await asyncio.wait_for(running, 60)

    asyncio.run(main())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_weights_wait_on_the_device_for_their_turn(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    new = {name: tensor + 0.01 for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}

    async def main() -> None:
        policy = LocalPolicy.open(folder, device="cuda", memory=1 << 26)
        store = WeightStore(tmp_path / "store", 2)
        store.publish(new, 1, 1)
        try:
            running = asyncio.create_task(policy.generate(PROMPT, LONG))
            await following(policy, store).step()
            own = policy.engine.runner.model.state_dict()
            torch.cuda.synchronize()
            assert all(torch.equal(own[name].cpu(), tensor.to(own[name].dtype)) for name, tensor in new.items())
            await running
        finally:
            await policy.close()

    asyncio.run(main())


# ---- the process


@pytest.fixture
def socket() -> Iterator[Path]:
    """A name for a socket that is short enough."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "s"


def test_a_request_survives_an_engine_that_is_killed(tiny_base: Path, tmp_path: Path, socket: Path) -> None:
    """The next engine goes on with it, on the newest weights; nothing that was told is lost, told twice or changed."""
    model, store = AutoModelForCausalLM.from_pretrained(tiny_base), WeightStore(tmp_path / "weights", 4)
    job = RlJob(tiny_base, tmp_path, socket, RlSettings(tasks="none", device="cpu", engine_memory=0.05), seed=0).save()
    child = Child("engine", [sys.executable, "-m", "etude.rl.engine", str(job)], tmp_path / "engine.log")
    streamed: list[Token] = []

    def listen(new: list[Token]) -> None:
        if not streamed:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            store.publish(model.state_dict(), 1, 1)  # the same weights: only the version tells
        streamed.extend(new)

    async def main() -> Completion:
        policy = RemotePolicy(f"unix:{socket}", 0, settings=OUTLIVING)
        running = asyncio.create_task(child.run())
        await asyncio.wait(
            [running, connecting := asyncio.create_task(policy.connect())], return_when=asyncio.FIRST_COMPLETED
        )
        assert connecting.done(), (tmp_path / "engine.log").read_text()
        follower = Follower(WeightStore(tmp_path / "weights", 4), policy.update_weights)
        weights = asyncio.create_task(follower.run())
        asking = asyncio.create_task(policy.generate(PROMPT, Sampling(900, temperature=0), on_tokens=listen))
        await asyncio.wait([running, asking], return_when=asyncio.FIRST_COMPLETED, timeout=400)
        assert asking.done(), (tmp_path / "engine.log").read_text()
        assert (follower.version, [swap.version for swap in follower.swaps()]) == (1, [1])
        for task in (weights, running):
            task.cancel()
            await asyncio.wait([task])
        await policy.close()
        return asking.result()

    done = asyncio.run(main())
    assert child.deaths == 1
    assert done.tokens == streamed
    assert done.versions == [0] * done.versions.count(0) + [1] * done.versions.count(1)
    assert {*done.versions} == {0, 1}
    assert_greedy(model, PROMPT, done)


def test_an_engine_that_cannot_begin_says_why(tmp_path: Path, socket: Path) -> None:
    job = RlJob(tmp_path / "nothing", tmp_path, socket, RlSettings(tasks="none", device="cpu"), seed=0)
    with pytest.raises(UserError, match="nothing"):
        asyncio.run(serve(job, print, own_socket(job.socket)))
