"""The web application: which address answers what, and to whom.

One request from its first byte to its last: admitted, read, answered; or refused, cut off, given up.

A client that hangs up cancels its completions, streaming or not. One that does not read is cut off when too much waits for it.

What a Prometheus server reads at `/metrics`. Each app has its own registry, so that two in one process do not mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.inference.policy import Busy
from etude.serve.openai_schema import ApiError, ChatRequest, CompletionRequest, as_api_error, parse
from etude.serve.replies import Answer, TokenTexts, Writer
from etude.serve.requests import Inbox, Preparer, as_they_come, under_way

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from etude.inference.policy import Completion, Policy
    from etude.serve.openai_schema import Limits
    from etude.serve.process import ModelCard
    from etude.serve.requests import Job

LAST_WORDS = 2.0  # seconds to tell a client why its stream ends; it may not be listening
RETRY_AFTER = 2.0  # seconds after which a refused client may try again


class Reply:
    """The answer on the wire: one JSON object, or events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.status: int | None = None  # None: nothing was sent

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """Send all of it."""
        self.status = status
        await JSONResponse(value, status, headers)(self.scope, self.receive, self.send)

    async def event(self, data: dict[str, Any] | str | None, *, last: bool = False) -> None:
        """Send one event of a stream; None: nothing to tell."""
        if data is None:
            return
        if self.status is None:
            self.status = 200
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        await self.send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": not last})

    async def refuse(self, error: ApiError) -> None:
        """Say what went wrong, in whatever way is still possible."""
        if self.status is None:
            await self.json(error.status, error.body(), error.headers)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await self.event(error.body(), last=True)


class Endpoint:
    """Answers requests of one kind; an ASGI application."""

    def __init__(self, served: Served, name: str, kind: type[ChatRequest | CompletionRequest]) -> None:
        self.served, self.name, self.kind = served, name, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever comes."""
        started, reply, metrics = time.perf_counter(), Reply(scope, receive, send), self.served.metrics
        outcome = ""
        try:
            outcome = await self._admitted(scope, receive, reply)
        except asyncio.CancelledError:
            await reply.refuse(ApiError(503, "the server is shutting down"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the client hears of it and the others do not
            await reply.refuse(as_api_error(error))
        metrics.requests.labels(self.name, outcome or str(reply.status)).inc()
        metrics.seconds.labels(self.name).observe(time.perf_counter() - started)

    async def _admitted(self, scope: Scope, receive: Receive, reply: Reply) -> str:
        served, limits = self.served, self.served.limits
        try:
            served.gate.check(scope)
            if served.in_flight >= limits.max_queue:
                raise Busy(RETRY_AFTER)
        except (ApiError, Busy):
            await _read_body(receive, 0, limits.body_timeout)  # else the connection breaks before the answer is read
            raise
        served.in_flight += 1
        try:
            body = await _read_body(receive, limits.max_request_bytes, limits.body_timeout)
            return await _unless_it_hangs_up(receive, self._answer(body, reply))
        finally:
            served.in_flight -= 1

    async def _answer(self, body: bytes, reply: Reply) -> None:
        served, loop = self.served, asyncio.get_running_loop()
        async with asyncio.timeout(served.limits.timeout):
            job = await loop.run_in_executor(served.reading, self._job, body)
            answer = Answer(job, served.card.id, served.texts)
            writers = [Writer(served.texts, order.sampling, reads_calls=job.reads_calls) for order in job.orders]
            completions = await (self._stream if job.request.stream else self._whole)(job, answer, writers, reply)
        served.metrics.prompt_tokens.inc(job.prompt_tokens)
        served.metrics.completion_tokens.inc(sum(len(completion.tokens) for completion in completions))

    def _job(self, body: bytes) -> Job:
        """Return what is to be done. Runs in a thread: a long prompt takes long to cut into tokens."""
        request = parse(body, self.kind)
        if request.model not in {None, self.served.card.id}:
            told = f"there is no model {request.model!r} here, only {self.served.card.id!r}"
            raise ApiError(404, told, param="model", code="model_not_found")
        return self.served.preparer.job(request)

    async def _whole(self, job: Job, answer: Answer, writers: list[Writer], reply: Reply) -> list[Completion]:
        async with under_way(self.served.policy, job) as tasks:
            completions = await asyncio.gather(*tasks)
        pieces = [writer.write([], completion) for writer, completion in zip(writers, completions, strict=True)]
        await reply.json(200, answer.whole(pieces, completions))
        return completions

    async def _stream(self, job: Job, answer: Answer, writers: list[Writer], reply: Reply) -> list[Completion]:
        started, me, completions = time.perf_counter(), asyncio.current_task(), []
        assert me is not None
        inbox = Inbox(self.served.limits.max_unread, me.cancel)
        async with under_way(self.served.policy, job, inbox) as tasks:
            async for index, tokens, completion in as_they_come(tasks, inbox):
                if reply.status is None:
                    self.served.metrics.first_token.observe(time.perf_counter() - started)
                completions += [completion] if completion else []
                await reply.event(answer.chunk(index, writers[index].write(tokens, completion)))
        await reply.event(answer.last_chunk(completions))
        await reply.event("[DONE]", last=True)
        return completions


async def _read_body(receive: Receive, most: int, seconds: float) -> bytes:
    """Return the body. One that is too large is read to its end and dropped: a client hears nothing while it still sends."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client hung up")
                size += len(message.get("body", b""))
                body += message.get("body", b"") if size <= most else b""
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise ApiError(408, f"the request was not sent within {seconds:.0f} s") from None
    if size > most > 0:
        raise ApiError(413, f"the request has {size:,} bytes; at most {most:,} are read here")
    return bytes(body)


