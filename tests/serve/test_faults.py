"""Clients that go away, do not read, send too much, come too many; requests that are no requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from etude.inference.http import MOST_LINES, OWN_NAMES, Connection, Gate, Limits
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


def connection_of(server: Running, client: socket.socket) -> Connection:
    """Return the server's end of a connection."""
    while True:
        for each in list(server.server.server_state.connections):
            if isinstance(each, Connection) and each.client == client.getsockname():
                return each


def deadline_of(connection: Connection) -> Any:
    while connection._late is None:
        pass
    return connection._late


def received(connection: Connection, data: bytes) -> None:
    while connection.conn.trailing_data[0] != data:
        pass


def test_a_connection_that_comes_to_no_request_is_closed(policy: Scripted) -> None:
    with serving(policy, Limits(drain=0, header_timeout=0.05)) as server:
        for sent in (HALF, b""):
            client = server.connect()
            client.sendall(sent)
            until_closed(client)


@pytest.mark.parametrize("sent", [HALF, b"", b"G", b"POST /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 50])
def test_the_deadline_of_headers_stands_however_they_trickle_in(server: Running, sent: bytes) -> None:
    for earlier in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
        client = server.connect()
        connection = connection_of(server, client)
        first = deadline_of(connection)
        if earlier:
            client.sendall(earlier)
            while b"in_flight" not in client.recv(4096):
                pass
        deadline = deadline_of(connection)
        assert (deadline is first) == (not earlier)  # a reply begins it anew
        for place in range(len(sent)):
            client.sendall(sent[place : place + 1])
        received(connection, sent)
        assert connection._late is deadline
        connection.loop.call_soon_threadsafe(connection._end_late)  # the clock has come to it
        assert until_closed(client).partition(b"\r\n")[0] == (b"HTTP/1.1 408 Request Timeout" if sent else b"")
    assert still_answers(server)


def test_a_request_in_progress_is_not_timed_by_its_headers(server: Running, policy: Scripted) -> None:
    policy.hold_at = 1
    client = server.connect()
    client.sendall(request_bytes(CHAT % b"false"))
    policy.wait_until(lambda: policy.running == 1)
    assert connection_of(server, client)._late is None
    policy.release()
    assert first_line(client) == b"HTTP/1.1 200 OK"
    client.close()


@pytest.mark.parametrize("bound", ["max_connections", "max_client_connections"])
def test_idle_connections_make_room_for_who_asks(policy: Scripted, bound: str) -> None:
    """Half-sent, silent and kept-alive ones go, the oldest first; those in a request stay, and if all are, the newest goes."""
    policy.hold_at = 1
    with serving(policy, Limits(drain=0, **{bound: 4})) as server:
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


@pytest.mark.parametrize("limits", [{"max_queue": 3}, {"max_connections": 3}, {"max_client_connections": 3}])
@pytest.mark.parametrize("host", [b"127.0.0.1", b"elsewhere"])
def test_half_sent_bodies_keep_nobody_out(policy: Scripted, limits: Any, host: bytes) -> None:
    half = request_bytes(CHAT % b"false")[:-5].replace(b"127.0.0.1", host)
    with serving(policy, Limits(drain=0, **limits), Gate(hosts=OWN_NAMES)) as server:
        slow = []
        for _ in range(3):
            slow.append(server.connect())
            slow[-1].sendall(half)
            connection = connection_of(server, slow[-1])
            while getattr(connection, "cycle", None) is None:
                pass
        assert still_answers(server)
        if host == b"127.0.0.1" or "max_queue" not in limits:
            assert first_line(slow[0]) == (
                b"HTTP/1.1 408 Request Timeout" if "max_queue" in limits else b""
            )  # the oldest
        slow[2].sendall(request_bytes(CHAT % b"false")[-5:])
        assert first_line(slow[2]).startswith(b"HTTP/1.1 200" if host == b"127.0.0.1" else b"HTTP/1.1 403")
        for client in slow:
            client.close()


def chunked(size: int) -> bytes:
    head, _, body = request_bytes(CHAT % b"false").partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", chunks])


def test_chunks_are_read_but_not_tens_of_thousands_of_a_byte(server: Running) -> None:
    for size in (1, 50):
        client = server.connect()
        client.sendall(chunked(size))
        assert first_line(client) == b"HTTP/1.1 200 OK"
        client.close()
    client = server.connect()
    client.sendall(chunked(50).removesuffix(b"0\r\n\r\n") + b"1\r\n \r\n" * (MOST_LINES // 2))
    assert until_closed(client).startswith(b"HTTP/1.1 400 Bad Request")
    assert still_answers(server)


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


class Watched:
    """A tokeniser that says what it reads, and holds texts that contain a word until they are released."""

    def __init__(self, tokeniser: Any, hold: str = "never") -> None:
        self.tokeniser, self.hold, self.released = tokeniser, hold, threading.Event()
        self.read: list[str] = []
        self.changed = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokeniser, name)

    def __deepcopy__(self, memo: Any) -> Watched:
        return self

    def encode(self, text: str, **how: Any) -> list[int]:
        with self.changed:
            self.read.append(text)
            self.changed.notify_all()
        if self.hold in text:
            assert self.released.wait(PATIENCE)
        return list(self.tokeniser.encode(text, **how))

    def wait_until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(true, PATIENCE), self.read


@pytest.fixture
def watched(tokeniser: Any, policy: Scripted) -> Watched:
    policy.tokeniser = own = Watched(tokeniser, hold="held")
    policy.ids = lambda text: list(tokeniser.encode(text, add_special_tokens=False))  # type: ignore[method-assign]
    return own


def long_request(prompt: str) -> bytes:
    return request_bytes(
        json.dumps({"prompt": prompt, "max_tokens": 1, "user": "x" * 70_000}).encode(), "/v1/completions"
    )


@pytest.mark.parametrize(
    "text", ["a" * 3_000_000, "x y" * 300_000, "\u00e9\U0001f600" * 90_000, "word " * 100_000, " " * 3_000_000]
)
def test_a_text_that_is_surely_too_long_is_not_read_to_its_end(policy: Scripted, watched: Watched, text: str) -> None:
    with serving(policy) as server:
        status, _, body = ask(server, "POST", "/v1/completions", json.dumps({"prompt": text}).encode(), content_type="application/json")  # fmt: skip
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(map(len, watched.read)) < 70_000


def test_a_text_that_proves_too_long_piece_by_piece_is_not_read_to_its_end(policy: Scripted, watched: Watched) -> None:
    """No longer in bytes than a context of the longest tokens, so it might fit; its pieces tell that it does not."""
    longest = max(len(word.encode()) for word in policy.tokeniser.get_vocab())
    text = "".join(chr(97 + place * place % 26) for place in range(policy.info.context * longest - 1))
    with serving(policy) as server:
        body = json.dumps({"prompt": text}).encode()
        status, _, _ = ask(server, "POST", "/v1/completions", body, content_type="application/json")
    assert status == 400
    assert sum(map(len, watched.read)) < len(text)


@pytest.mark.parametrize(("text", "fits"), [("word " * 1_500, True), ("word " * 4_000, False), (" " * 40_000, True)])
def test_a_text_that_may_fit_is_read(policy: Scripted, watched: Watched, text: str, fits: bool) -> None:
    expected = len(policy.ids(text)) < policy.info.context
    assert expected == fits
    with serving(policy) as server:
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        status, _, _ = ask(server, "POST", "/v1/completions", body, content_type="application/json")
        assert (status == 200) == fits


def test_more_prompts_than_are_answered_are_not_read(policy: Scripted, watched: Watched) -> None:
    with serving(policy) as server:
        body = json.dumps({"prompt": ["a"] * 200_000}).encode()
        status, _, answer = ask(server, "POST", "/v1/completions", body, content_type="application/json")
        assert status == 400
        assert "200000 completions in one request; at most 64" in answer.decode()
        assert "a" not in watched.read


def test_a_short_request_does_not_wait_for_long_ones_and_clients_take_turns(policy: Scripted, watched: Watched) -> None:
    """One client sends three long texts, then another one: the second client's is next, and a short one waits for nobody."""
    long = ["held a1", "held a2", "held a3", "held b1"]
    with serving(policy, Limits(drain=0)) as server:
        clients = [server.connect(), server.connect(), server.connect(), server.connect(source="127.0.0.2")]
        clients[0].sendall(long_request(long[0]))
        watched.wait_until(lambda: any("held a1" in text for text in watched.read))
        for client, text in zip(clients[1:], long[1:], strict=True):
            client.sendall(long_request(text))
        while metric(server, "etude_requests_in_flight") < 4:
            pass
        assert still_answers(server)
        watched.released.set()
        for client in clients:
            assert first_line(client) == b"HTTP/1.1 200 OK"
            client.close()
        order = [text.split()[1] for text in watched.read if text.startswith("held")]
        assert order == ["a1", "b1", "a2", "a3"]
