"""Clients that go away, do not read, send too much, come too many; requests that are no requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from etude.inference.http import OWN_NAMES, Gate, Limits
from tests.serve.scripted import CHAT, PATIENCE, Running, Scripted, request_bytes, serving

ASK: Any = [{"role": "user", "content": "hi"}]
TEXT = "Hello there, you!"


@pytest.fixture
def policy(tokeniser: Any) -> Scripted:
    return Scripted(tokeniser, TEXT)


@pytest.fixture
def server(policy: Scripted) -> Iterator[Running]:
    with serving(policy) as running:
        yield running


def metric(server: Running, name: str) -> float:
    lines = ask(server, "GET", "/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def ask(server: Running, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    told = answer.status, answer.headers, answer.read()
    connection.close()
    return told


def still_answers(server: Running) -> bool:
    return server.client().chat.completions.create(model="tiny", messages=ASK).choices[0].message.content == TEXT


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_hanging_up_cancels(server: Running, policy: Scripted, stream: bytes) -> None:
    policy.hold_at = 2
    client = server.connect()
    client.sendall(request_bytes(CHAT % stream))
    policy.wait_until(lambda: policy.written == 2)
    if stream == b"true":
        assert client.recv(10).startswith(b"HTTP/1.1 2")
    client.close()
    policy.wait_until(lambda: policy.cancelled == 1 and policy.running == 0)
    policy.hold_at = None
    assert still_answers(server)
    assert metric(server, 'etude_requests_total{endpoint="chat",outcome="hung up"}') == 1
    assert metric(server, "etude_requests_in_flight") == 0


def test_a_client_that_never_reads_is_cut_off_and_harms_nobody(tokeniser: Any) -> None:
    written = tokeniser.encode("word " * 400, add_special_tokens=False)
    policy = Scripted(tokeniser, lambda _, sampling: [written[0]] * sampling.max_tokens)
    policy.info = policy.info.__class__("scripted", 10**6, policy.info.vocabulary)
    with serving(policy, Limits(drain=0, max_unread=500)) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those that connect from now on inherit it
        client = server.connect(receive_buffer=1024)
        body = b'{"prompt": "a", "stream": true, "max_tokens": 900000, "logprobs": 20}'
        client.sendall(request_bytes(body, "/v1/completions"))
        policy.wait_until(lambda: policy.cancelled == 1)
        assert policy.written < 2000  # what the buffers took, and what was kept for it
        assert server.client().completions.create(model="tiny", prompt="a", max_tokens=3).usage is not None
        assert metric(server, 'etude_requests_total{endpoint="completions",outcome="did not read"}') == 1
        client.close()


def test_ten_thousand_requests(tokeniser: Any) -> None:
    """Five are taken, the rest are told to come again; then the five are answered."""
    policy = Scripted(tokeniser, TEXT)
    policy.hold_at = 1
    with serving(policy, Limits(drain=0, max_queue=5)) as server:
        taken = [server.connect() for _ in range(5)]
        for client in taken:
            client.sendall(request_bytes(CHAT % b"false"))
        policy.wait_until(lambda: policy.running == 5)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        asyncio.run(refused_many(server, connections=100, each=100))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000  # kB
        assert policy.running == len(policy.asked) == 5
        policy.release()
        for client in taken:
            client.sendall(b"")
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert json.loads(answer.read())["choices"][0]["message"]["content"] == TEXT
        assert still_answers(server)
        assert metric(server, 'etude_requests_total{endpoint="chat",outcome="429"}') == 10_000


async def refused_many(server: Running, connections: int, each: int) -> None:
    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(each):
            writer.write(request_bytes(CHAT % b"true"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 2\r\n" in head
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["error"]["type"] == "rate_limit_error"
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))


def test_too_large_a_request(tokeniser: Any) -> None:
    with serving(Scripted(tokeniser, TEXT), Limits(drain=0, max_request_bytes=1000)) as server:
        large: Any = [{"role": "user", "content": "x" * 3_000_000}]
        with pytest.raises(openai.APIStatusError, match="at most 1,000 are read") as refused:
            server.client().chat.completions.create(model="tiny", messages=large)
        assert refused.value.status_code == 413
        assert still_answers(server)


def test_a_request_that_is_never_sent_to_its_end(tokeniser: Any) -> None:
    with serving(Scripted(tokeniser, TEXT), Limits(drain=0, body_timeout=0.05)) as server:
        client = server.connect()
        client.sendall(request_bytes(CHAT % b"true")[:-5])
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")
        assert still_answers(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long(tokeniser: Any, stream: bool) -> None:
    policy = Scripted(tokeniser, TEXT)
    policy.hold_at = 0
    with serving(policy, Limits(drain=0, timeout=0.05)) as server:
        with pytest.raises(openai.InternalServerError, match="took longer") as late:
            server.client().chat.completions.create(model="tiny", messages=ASK, stream=stream)
        assert late.value.status_code == 504
        policy.wait_until(lambda: policy.cancelled == 1)
        policy.hold_at = 1
        if stream:
            with pytest.raises(openai.APIError, match="took longer"):
                list(server.client().chat.completions.create(model="tiny", messages=ASK, stream=True))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b'{"messages": [', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "not JSON"),
        (b'{"messages": "\xff"}', "not JSON"),
        (b'{"temperature": NaN, "messages": []}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b"{}", "messages: Field required"),
        (b'{"messages": 3}', "messages: Input should be a valid list"),
        (b'{"messages": [3]}', "messages.0"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages.0.content: Input should be a valid string"),
        (b'{"messages": [{"role": "user", "content": "a", "n\\u0000": 1}]}', "Extra inputs"),
    ],
)
def test_bad_json_and_wrong_types(server: Running, policy: Scripted, body: bytes, says: str) -> None:
    status, _, told = ask(server, "POST", "/v1/chat/completions", body, content_type="application/json")
    error = json.loads(told)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"]
    assert not policy.asked


def test_a_template_that_refuses(server: Running, policy: Scripted, tokeniser: Any) -> None:
    template = tokeniser.chat_template
    try:
        tokeniser.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(openai.BadRequestError, match="refuses these messages: roles must alternate"):
            server.client().chat.completions.create(model="tiny", messages=ASK)
    finally:
        tokeniser.chat_template = template


def test_addresses_that_are_not_there(server: Running) -> None:
    status, _, told = ask(server, "GET", "/v2/nothing")
    assert status == 404
    assert "/v1/chat/completions" in json.loads(told)["error"]["message"]
    status, headers, told = ask(server, "GET", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(told)["error"]["type"] == "invalid_request_error"
    assert ask(server, "POST", "/v1/chat/completions", b"{}", content_type="text/plain")[0] == 415


def test_only_the_token_opens(tokeniser: Any, capfd: pytest.CaptureFixture[str]) -> None:
    token = "a-long-enough-secret"
    with serving(Scripted(tokeniser, TEXT), gate=Gate(token.encode())) as server:
        for wrong in ("another", token + "x", token[:-1], "é"):
            with pytest.raises(openai.AuthenticationError if wrong.isascii() else UnicodeEncodeError):
                server.client(wrong).chat.completions.create(model="tiny", messages=ASK)
        with pytest.raises(openai.AuthenticationError):
            server.client("another").models.list()
        assert ask(server, "GET", "/metrics")[0] == 401
        status, headers, _ = ask(server, "POST", "/v1/completions", b"x" * 500_000, content_type="application/json")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert ask(server, "POST", "/v1/completions", b"", authorization="Bearer \xff")[0] == 401
        assert ask(server, "GET", "/health")[0] == 200
        assert server.client(token).models.list().data
        assert server.client(token).chat.completions.create(model="tiny", messages=ASK)
    out = capfd.readouterr()
    assert token not in out.out + out.err
    assert token not in repr(Gate(token.encode()))


def test_a_page_in_a_browser_cannot_use_another_name(tokeniser: Any) -> None:
    with serving(Scripted(tokeniser, TEXT), gate=Gate(hosts=OWN_NAMES)) as server:
        assert still_answers(server)
        for host in ("localhost:80", "LOCALHOST", "[::1]:80", "127.0.0.1"):
            assert ask(server, "GET", "/v1/models", host=host)[0] == 200
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
            status, _, told = ask(server, "GET", "/v1/models", host=host)
            assert status == 403
            assert "does not go by the name" in json.loads(told)["error"]["message"]


def test_health_and_metrics(server: Running, policy: Scripted) -> None:
    policy.hold_at = 1
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(still_answers(server)))
    asking.start()
    policy.wait_until(lambda: policy.written == 1)
    assert json.loads(ask(server, "GET", "/health")[2]) == {"status": "ok", "model": "tiny", "in_flight": 1}
    policy.release()
    asking.join(PATIENCE)
    assert answers == [True]
    list(server.client().chat.completions.create(model="tiny", messages=ASK, stream=True))
    words = len(policy.ids(TEXT))
    assert metric(server, 'etude_requests_total{endpoint="chat",outcome="200"}') == 2
    assert metric(server, "etude_completion_tokens_total") == 2 * words
    assert metric(server, "etude_prompt_tokens_total") == sum(len(prompt) for prompt, _, _ in policy.asked)
    assert metric(server, "etude_request_seconds_count") == 2
    assert metric(server, "etude_first_token_seconds_count") == 1
    assert ask(server, "GET", "/metrics")[1]["content-type"].startswith("text/plain; version=")


HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


def until_closed(client: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    with client:
        return b"".join(iter(lambda: client.recv(4096), b""))


def first_line(client: socket.socket) -> bytes:
    return client.recv(4096).partition(b"\r\n")[0]


@pytest.mark.parametrize("sent", [HALF, b"", b"G", b"POST /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 50])
def test_headers_that_do_not_end_end_the_connection(policy: Scripted, sent: bytes) -> None:
    with serving(policy, Limits(drain=0, header_timeout=0.05)) as server:
        client = server.connect()
        client.sendall(sent)
        assert until_closed(client).partition(b"\r\n")[0] == (b"HTTP/1.1 408 Request Timeout" if sent else b"")
        assert still_answers(server)


def test_headers_that_trickle_in_win_no_time(policy: Scripted) -> None:
    """Each byte begins nothing anew: the deadline stands from the connection's beginning, and from the last reply."""
    for earlier in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
        with serving(policy, Limits(drain=0, header_timeout=0.3)) as server, server.connect() as client:
            if earlier:
                client.sendall(earlier)
                assert first_line(client) == b"HTTP/1.1 200 OK"
            client.sendall(HALF)
            client.settimeout(0.01)
            while True:  # for ever, if a byte won time
                try:
                    assert first_line(client) in {b"HTTP/1.1 408 Request Timeout", b""}
                    break
                except TimeoutError:
                    client.sendall(b"x")
                except ConnectionError:
                    break


