"""HTTP/1.1 as the client of the token API needs it: connections that are kept, replies that stream, nothing else.

Written here because it is on the way of every rollout: with 256 of them a general client took a third of the orchestrator's time,
more than the sandboxes. No redirects, no cookies, no compression, no proxies from the environment.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = 1 << 18  # bytes of a reply's headers, or of the line before a chunk, at most


class ConnectionLost(Exception):  # noqa: N818 - a state of the network
    """The connection broke, or what came is not HTTP."""


class Unreachable(ConnectionLost):
    """Nobody listens at the address."""


class Reply:
    """A reply whose headers came. `content` is empty until the body was read."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers, self._reader = status, headers, reader
        self.content = b""
        self.whole = False  # all of it came: the connection can be used again

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _size((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            while await self._reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif (length := self.headers.get("content-length")) is not None or self.status in {204, 304}:
            yield await self._reader.readexactly(_size(length or "0", 10))
        else:
            yield await self._reader.read()
        self.whole = True

    async def read(self) -> bytes:
        """Return the body, whole."""
        if not self.whole:
            self.content = b"".join([chunk async for chunk in self.chunks()])
        return self.content

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


class Connections:
    """Connections to one address, `http://…`, `https://…` or `unix:/PATH`: as many as there are requests at once."""

    def __init__(self, url: str, headers: dict[str, str], patience: float) -> None:
        self._unix = url.removeprefix("unix:") if url.startswith("unix:") else ""
        self._url, self._patience = urlsplit("http://localhost" if self._unix else url), patience
        # Loading certificates takes a tenth of a second.
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        fixed = {"Host": self._url.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._closed = False

    async def fetch(self, method: str, path: str, body: bytes = b"") -> Reply:
        """Return a reply with its body."""
        async with self.request(method, path, body) as reply:
            await reply.read()
            return reply

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"", session: str = "") -> AsyncIterator[Reply]:
        """Send a request and hand out the reply once its headers came; leaving before its end hangs up."""
        reader, writer = await self._connection()
        reply: Reply | None = None
        own = f"X-Session-ID: {session}\r\n" if session else ""
        head = f"{method} {self._url.path}{path} HTTP/1.1\r\n{self._head}{own}Content-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            reply = await _begin(reader)
            yield reply
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(_reason(error)) from error
        finally:
            kept = reply and reply.whole and reply.headers.get("connection", "").lower() != "close"
            if kept and not self._closed:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def close(self) -> None:
        self._closed = True
        for _, writer in self._idle:
            writer.close()
        for _, writer in self._idle:
            with suppress(OSError):
                await writer.wait_closed()
        self._idle.clear()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        try:
            async with asyncio.timeout(self._patience):
                if self._unix:
                    return await asyncio.open_unix_connection(self._unix, limit=HEAD)
                port = self._url.port or (443 if self._tls else 80)
                return await asyncio.open_connection(self._url.hostname, port, ssl=self._tls, limit=HEAD)
        except (OSError, TimeoutError) as error:
            raise Unreachable(_reason(error)) from error


async def _begin(reader: asyncio.StreamReader) -> Reply:
    """Read status and headers; interim replies are passed over."""
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, status = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise ConnectionLost("what came is not HTTP")
        if status[0] != "1":
            pairs = (line.partition(":") for line in lines[1:] if line)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            return Reply(int(status[:3]), headers, reader)


def _size(text: str | bytes, base: int) -> int:
    try:
        return int(text if text.strip().isalnum() else "", base)  # no sign, no underscore
    except ValueError:
        raise ConnectionLost(f"a length of {text[:20]!r} is not HTTP") from None


def _reason(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the server hung up"
    return str(error) or type(error).__name__