async def _unless_it_hangs_up(receive: Receive, work: Awaitable[None]) -> str:
    """Do the work, but drop it when the client goes. Return why it was dropped, if it was."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return "hung up"
        if working.cancelled():  # nobody but its own inbox cancels it
            return "did not read"
        working.result()
        return ""
    finally:
        for each in (working, gone):
            each.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineCollector(Collector):
    """What the engine itself counts, asked when somebody reads the page."""

    def __init__(self, statistics: Callable[[], Mapping[str, int]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a figure for each."""
        for name, value in self._statistics().items():
            yield GaugeMetricFamily(f"etude_engine_{name}", f"The engine's {name.replace('_', ' ')}.", value)


class Metrics:
    """Counts of one app; of its engine too, if it has one that counts."""

    def __init__(
        self, in_flight: Callable[[], float], statistics: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        if statistics:
            self.registry.register(EngineCollector(statistics))
        labels = ("endpoint", "outcome")  # a status, or why there was none
        self.requests = Counter("etude_requests", "Requests that ended.", labels, registry=self.registry)
        self.prompt_tokens = Counter("etude_prompt_tokens", "Tokens of prompts answered.", registry=self.registry)
        self.completion_tokens = Counter("etude_completion_tokens", "Tokens sampled.", registry=self.registry)
        running = Gauge("etude_requests_in_flight", "Requests admitted and not ended.", registry=self.registry)
        running.set_function(in_flight)
        about = ("etude_request_seconds", "Time from a request's headers to its end.", ("endpoint",))
        self.seconds = Histogram(*about, registry=self.registry, buckets=SECONDS)
        first = ("etude_first_token_seconds", "Time to a stream's first token.")
        self.first_token = Histogram(*first, registry=self.registry, buckets=SECONDS)

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class Gate:
    """Who may come in. Without a token only the names of this machine are answered, or a web page could call us by its own."""

    token: bytes | None = field(default=None, repr=False)
    hosts: frozenset[str] | None = None  # None: any

    def check(self, scope: Scope) -> None:
        """Raise unless the request may come in."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if self.token is not None and not hmac.compare_digest(given, b"Bearer " + self.token):
            raise ApiError(401, "wrong or missing token; send Authorization: Bearer TOKEN", code="invalid_api_key")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self.hosts is not None and name not in self.hosts:
            raise ApiError(403, f"this server does not go by the name {host[:80]!r}; call it at 127.0.0.1 or localhost")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # which no web page may send elsewhere unasked
            raise ApiError(415, "send the request as Content-Type: application/json")


class Served:
    """What all requests of one app share."""

    def __init__(self, policy: Policy, tokeniser: Any, card: ModelCard, limits: Limits, gate: Gate) -> None:
        self.policy, self.card, self.limits, self.gate = policy, card, limits, gate
        ends = card.stop_tokens | ({tokeniser.eos_token_id} - {None})
        self.preparer = Preparer(tokeniser, policy.info, frozenset(ends), limits)
        self.texts = TokenTexts(tokeniser)
        self.metrics = Metrics(lambda: self.in_flight, getattr(policy, "statistics", None))
        self.in_flight = 0
        self.reading = ThreadPoolExecutor(1, "reading")  # one thread, as tokenisers may not be used by two


def build_app(policy: Policy, tokeniser: Any, card: ModelCard, limits: Limits, gate: Gate | None = None) -> Starlette:
    """Return the application. Its end closes the policy."""
    served = Served(policy, tokeniser, card, limits, gate or Gate())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            served.reading.shutdown(wait=False, cancel_futures=True)
            await policy.close()

    def route(path: str, answer: Callable[[Request], Response]) -> Route:
        async def guarded(request: Request) -> Response:
            served.gate.check(request.scope)
            return answer(request)

        return Route(path, guarded)

    def model(request: Request) -> Response:
        if request.path_params["name"] != card.id:
            raise ApiError(404, f"there is no such model here, only {card.id!r}", code="model_not_found")
        return JSONResponse(told)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "model": card.id, "in_flight": served.in_flight})

    told = card.told(served.preparer.context)
    routes = [
        Route("/v1/chat/completions", Endpoint(served, "chat", ChatRequest), methods=["POST"]),
        Route("/v1/completions", Endpoint(served, "completions", CompletionRequest), methods=["POST"]),
        route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [told]})),
        route("/v1/models/{name:path}", model),
        route("/metrics", lambda _: Response(served.metrics.text(), media_type="text/plain; version=0.0.4")),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: _refusal, HTTPException: _refusal})


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | HTTPException)
    if isinstance(error, ApiError):
        return JSONResponse(error.body(), error.status, error.headers)
    told = f"{error.detail}; this server has /v1/chat/completions, /v1/completions and /v1/models"
    return JSONResponse(ApiError(error.status_code, told).body(), error.status_code, error.headers)
