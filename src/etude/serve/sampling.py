"""Completions under way: started together, cancelled together, read as they come, never more unread than agreed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from etude.inference.policy import Completion, Policy, Token
    from etude.serve.prepare import Job

Tasks = list["asyncio.Task[Completion]"]


class Inbox:
    """Tokens that came and were not yet taken, by completion. What waits is handed over in one piece."""

    def __init__(self, most: int, on_overflow: Callable[[], object]) -> None:
        self.most, self.on_overflow = most, on_overflow
        self.news = asyncio.Event()
        self.waiting: dict[int, list[Token]] = {}
        self.unread = 0

    def put(self, index: int, tokens: list[Token]) -> None:
        """Keep tokens; if that is too many, nobody is reading."""
        self.unread += len(tokens)
        if self.unread > self.most:
            self.waiting.clear()
            self.on_overflow()
            return
        self.waiting.setdefault(index, []).extend(tokens)
        self.news.set()

    def take(self, index: int) -> list[Token]:
        """Return the tokens of one completion that came since the last time."""
        tokens = self.waiting.pop(index, [])
        self.unread -= len(tokens)
        return tokens


@contextlib.asynccontextmanager
async def under_way(policy: Policy, job: Job, inbox: Inbox | None = None) -> AsyncIterator[Tasks]:
    """Start all completions of a job. Leaving cancels what still runs, and waits until the policy has let go of it."""
    tasks: Tasks = []
    for index, order in enumerate(job.orders):
        listen = (lambda tokens, index=index: inbox.put(index, tokens)) if inbox else None
        asked = policy.generate(order.prompt, order.sampling, session=job.session, on_tokens=listen)
        tasks.append(asyncio.create_task(asked))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def as_they_come(tasks: Tasks, inbox: Inbox) -> AsyncIterator[tuple[int, list[Token], Completion | None]]:
    """Yield which completion goes on, its new tokens, and all of it once it is done."""
    for task in tasks:
        task.add_done_callback(lambda _: inbox.news.set())
    left = dict(enumerate(tasks))
    while left:
        await inbox.news.wait()
        inbox.news.clear()
        for index, task in list(left.items()):
            done, tokens = task.done(), inbox.take(index)
            if done:
                del left[index]
            if done or tokens:
                yield index, tokens, task.result() if done else None
