"""The engine behind a thread: many callers at once, and whatever goes wrong is told to whom it concerns."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from etude.errors import UserError
from etude.inference.local import LocalPolicy
from etude.inference.policy import Completion, EngineStopped, Sampling, Token
from tests.inference.engines import (
    assert_all_returned,
    engine_of,
    greedy,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

GREEDY = Sampling(16, temperature=0)
LONG = Sampling(200, temperature=0)
PROMPTS = prompts_of(1, 8, 30, 33)


@lru_cache
def the_model() -> Any:
    return model_of(num_hidden_layers=1)


@lru_cache
def expected(index: int) -> list[int]:
    return greedy(the_model(), PROMPTS[index], 16)


@contextlib.asynccontextmanager
async def policy_of(**wish: Any) -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(engine_of(the_model(), page=16, **wish), "tiny")
    try:
        yield policy
    finally:
        await policy.close()


async def begun(policy: LocalPolicy, prompt: list[int], sampling: Sampling = LONG) -> asyncio.Task[Completion]:
    """Return a request of which the first token has come."""
    first = asyncio.Event()
    task = asyncio.create_task(policy.generate(prompt, sampling, on_tokens=lambda _: first.set()))
    await asyncio.wait([task, asyncio.create_task(first.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert first.is_set(), task
    return task


async def others_are_unharmed(policy: LocalPolicy) -> None:
    done = await asyncio.gather(*(policy.generate(prompt, GREEDY) for prompt in PROMPTS))
    assert [each.token_ids for each in done] == [expected(index) for index in range(len(PROMPTS))]


def test_many_callers_each_get_their_own_as_it_comes() -> None:
    async def main() -> None:
        async with policy_of(rows=3) as policy:
            streams: list[list[Token]] = [[] for _ in range(20)]
            calls = (policy.generate(PROMPTS[i % 4], GREEDY, on_tokens=streams[i].extend) for i in range(20))
            done = await asyncio.gather(*calls)
            assert [each.token_ids for each in done] == [expected(i % 4) for i in range(20)]
            assert [each.tokens for each in done] == streams  # all of it, in order, before the end
            counted = policy.statistics()
            assert (counted["finished"], counted["waiting"], counted["running"]) == (20, 0, 0)
            assert counted["written_tokens"] == 20 * 16
            assert (policy.info.name, policy.info.context, policy.info.vocabulary) == ("tiny", 256, 320)

    asyncio.run(main())


def test_a_cancelled_task_frees_its_place_and_harms_nobody() -> None:
    async def main() -> None:
        async with policy_of(rows=2) as policy:
            tasks = [await begun(policy, prompt) for prompt in PROMPTS[:2]]
            queued = asyncio.create_task(policy.generate(PROMPTS[2], LONG))
            await asyncio.sleep(0)
            for task in [*tasks, queued]:
                task.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*tasks, queued, return_exceptions=True)
            )
            await others_are_unharmed(policy)
            assert policy.statistics()["cancelled"] == 3
        assert_all_returned(policy.engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([], GREEDY), ([1] * 250, GREEDY), ([-1], GREEDY), ([1.5], GREEDY), ([1] * 64, GREEDY), ([1], Sampling(1, experts=True))],
)  # fmt: skip
def test_a_wrong_request_concerns_its_caller_alone(prompt: list[Any], sampling: Sampling) -> None:
    async def main() -> None:
        async with policy_of(pages=4) as policy:
            running = await begun(policy, PROMPTS[0], GREEDY)
            with pytest.raises(UserError) as refused:
                await policy.generate(prompt, sampling)
            assert "\n" not in str(refused.value)
            assert (await running).token_ids == expected(0)
            await others_are_unharmed(policy)

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1},
        {"stop": ("",)}, {"alternatives": 21},
    ],
)  # fmt: skip
def test_settings_that_contradict_themselves_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Sampling(**{"max_tokens": 4} | wrong)


def test_a_prompt_that_its_caller_changes_is_the_one_that_was_given() -> None:
    async def main() -> None:
        async with policy_of() as policy:
            prompt = list(PROMPTS[1])
            task = asyncio.create_task(policy.generate(prompt, GREEDY))
            await asyncio.sleep(0)
            prompt[:] = [10**6] * 300
            assert (await task).token_ids == expected(1)

    asyncio.run(main())


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def listen(_: list[Token]) -> None:
        raise ValueError("cannot listen")

    async def main() -> None:
        async with policy_of() as policy:
            assert (await policy.generate(PROMPTS[0], GREEDY, on_tokens=listen)).token_ids == expected(0)
            await others_are_unharmed(policy)

    asyncio.run(main())
    assert "cannot listen" in caplog.text


def test_new_weights_come_in_while_requests_run() -> None:
    async def main() -> None:
        async with policy_of() as policy:
            running = await begun(policy, PROMPTS[1])
            with pytest.raises(UserError, match="another model"):
                await policy.update({"nothing.weight": torch.zeros(1)}, 1)
            await policy.update(model_of(seed=1, num_hidden_layers=1).state_dict(), 1)
            versions = (await running).versions
            assert versions == sorted(versions)
            assert set(versions) <= {0, 1}
            assert (await policy.generate(PROMPTS[1], GREEDY)).versions == [1] * 16

    asyncio.run(main())


# ---- faults


def failing_after(policy: LocalPolicy, passes: int, error: Exception) -> None:
    """Make the model's head fail after so many passes."""
    left = iter(range(passes))

    def fail(*_: Any) -> None:
        if next(left, None) is None:
            raise error

    policy.engine.runner.model.get_output_embeddings().register_forward_pre_hook(fail)


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), StopIteration("of a kind futures refuse")])
@pytest.mark.parametrize("passes", [0, 1, 7])
def test_an_engine_that_breaks_tells_all_who_wait_and_all_who_come(passes: int, error: Exception) -> None:
    async def main() -> None:
        async with policy_of(rows=2) as policy:
            failing_after(policy, passes, error)
            calls = [policy.generate(prompt, LONG) for prompt in PROMPTS]
            for each in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60):
                assert isinstance(each, RuntimeError)
                assert "the engine has stopped" in str(each)
                assert each.__cause__ is error
            for late in (policy.generate(PROMPTS[0], GREEDY), policy.update({}, 1), policy.beat()):
                with pytest.raises(RuntimeError, match="the engine has stopped"):
                    await asyncio.wait_for(late, 60)

    asyncio.run(main())


