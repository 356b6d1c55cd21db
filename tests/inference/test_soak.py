"""Thousands of short requests, many cancelled: afterwards everything is as it was."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from typing import Any

import psutil
import torch

from etude.inference.local import LocalPolicy
from etude.inference.policy import Sampling
from tests.inference.engines import (
    assert_all_returned,
    engine_of,
    greedy,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
)

Written = dict[tuple[int, int], set[tuple[int, ...]]]  # what was written after a prompt, by its number and budget
REQUESTS, AT_ONCE = 5000, 64
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64}
PROMPTS = prompts_of(*range(1, 25), vocabulary=64)


async def one(policy: LocalPolicy, chance: random.Random, got: Written) -> None:
    which, most = chance.randrange(len(PROMPTS)), chance.randint(1, 6)
    session = chance.choice([None, "a", "b"])
    task = asyncio.create_task(policy.generate(PROMPTS[which], Sampling(most, temperature=0), session=session))
    if chance.random() < 0.3:
        for _ in range(chance.randint(1, 6)):
            await asyncio.sleep(0)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        got.setdefault((which, most), set()).add(tuple((await task).token_ids))


async def many(policy: LocalPolicy, count: int, seed: int) -> Written:
    got: Written = {}
    chance, left = random.Random(seed), iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one(policy, chance, got)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await policy.beat()  # an answer to this means that all asked before was read
    return got


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_after_thousands_of_requests_nothing_is_left_behind() -> None:
    model = model_of(**SMALL)
    policy = LocalPolicy(engine_of(model, rows=16, page=8, pages=40, chunk=64, context=64), "soak")

    async def main() -> None:
        await many(policy, REQUESTS // 5, seed=0)
        process, before = psutil.Process(), tensors()
        memory = process.memory_info().rss
        got = await many(policy, REQUESTS, seed=1)
        assert tensors() == before
        assert process.memory_info().rss - memory < 24 * 2**20
        counted = policy.statistics()
        assert counted["submitted"] == counted["finished"] + counted["cancelled"] == REQUESTS + REQUESTS // 5
        assert min(counted["finished"], counted["cancelled"] * 10, counted["evicted_pages"]) > REQUESTS // 2
        for (which, most), texts in got.items():
            assert texts == {tuple(longest[which][:most])}
        await policy.close()
        assert (
            len(policy.engine.prefix_cache._loose) < 10 * policy.engine.prefix_cache.count
        )  # what may be evicted, without old notes

    longest = [greedy(model, prompt, 6) for prompt in PROMPTS]
    asyncio.run(main())
    assert_all_returned(policy.engine)
