"""The web application: which address answers what, and to whom."""

from __future__ import annotations

import contextlib
import hmac
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.serve.endpoint import Endpoint
from etude.serve.errors import ApiError
from etude.serve.metrics import Metrics
from etude.serve.prepare import Preparer
from etude.serve.text import TokenTexts
from etude.serve.wire import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import Scope

    from etude.inference.policy import Policy
    from etude.serve.card import ModelCard
    from etude.serve.limits import Limits


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