@pytest.mark.parametrize("wait", [True, False], ids=["running", "just asked"])
def test_closing_ends_what_is_under_way(wait: bool) -> None:
    async def main() -> None:
        async with policy_of(rows=1) as policy:
            tasks = [await begun(policy, PROMPTS[0])] if wait else []
            tasks += [asyncio.create_task(policy.generate(prompt, LONG)) for prompt in PROMPTS]
            asking = asyncio.create_task(policy.update({}, 1))
            await asyncio.sleep(0)
            await policy.close()
            for each in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
                assert isinstance(each, RuntimeError)
                assert "the engine is closed" in str(each)
            await asyncio.wait_for(asyncio.wait([asking]), 60)
            for late in (policy.generate(PROMPTS[0], GREEDY), policy.update({}, 2), policy.beat()):
                with pytest.raises(RuntimeError, match="the engine is closed"):
                    await asyncio.wait_for(late, 60)
            await policy.close()

    asyncio.run(main())


@pytest.mark.parametrize("place", [0, 3])
def test_who_is_about_to_get_a_token_hears_that_the_engine_broke(place: int) -> None:
    class Broken:
        left = place

        def allowed(self) -> bytes:
            if self.left == 0:
                raise RuntimeError("out of masks")
            self.left -= 1
            return b"\xff" * 64

        def take(self, token: int) -> None:
            pass

    async def main() -> None:
        policy = LocalPolicy(engine_of(the_model(), page=16), "tiny")
        with pytest.raises(EngineStopped, match="out of masks"):
            await policy.generate(PROMPTS[0], Sampling(8, constraint=Broken))
        await policy.close()

    asyncio.run(main())


def test_a_caller_whose_loop_is_gone_is_forgotten() -> None:
    policy = LocalPolicy(engine_of(the_model(), page=16), "tiny")
    loop = asyncio.new_event_loop()
    task = loop.create_task(policy.generate(PROMPTS[0], GREEDY, on_tokens=lambda _: None))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task

    async def main() -> None:
        assert (await policy.generate(PROMPTS[1], LONG)).token_ids[:16] == expected(1)  # longer than the one forgotten
        gc.collect()
        both = [policy.generate(prompt, GREEDY) for prompt in PROMPTS[:2]]
        assert [each.token_ids for each in await asyncio.gather(*both)] == [expected(0), expected(1)]
        await policy.close()

    asyncio.run(main())
    assert_all_returned(policy.engine)


def test_a_model_that_gets_a_new_engine_does_not_keep_the_old_ones_cache() -> None:
    engine = engine_of(the_model(), page=16)
    model, cache = engine.runner.model, weakref.ref(engine.runner.cache)
    del engine
    gc.collect()
    assert cache() is None
    assert model is not None


def test_a_folder_is_opened_and_what_it_lacks_is_said(tiny_base: Path) -> None:
    with pytest.raises(UserError, match="has no MTP heads"):
        LocalPolicy.open(tiny_base, device="cpu", speculate=True)
    with pytest.raises(UserError, match="context = 2000: this model can be run with 1 to 1024 tokens"):
        LocalPolicy.open(tiny_base, device="cpu", context=2000)

    async def main(made: Callable[[], LocalPolicy]) -> Completion:
        policy = made()
        try:
            return await policy.generate([5, 6], Sampling(4, temperature=0, stop=("\0",)))
        finally:
            await policy.close()

    done = asyncio.run(main(lambda: LocalPolicy.open(tiny_base, device="cpu", context=64)))
    assert len(done.tokens) == 4
