"""Serving over HTTP, whatever is served: who may come in, how a request is read, and how a reply, whole or streamed, is sent.

An `Endpoint` takes one request from its first byte to its last: admitted, read, answered; or refused, cut off, given up. A client
that hangs up cancels its completions, streaming or not. One that does not read is cut off when too much waits for it. Tokens that
arrive together leave in one event.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import ipaddress
import logging
import math
import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.errors import UserError, nearest, one_line
from etude.inference.policy import Busy, EngineStopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from etude.inference.policy import Completion, Policy, Sampling, Token

LAST_WORDS = 2.0  # seconds to say why a stream ends; the client may not be listening
RETRY_AFTER = 2.0  # seconds after which a refused client may try again
UNREAD = 30_000  # milliseconds that the network may fail to take what we send before the connection is dropped
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PIECE = 1 << 14  # bytes of a connection that are read at once
MOST_LINES = 20_000  # in a request that comes in chunks, two for each
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
log = logging.getLogger("etude.serve")


class Limits(BaseModel, extra="forbid", strict=True, frozen=True):
    """Bounds on memory and time. Each request holds at most its body, its unread tokens and the socket's buffer."""

    max_queue: int = Field(default=256, ge=1, description="limit of requests, running and queued; more get a 429")
    max_request_bytes: int = Field(default=4 << 20, ge=1, description="size limit of a request's body in bytes")
    timeout: float = Field(default=600.0, gt=0, description="time limit of a request in seconds, queueing included")
    body_timeout: float = Field(default=30.0, gt=0, description="seconds for a client to send its request")
    max_choices: int = Field(default=64, ge=1, description="limit of completions in one request: prompts times n")
    max_unread: int = Field(default=8192, ge=1, description="tokens buffered for a slow client; beyond, it is cut off")
    context: int | None = Field(default=None, ge=2, description="tokens of prompt and completion; none: the model's")
    header_timeout: float = Field(
        default=10.0, gt=0, description="seconds to the headers of a connection's next request"
    )
    max_connections: int = Field(default=2048, ge=1, description="limit of connections; beyond, idle ones are closed")
    max_client_connections: int = Field(default=512, ge=1, description="the same of one client's address")
    drain: int = Field(default=30, ge=0, description="seconds for running requests to finish after SIGTERM")


# ---- errors, as clients of OpenAI and vLLM expect them


class ApiError(Exception):
    """A request that is not answered, and why: a status and `{"error": {…}}`."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Any = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """Return the error as a client sees it. The details of an unforeseen one go to the log alone."""
    match error:
        case ApiError():
            return error
        case UserError():
            return ApiError(400, str(error))
        case Busy():
            after = {"retry-after": str(max(1, math.ceil(error.after)))}
            return ApiError(429, str(error), code="queue_full", headers=after)
        case TimeoutError():
            return ApiError(504, "the request took longer than this server allows; ask for less", code="timeout")
        case EngineStopped():
            return ApiError(503, str(error))
        case HTTPException():
            paths = "/v1/chat/completions, /v1/completions, /v1/models and /inference/v1/generate"
            return ApiError(error.status_code, f"{error.detail}; this server has {paths}", headers=error.headers)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why")


# ---- request bodies

HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"}
NEUTRAL: dict[str, list[Any]] = {  # fields that are not supported, and the values with which they change nothing
    "audio": [], "best_of": [1], "detokenize": [True, False], "echo": [False], "frequency_penalty": [0],
    "function_call": ["none"], "functions": [[]], "ignore_eos": [False], "logit_bias": [{}], "min_p": [0], "min_tokens": [0],
    "modalities": [["text"]], "output_mode": ["tokens"], "parallel_tool_calls": [True], "prediction": [],
    "presence_penalty": [0], "priority": [0], "repetition_penalty": [1], "response_format": [{"type": "text"}],
    "skip_special_tokens": [True, False], "spaces_between_special_tokens": [True, False], "suffix": [""],
    "verbosity": [], "web_search_options": [],
}  # fmt: skip
ECHOED = {"annotations", "provider_specific_fields"}  # parts of a reply that a client sends back in the conversation


class Wire(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A JSON object of a request. A null is the same as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and key not in ECHOED}


Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class StreamOptions(Wire):
    """What else a stream returns."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


