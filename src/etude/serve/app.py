"""`etude serve`: OpenAI's routes beside the token API (inference/server.py), in one application over any policy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from starlette.routing import Route

from etude.inference.http import ApiError, Endpoint, Served, parse, running
from etude.inference.server import build_app as build_token_app
from etude.serve.openai_schema import ChatRequest, CompletionRequest
from etude.serve.replies import Answer, TokenTexts, Writer
from etude.serve.requests import Preparer

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

    from etude.inference.http import Gate, Limits, Reply
    from etude.inference.policy import Completion, Policy
    from etude.inference.weight_sync import Receiver
    from etude.serve.process import ModelCard
    from etude.serve.requests import AnyRequest, Job


LONG = 1 << 16  # bytes of a request that waits with others of its kind, so that short ones do not wait for it


class Reading:
    """Where texts become tokens: a thread for short requests and one for long ones, in which each client has one at a time.

    Each thread has a tokeniser of its own, as they may not be used by two.
    """

    def __init__(self, tokeniser: Any, *given: Any) -> None:
        self.lanes = [
            (ThreadPoolExecutor(1, "reading"), Preparer(each, *given)) for each in (tokeniser, copy.deepcopy(tokeniser))
        ]
        self.turns: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()  # by client's address

    async def job(self, read: Callable[[Preparer], Job], size: int, client: tuple[str, int] | None) -> Job:
        thread, preparer = self.lanes[size > LONG]
        address = client[0] if client and size > LONG else None
        turn = self.turns.setdefault(address, asyncio.Lock()) if address else contextlib.nullcontext()
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(thread, read, preparer)

    def close(self) -> None:
        for thread, _ in self.lanes:
            thread.shutdown(wait=False, cancel_futures=True)


class OpenAiEndpoint(Endpoint):
    """Answers requests of one kind."""

    def __init__(
        self, served: Served, name: str, kind: type[AnyRequest], model: str, texts: TokenTexts, reading: Reading
    ) -> None:
        super().__init__(served, name)
        self.kind, self.model, self.texts, self.reading = kind, model, texts, reading

    async def answer(self, body: bytes, headers: dict[bytes, bytes], reply: Reply) -> None:  # noqa: ARG002 - as its base's
        job = await self.reading.job(partial(self._job, body), len(body), reply.scope.get("client"))
        answer = Answer(job, self.model, self.texts)
        writers = [Writer(self.texts, sampling, job.reader()) for _, sampling in job.orders]
        completions = await (self._stream if job.request.stream else self._whole)(job, answer, writers, reply)
        self.served.count(job.prompt_tokens, completions)

    def _job(self, body: bytes, preparer: Preparer) -> Job:
        """Return what is to be done. Runs in a thread: a long prompt takes long to cut into tokens."""
        request = parse(body, self.kind)
        if request.model not in {None, self.model}:
            message = f"there is no model {request.model!r} here, only {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return preparer.job(request)

    async def _whole(self, job: Job, answer: Answer, writers: list[Writer], reply: Reply) -> list[Completion]:
        async with running(self.served.policy, job.orders, job.session) as tasks:
            completions = await asyncio.gather(*tasks)
        pieces = [writer.write([], completion) for writer, completion in zip(writers, completions, strict=True)]
        await reply.json(200, answer.whole(pieces, completions))
        return completions

    async def _stream(self, job: Job, answer: Answer, writers: list[Writer], reply: Reply) -> list[Completion]:
        inbox, completions = self.served.inbox(), []
        async with running(self.served.policy, job.orders, job.session, inbox) as tasks:
            async for index, tokens, completion in self.served.as_they_come(tasks, inbox):
                completions += [completion] if completion else []
                await reply.event(answer.chunk(index, writers[index].write(tokens, completion)))
        await reply.event(answer.last_chunk(completions), b"[DONE]", last=True)
        return completions


def build_app(
    policy: Policy, tokeniser: Any, card: ModelCard, limits: Limits, gate: Gate | None = None, receiver: Receiver | None = None
) -> Starlette:  # fmt: skip
    """Return the application. Its end closes the policy."""
    served = Served(policy, limits, gate)
    ends = frozenset(card.stop_tokens | ({tokeniser.eos_token_id} - {None}))
    reading = Reading(tokeniser, policy.info, ends, limits)
    shared = (card.id, TokenTexts(tokeniser), reading)
    chat = OpenAiEndpoint(served, "chat", ChatRequest, *shared)
    completions = OpenAiEndpoint(served, "completions", CompletionRequest, *shared)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return build_token_app(served, card.as_dict(), ends, receiver, routes, reading.close)