def test_a_request_in_progress_is_not_timed_by_its_headers(policy: Scripted) -> None:
    policy.hold_at = 1
    with serving(policy, Limits(drain=0, header_timeout=0.05)) as server:
        client, late = server.connect(), server.connect()
        client.sendall(request_bytes(CHAT % b"false"))
        policy.wait_until(lambda: policy.running == 1)
        assert until_closed(late) == b""  # came later, and its time is over
        policy.release()
        assert first_line(client) == b"HTTP/1.1 200 OK"
        client.close()


@pytest.mark.parametrize("bound", ["max_connections", "max_client_connections"])
def test_idle_connections_make_room_for_who_asks(policy: Scripted, bound: str) -> None:
    """Half-sent, silent and kept-alive ones go, the oldest first; those in a request stay, and if all are, the newest goes."""
    policy.hold_at = 1
    with serving(policy, Limits(drain=0, **{bound: 4})) as server:  # type: ignore[arg-type]
        busy = server.connect()
        busy.sendall(request_bytes(CHAT % b"false"))
        policy.wait_until(lambda: policy.running == 1)
        idle = [server.connect() for _ in range(3)]
        idle[0].sendall(HALF)
        idle[1].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert first_line(idle[1]) == b"HTTP/1.1 200 OK"
        more = []
        for waiting in (idle[0], idle[2], idle[1]):  # the reply began the second one's time anew
            more.append(server.connect())
            assert b"HTTP/1.1" not in until_closed(waiting)
            more[-1].sendall(request_bytes(CHAT % b"false"))
            policy.wait_until(lambda: policy.running == 1 + len(more))
        refused = server.connect()
        assert first_line(refused) == b"HTTP/1.1 503 Service Unavailable"
        refused.close()
        policy.release()
        for client in (busy, *more):
            assert first_line(client) == b"HTTP/1.1 200 OK"
            client.close()


def test_two_thousand_half_sent_headers_keep_nobody_out(policy: Scripted) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    clients = []
    try:
        with serving(policy) as server:
            for _ in range(2_100):
                clients.append(server.connect())
                clients[-1].sendall(HALF)
            assert still_answers(server)
            assert len(server.server.server_state.connections) <= Limits().max_client_connections + 1
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