AnyWire = TypeVar("AnyWire", bound=BaseModel)


def parse(body: bytes, kind: type[AnyWire]) -> AnyWire:
    """Return a checked request, or say what is wrong with it and where.

    What would change the reply and is not understood here is refused by name; what changes nothing is accepted.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {one_line(error)}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is JSON, but not an object")
    asked = supported(given, kind)
    for key in asked.keys() - kind.model_fields.keys():
        advice = "leave it out" if key in NEUTRAL else f"no such field{nearest(key, kind.model_fields)}"
        raise ApiError(400, f"{key[:80]!r} is not supported by this server: {advice}", param=key[:80])
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{where}: {said}" if where else said, param=where or None) from None


def supported(given: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the fields that ask for something: those unknown to `kind` that change nothing are left out."""
    return {
        key: value for key, value in given.items()
        if key in kind.model_fields or not (value is None or key in HARMLESS or value in NEUTRAL.get(key, []))
    }  # fmt: skip


async def read_body(receive: Receive, most: int, seconds: float, unfinished: dict[asyncio.Timeout, None]) -> bytes:
    """Return the body. One that is too large is read to its end and dropped: a client hears nothing while it still sends.

    While it is read, its timeout is in `unfinished`, the oldest first, for others to let it end at once.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds) as ending:
            unfinished[ending] = None
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client hung up")
                size += len(message.get("body", b""))
                body += message.get("body", b"") if size <= most else b""
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise ApiError(408, f"the request was not sent within {seconds:.0f} s, or while others waited") from None
    finally:
        unfinished.pop(ending, None)
    if size > most > 0:
        raise ApiError(413, f"the request has {size:,} bytes; at most {most:,} are read here")
    return bytes(body)


# ---- replies


class Reply:
    """The reply on the wire: one JSON object, or server-sent events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.status: int | None = None  # None: nothing was sent

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self.status = status
        typed = {"content-type": "application/json", **(headers or {})}
        await Response(to_json(value), status, typed)(self.scope, self.receive, self.send)

    async def event(self, *data: dict[str, Any] | bytes | None, last: bool = False) -> None:
        """Send events of a stream in one piece; None: nothing to send."""
        texts = [each if isinstance(each, bytes) else to_json(each) for each in data if each is not None]
        if not texts:
            return
        if self.status is None:
            self.status = 200
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(b"data: " + text + b"\n\n" for text in texts)
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})

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

    def __init__(self, served: Served, name: str) -> None:
        self.served, self.name = served, name

    async def answer(self, body: bytes, headers: dict[bytes, bytes], reply: Reply) -> None:
        """Answer an admitted request."""
        raise NotImplementedError

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
                oldest = next((each for each in served.unfinished if not each.expired()), None)
                if oldest is None:
                    raise Busy(RETRY_AFTER)
                del served.unfinished[oldest]
                oldest.reschedule(0)  # who sends slowly keeps nobody out
        except (ApiError, Busy):
            await read_body(receive, 0, limits.body_timeout, {})  # else the connection breaks before the reply is read
            raise
        served.in_flight += 1
        try:
            body = await read_body(receive, limits.max_request_bytes, limits.body_timeout, served.unfinished)
            answering = asyncio.wait_for(self.answer(body, dict(scope["headers"]), reply), limits.timeout)
            return await _unless_it_hangs_up(receive, answering)
        finally:
            served.in_flight -= 1


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


# ---- completions that run: started together, cancelled together, read as they come, never more unread than agreed

Tasks = list["asyncio.Task[Completion]"]
Order = tuple[list[int], "Sampling"]  # a prompt, and how to sample after it


