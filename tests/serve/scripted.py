"""A policy that writes what a test tells it, when the test says so, behind a real server on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openai import OpenAI
from starlette.applications import Starlette

from etude.inference.http import Gate, Limits, bind, server_of
from etude.inference.policy import Completion, PolicyInfo, Sampling, Token
from etude.models.bases import resolve
from etude.models.load import load_tokeniser
from etude.serve.app import build_app
from etude.serve.process import ModelCard

CONTEXT, VOCABULARY = 2048, 6144
PATIENCE = 60  # seconds after which a test that waits is stuck; none is meant to take them
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def sprout_tokeniser() -> Any:
    return load_tokeniser(resolve("sprout").folder)


class Scripted:
    """Writes `script(prompt, sampling)`, a token at a time. Held at a token until released, if a test says so."""

    def __init__(self, tokeniser: Any, script: Callable[[Sequence[int], Sampling], list[int]] | str = "") -> None:
        self.tokeniser = tokeniser
        self.script = script if callable(script) else lambda _prompt, _sampling: self.ids(script)
        self.info = PolicyInfo("scripted", CONTEXT, VOCABULARY)
        self.hold_at: int | None = None
        self.fails_with: Exception | None = None
        self.asked: list[tuple[list[int], Sampling, str | None]] = []
        self.running = self.cancelled = self.written = 0
        self.closed = False
        self.changed = threading.Condition()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.released: asyncio.Event | None = None

    def ids(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False))

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None,
        on_tokens: Callable[[list[Token]], None] | None = None,
    ) -> Completion:  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.released = self.released or asyncio.Event()
        self.asked.append((list(prompt), sampling, session))
        self.note(running=1)
        try:
            return await self.write(prompt, sampling, on_tokens)
        except asyncio.CancelledError:
            self.note(cancelled=1)
            raise
        finally:
            self.note(running=-1)

    async def write(
        self, prompt: Sequence[int], sampling: Sampling, on_tokens: Callable[[list[Token]], None] | None
    ) -> Completion:
        tokens: list[Token] = []
        for place, number in enumerate(self.script(prompt, sampling)[: sampling.max_tokens]):
            if place == self.hold_at:
                assert self.released is not None
                await self.released.wait()
                if self.fails_with:
                    raise self.fails_with
            await asyncio.sleep(0)
            others = tuple((number + 1 + other, -3.0 - other) for other in range(sampling.alternatives))
            tokens.append(Token(number, -0.5, -1.0 - place, 7, others))
            self.note(written=1)
            if on_tokens:
                on_tokens(tokens[-1:])
            if number in sampling.stop_tokens:
                return Completion(tokens, "stop", number, cached=2)
            for stop in sampling.stop:
                if stop in self.tokeniser.decode([token.id for token in tokens]):
                    return Completion(tokens, "stop", stop, cached=2)
        return Completion(tokens, "length" if len(tokens) == sampling.max_tokens else "stop", cached=2)

    async def close(self) -> None:
        self.closed = True

    def note(self, **more: int) -> None:
        with self.changed:
            for name, amount in more.items():
                setattr(self, name, getattr(self, name) + amount)
            self.changed.notify_all()

    def wait_until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(true, PATIENCE), "it never came to pass"

    def release(self) -> None:
        assert self.loop is not None
        assert self.released is not None
        self.loop.call_soon_threadsafe(self.released.set)


class Running:
    """A server in a thread."""

    def __init__(self, app: Starlette, limits: Limits) -> None:
        self.socket = bind("127.0.0.1", 0)
        self.socket.listen(2048)  # so that nobody has to wait for the thread
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = server_of(app, limits)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def client(self, token: str = "no token", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=PATIENCE, **options)

    def connect(self, receive_buffer: int | None = None, source: str | None = None) -> socket.socket:
        made = socket.socket()
        if source:
            made.bind((source, 0))
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(PATIENCE)
        made.connect(("127.0.0.1", self.port))
        return made

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(
    policy: Scripted, limits: Limits | None = None, gate: Gate | None = None, card: ModelCard | None = None
) -> Iterator[Running]:
    limits = limits or Limits(drain=0)
    running = Running(build_app(policy, policy.tokeniser, card or ModelCard("tiny"), limits, gate), limits)
    try:
        yield running
    finally:
        running.stop()
    assert policy.closed


def request_bytes(body: bytes, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}'
