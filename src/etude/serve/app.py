"""`etude serve`: OpenAI's routes beside the token API (inference/server.py), in one application over any policy."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from etude.inference.http import ApiError, Endpoint, Served, parse, running
from etude.inference.server import build_app as build_token_app
from etude.serve.openai_schema import ChatRequest, CompletionRequest
from etude.serve.replies import Answer, TokenTexts, Writer
from etude.serve.requests import Preparer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from etude.inference.http import Gate, Limits, Reply
    from etude.inference.policy import Completion, Policy
    from etude.inference.weight_sync import Receiver
    from etude.serve.process import ModelCard
    from etude.serve.requests import AnyRequest, Job


class OpenAiEndpoint(Endpoint):
    """Answers requests of one kind. `reading`: one thread, as tokenisers may not be used by two."""

    def __init__(
        self, served: Served, name: str, kind: type[AnyRequest], preparer: Preparer, model: str, texts: TokenTexts,
        reading: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        super().__init__(served, name)
        self.kind, self.preparer, self.model, self.texts, self.reading = kind, preparer, model, texts, reading

    async def answer(self, body: bytes, headers: dict[bytes, bytes], reply: Reply) -> None:  # noqa: ARG002 - as its base's
        job = await asyncio.get_running_loop().run_in_executor(self.reading, self._job, body)
        answer = Answer(job, self.model, self.texts)
        writers = [Writer(self.texts, sampling, job.reader()) for _, sampling in job.orders]
        completions = await (self._stream if job.request.stream else self._whole)(job, answer, writers, reply)
        self.served.count(job.prompt_tokens, completions)

    def _job(self, body: bytes) -> Job:
        """Return what is to be done. Runs in a thread: a long prompt takes long to cut into tokens."""
        request = parse(body, self.kind)
        if request.model not in {None, self.model}:
            message = f"there is no model {request.model!r} here, only {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.preparer.job(request)

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
    reading = ThreadPoolExecutor(1, "reading")
    shared = (Preparer(tokeniser, policy.info, ends, limits), card.id, TokenTexts(tokeniser), reading)
    chat = OpenAiEndpoint(served, "chat", ChatRequest, *shared)
    completions = OpenAiEndpoint(served, "completions", CompletionRequest, *shared)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    end = lambda: reading.shutdown(wait=False, cancel_futures=True)  # noqa: E731 - said in one line
    return build_token_app(served, card.as_dict(), ends, receiver, routes, end)
