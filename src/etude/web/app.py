"""The server of the page: who may come in, what it answers, and news while a run goes on.

Without a token only this machine is answered, and only under its own names: else any web page could have a name of its own point here
and read what is shown (DNS rebinding). Nothing that is shown can run: the policy allows scripts and styles of this server alone, none
inline, and no page of another origin may frame it or send to it. What changes something is a POST with a token that only our own
pages carry, in a header that no other origin can set.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.errors import UserError
from etude.inference.http import ApiError, as_api_error
from etude.web.html import element, frame, join, note
from etude.web.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from etude.inference.http import Gate
    from etude.web.agents import Agents
    from etude.web.reading import Shelf

    Action = Callable[[dict[str, str]], dict[str, str]]  # what a form holds, and what is said to it; done in a thread

KINDS = {"css": "text/css", "js": "text/javascript"}
STATIC = {name: KINDS[name.rpartition(".")[2]] for name in ("web.css", "web.js", "uplot.min.js", "uplot.min.css")}
PATIENCE = 0.2  # seconds that a page waits for files that are still being read, before it shows what there is
LOOK = 1.0  # seconds between two looks whether a run has news
BEAT = 15  # looks after which something is sent all the same, so that a dead connection is noticed
WRONG = 0.5  # seconds that a wrong token takes
MOST_BODY = 1 << 20  # bytes of an action
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin", "cache-control": "no-store",
}  # fmt: skip
OPEN = ("/static/", "/login")  # what is answered without a token
TOKEN, COOKIE = "x-etude-token", "etude"


def static_file(name: str) -> bytes:
    return resources.files("etude.web").joinpath("static", name).read_bytes()


class Guard:
    """Admits requests and puts the headers on replies: around everything, so that no route can forget it."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name.lower() for name, _ in message["headers"]}
                added = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in known]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            self._admit(scope)
        except ApiError as error:
            await _refusal(scope, error)(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _admit(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None and origin.partition(b"://")[2] != host:
            raise ApiError(403, "this page may not be asked by a page from elsewhere")
        if headers.get(b"sec-fetch-site", b"none") in {b"cross-site", b"same-site"} and scope["method"] != "GET":
            raise ApiError(403, "this page may not be changed by a page from elsewhere")
        if self.gate.token is not None and scope["path"].startswith(OPEN):
            return
        if self.gate.token is not None and b"authorization" not in headers:
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + _from_cookie(headers))]}
        self.gate.check(scope)


def _refusal(scope: Scope, error: ApiError) -> Response:
    """Say why a request is refused; to a browser that lacks the token, with a field to type it into."""
    if error.status != 401 or scope["method"] != "GET":
        return PlainTextResponse(f"{error}\n", error.status)
    box = element(
        "input", type="password", name="token", aria_label="token", autocomplete="current-password", required=True
    )
    form = element("form", box, element("button", "Come in"), cls="login")
    body = join(note("The token is in the file that --token-file names."), form)
    page = frame("A token is needed", body, depth=scope["path"].count("/") - 1)
    return Response(page, 401, media_type="text/html")


def _from_cookie(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token that the browser was given when it came with it in the address."""
    pairs = (each.strip().partition(b"=") for each in headers.get(b"cookie", b"").split(b";"))
    return next((value for name, _, value in pairs if name == COOKIE.encode()), b"")


class Pages:
    """The routes."""

    def __init__(
        self, shelf: Shelf, gate: Gate, actions: Mapping[str, Action] | None = None, agents: Agents | None = None
    ) -> None:
        self.site, self.gate, self.actions = Site(shelf, agents), gate, dict(actions or {})
        self.token = secrets.token_urlsafe(24)  # of this start; what changes something must carry it
        self.static = {name: static_file(name) for name in STATIC}

    def app(self) -> Guard:
        routes = [
            Route("/static/{name}", self.asset), Route("/events", self.events), Route("/login", self.login, methods=["POST"]),
            Route("/do/{name}", self.act, methods=["POST"]), Route("/{path:path}", self.page),
        ]  # fmt: skip
        return Guard(Starlette(routes=routes), self.gate)

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.static:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(self.static[name], media_type=STATIC[name], headers={"cache-control": "max-age=600"})

    async def page(self, request: Request) -> Response:
        path = request.path_params["path"]
        path += "index.html" if path == "" or path.endswith("/") else ""
        asked = request.query_params.multi_items()
        try:
            text = await run_in_threadpool(self.site.page, path, asked, token=self.token)
            return Response(text, media_type="text/html")
        except KeyError:
            about = note("There is nothing at this address. It may have been moved, or its run replaced.", "empty")
            text = frame("Not found", about, depth=path.count("/"))
            return Response(text, 404, media_type="text/html")

    async def login(self, request: Request) -> Response:
        """Keep the token in a cookie that no script reads and no other site sends, if it is the right one."""
        given = (await request.body())[:1000].strip()
        if self.gate.token is None or not hmac.compare_digest(given, self.gate.token):
            await asyncio.sleep(WRONG)
            return PlainTextResponse("this is not the token\n", 401)
        reply = PlainTextResponse("welcome\n")
        reply.set_cookie(
            COOKIE, self.gate.token.decode(), httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return reply

    async def events(self, request: Request) -> Response:
        """Tell whenever a run has changed: its pages then fetch themselves anew, and replace what is different."""
        key = request.query_params.get("run", "")

        def mark() -> str:
            try:
                return self.site.mark(key)
            except (UserError, LookupError, FileNotFoundError):  # gone, or not to be read
                return "broken"

        async def stream() -> AsyncIterator[bytes]:
            before, looks = await run_in_threadpool(mark), 0
            yield b": hello\n\n"
            while True:  # until the browser goes, which cancels this
                await asyncio.sleep(LOOK)
                now, looks = await run_in_threadpool(mark), looks + 1
                if now != before:
                    yield b"data: changed\n\n"
                elif looks % BEAT == 0:
                    yield b": still here\n\n"
                before = now

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """Do what a page asks for, if it carries the token of our own pages."""
        try:
            if not hmac.compare_digest(request.headers.get(TOKEN, "").encode(), self.token.encode()):
                raise ApiError(403, f"an action needs the header {TOKEN} of a page of this server; load the page again")
            if (action := self.actions.get(request.path_params["name"])) is None:
                raise ApiError(404, "there is no such action")
            if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                raise ApiError(415, "send the request as Content-Type: application/json")
            if int(request.headers.get("content-length", MOST_BODY + 1)) > MOST_BODY:
                raise ApiError(413, f"an action has at most {MOST_BODY:,} bytes")
            with contextlib.suppress(ValueError):
                body = await request.json()
                if isinstance(body, dict) and all(isinstance(each, str) for each in body.values()):
                    return JSONResponse(await run_in_threadpool(action, body))
            raise ApiError(400, "the body is not the JSON that this action takes")
        except KeyError:
            return ApiError(404, "there is no such run, stage or session").response()
        except (ApiError, UserError) as error:
            return as_api_error(error).response()
