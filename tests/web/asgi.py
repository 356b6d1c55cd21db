"""Asks an application directly, without a server: what tests of replies need."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


def ask(
    app: Any, path: str, *, method: str = "GET", body: bytes = b"", host: str = "127.0.0.1:7777", **headers: str
) -> Answer:
    """Return what an application answers. Header names: underscores for hyphens."""
    path, _, query = path.partition("?")
    given = {
        "host": host,
        "content-length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": unquote(path), "raw_path": path.encode(),
             "query_string": query.encode(), "root_path": "", "headers": [(name.encode(), value.encode()) for name, value in given.items()],
             "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 7777)}  # fmt: skip
    said: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(app(scope, receive, send))
    start = said[0]
    return Answer(
        start["status"],
        {name.decode().lower(): value.decode() for name, value in start["headers"]},
        b"".join(each.get("body", b"") for each in said[1:]).decode(),
    )