class Inbox:
    """Tokens that came and were not yet taken, by completion. What waits is handed over in one piece."""

    def __init__(self, most: int, on_overflow: Callable[[], object]) -> None:
        self.most, self.on_overflow = most, on_overflow
        self.news = asyncio.Event()
        self.waiting: dict[int, list[Token]] = {}
        self.unread = 0

    def put(self, index: int, tokens: list[Token]) -> None:
        """Buffer tokens; if they are too many, nobody is reading."""
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
async def running(
    policy: Policy, orders: Sequence[Order], session: str | None, inbox: Inbox | None = None
) -> AsyncIterator[Tasks]:
    """Start completions. Leaving cancels what still runs, and waits until the policy has let go of it."""
    tasks: Tasks = []
    for index, (prompt, sampling) in enumerate(orders):
        listen = (lambda tokens, index=index: inbox.put(index, tokens)) if inbox else None
        tasks.append(asyncio.create_task(policy.generate(prompt, sampling, session=session, on_tokens=listen)))
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Served:
    """What all requests of one app share."""

    def __init__(self, policy: Policy, limits: Limits, gate: Gate | None = None) -> None:
        self.policy, self.limits, self.gate = policy, limits, gate or Gate()
        self.metrics = Metrics(lambda: self.in_flight, getattr(policy, "statistics", dict))
        self.in_flight = 0
        self.unfinished: dict[asyncio.Timeout, None] = {}  # requests in flight that are not wholly sent

    def inbox(self) -> Inbox:
        """Return where the tokens of the current task's stream wait; if too many do, the task is cancelled."""
        me = asyncio.current_task()
        assert me is not None
        return Inbox(self.limits.max_unread, me.cancel)

    async def as_they_come(
        self, tasks: Tasks, inbox: Inbox
    ) -> AsyncIterator[tuple[int, list[Token], Completion | None]]:
        """Yield which completion goes on, its new tokens, and all of it once it is done."""
        started, left = time.perf_counter(), dict(enumerate(tasks))
        for task in tasks:
            task.add_done_callback(lambda _: inbox.news.set())
        while left:
            await inbox.news.wait()
            inbox.news.clear()
            if len(left) == len(tasks) and started:
                self.metrics.first_token.observe(time.perf_counter() - started)
                started = 0.0
            for index, task in list(left.items()):
                done, tokens = task.done(), inbox.take(index)
                if done:
                    del left[index]
                if done or tokens:
                    yield index, tokens, task.result() if done else None

    def count(self, prompt_tokens: int, completions: Sequence[Completion]) -> None:
        self.metrics.prompt_tokens.inc(prompt_tokens)
        self.metrics.completion_tokens.inc(sum(len(completion.tokens) for completion in completions))

    def route(self, path: str, handle: Callable[[Request], Any], method: str = "GET") -> Route:
        """Return a route that answers, at once or awaited, with JSON or a response of its own, to those who may come in."""

        async def guarded(request: Request) -> Response:
            try:
                self.gate.check(request.scope)
                value = handle(request)
                value = await value if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001 - as an endpoint's
                return as_api_error(error).response()
            return value if isinstance(value, Response) else JSONResponse(value)

        return Route(path, guarded, methods=[method])

    def app(self, routes: Sequence[Route], on_end: Callable[[], Awaitable[None]]) -> Starlette:
        """Return the application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await on_end()

        async def refuse(_: Request, error: Exception) -> Response:
            return as_api_error(error).response()

        page = lambda _: Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")  # noqa: E731
        every = [*routes, self.route("/metrics", page)]
        return Starlette(routes=every, lifespan=lifespan, exception_handlers={HTTPException: refuse})


class Metrics(Collector):
    """What a Prometheus server reads at `/metrics`. Each app has its own registry, so that two in one process do not mix.

    What the engine itself counts, its `statistics`, is asked when somebody reads the page.
    """

    def __init__(self, in_flight: Callable[[], float], statistics: Callable[[], Mapping[str, int]] = dict) -> None:
        self.registry, self.statistics = CollectorRegistry(), statistics
        (own := self.registry).register(self)
        labels = ("endpoint", "outcome")  # a status, or why there was none
        self.requests = Counter("etude_requests", "Requests that ended.", labels, registry=own)
        self.prompt_tokens = Counter("etude_prompt_tokens", "Tokens of prompts answered.", registry=own)
        self.completion_tokens = Counter("etude_completion_tokens", "Tokens sampled.", registry=own)
        running = Gauge("etude_requests_in_flight", "Requests admitted and not ended.", registry=own)
        running.set_function(in_flight)
        about = ("etude_request_seconds", "Time from a request's headers to its end.", ("endpoint",))
        self.seconds = Histogram(*about, registry=own, buckets=SECONDS)
        first = ("etude_first_token_seconds", "Time to a stream's first token.")
        self.first_token = Histogram(*first, registry=own, buckets=SECONDS)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self.statistics().items():
            yield GaugeMetricFamily(f"etude_engine_{name}", f"The engine's {name.replace('_', ' ')}.", value)


# ---- the address


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
            message, asked = "wrong or missing token; send Authorization: Bearer TOKEN", {"www-authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=asked)
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self.hosts is not None and name not in self.hosts:
            raise ApiError(403, f"this server does not go by the name {host[:80]!r}; call it at 127.0.0.1 or localhost")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # which no web page may send elsewhere unasked
            raise ApiError(415, "send the request as Content-Type: application/json")


def gate_for(host: str, token: str | None, *, allow_open: bool) -> Gate:
    """Return who may come in at an address; refuse one that anybody could reach."""
    if token is not None:
        return Gate(token.encode())
    if is_loopback(host):
        return Gate(hosts=OWN_NAMES | {host.lower()})
    if not allow_open:
        raise UserError(f"--host {host} can be reached by others; give --token-file, or --allow-open if all may use it")
    return Gate()


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a socket on an address, before the model is loaded: a port that is taken is known at once. 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that stops reading would keep its connection for ever
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}, port {port}: {one_line(error)}; choose another") from None
    return made


class Server(uvicorn.Server):
    """Ends with exit code 0 after one signal, at once after a second."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - their signature
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


