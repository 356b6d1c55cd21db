"""Replies in every framing that HTTP/1.1 has, cut anywhere on the way, against the bytes that were sent."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.connection import ConnectionLost, Connections, Reply, Unreachable

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def chunked(parts: list[bytes]) -> bytes:
    chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\nChecksum: x\r\n\r\n"


def counted(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def until_closed(parts: list[bytes]) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(parts)


async def exchange(replies: list[bytes], cuts: list[int], *, hang_up: bool = False) -> tuple[list[Reply], int]:
    """Ask once for every reply; return the replies and how many connections were made."""
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
                reply, ends = replies.pop(0), [*sorted(cuts), None]
                for start, end in zip([0, *sorted(cuts)], ends, strict=True):
                    writer.write(reply[start:end])
                    await writer.drain()
                if hang_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        async with await asyncio.start_unix_server(serve, path):
            connections = Connections(f"unix:{path}", {}, 5.0)
            answers = [await connections.fetch("POST", "/x", b"body") for _ in range(len(replies))]
            await connections.close()
    return answers, made


@settings(max_examples=30, deadline=None)
@given(
    st.lists(BODIES, min_size=1, max_size=3),
    st.lists(st.integers(1, 120), max_size=4, unique=True),
    st.sampled_from([chunked, counted]),
)
def test_bodies_arrive_whole_over_one_kept_connection(
    bodies: list[list[bytes]], cuts: list[int], frame: Callable[[list[bytes]], bytes]
) -> None:
    answers, made = asyncio.run(exchange([frame(parts) for parts in bodies], cuts))
    assert [answer.content for answer in answers] == [b"".join(parts) for parts in bodies]
    assert made == 1


def test_a_body_may_end_with_the_connection() -> None:
    answers, made = asyncio.run(exchange([until_closed([b"one"]), until_closed([b"two"])], [], hang_up=True))
    assert [answer.content for answer in answers] == [b"one", b"two"]
    assert made == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nab", b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", b"x" * (1 << 19),
    ],
    ids=["nothing", "half", "ssh", "status", "chunk size", "negative", "length", "half a chunk", "no headers"],
)  # fmt: skip
def test_what_is_not_a_whole_reply_is_a_lost_connection(reply: bytes) -> None:
    with pytest.raises(ConnectionLost):
        asyncio.run(exchange([reply], [], hang_up=True))


def test_nobody_at_the_address() -> None:
    with pytest.raises(Unreachable):
        asyncio.run(Connections("unix:/nowhere/s", {}, 1.0).fetch("GET", "/"))