class Connection(H11Protocol):
    """A connection, which must come to a request in time. Of too many, those that have sent no whole one are closed, the oldest first.

    So half-sent requests, however slowly they trickle in, keep nobody out. Nor do thousands of chunks of a byte, each of which takes
    Python's time: their ends are counted before they are read. A Unix socket has no strangers and no such bounds.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self.limits = limits
        self.idle_since = 0.0
        self._late: asyncio.TimerHandle | None = None  # set while it is in no request
        self._lines = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.client is None:
            return
        self._watch()
        others: set[Any] = self.connections - {self}
        bounds = ((others, self.limits.max_connections),
                  ({each for each in others if each.client[0] == self.client[0]}, self.limits.max_client_connections))  # fmt: skip
        for open_now, most in bounds:
            if len(open_now) < most or transport.is_closing():
                continue
            idle = min((each for each in open_now if each.is_idle), key=lambda each: each.idle_since, default=self)
            idle.end(b"503 Service Unavailable" if idle is self else b"")

    @property
    def is_idle(self) -> bool:
        unsent = self._late is not None or (self.cycle is not None and self.cycle.more_body)
        return unsent and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            self._lines += piece.count(b"\n")
            if self.cycle and self._lines > MOST_LINES and any(key == b"transfer-encoding" for key, _ in self.headers):
                return self.end(b"400 Bad Request")
            if not self.transport.is_closing():
                super().data_received(piece)
        return self._watch()

    def on_response_complete(self) -> None:
        self._lines = 0
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rest()

    def _watch(self) -> None:
        """Time it while it is in no request: from its beginning, or from the last reply."""
        if self.client is None or (self.cycle and not self.cycle.response_complete):
            self._rest()
        elif self._late is None:
            self.idle_since = self.loop.time()
            self._late = self.loop.call_later(self.limits.header_timeout, self._end_late)

    def _rest(self) -> None:
        if self._late:
            self._late.cancel()
            self._late = None

    def _end_late(self) -> None:
        self.end(b"408 Request Timeout" if self.conn.trailing_data[0] else b"")  # else it asked for nothing

    def end(self, status: bytes) -> None:
        if status and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


def server_of(app: Any, limits: Limits) -> Server:
    """Return the server of an app; `run(sockets=[…])` blocks until a signal. Its own log would name every client."""
    return Server(
        uvicorn.Config(
            app, http=partial(Connection, limits), ws="none", lifespan="on", log_level="critical", access_log=False,  # type: ignore[arg-type]
            server_header=False, timeout_graceful_shutdown=limits.drain,
        )
    )  # fmt: skip
