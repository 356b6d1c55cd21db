"""Start the server on an address, and end it well: what is under way may finish, new requests are refused."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from etude.errors import UserError, one_line
from etude.serve.app import Gate

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from etude.serve.limits import Limits

OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
UNREAD = 30_000  # milliseconds that the network may fail to take what we send before the connection is dropped


class Server(uvicorn.Server):
    """Ends with exit code 0 after one signal, at once after a second."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - their signature
        """Note that it is time to stop."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


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


def read_token(path: Path) -> str:
    """Return the token in a file, which is nowhere else shown."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--token-file {path} cannot be read: {one_line(error)}") from None
    if len(token) < 16 or not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"--token-file {path}: a token is one word of at least 16 ASCII characters")
    return token


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


def server_of(app: Any, limits: Limits) -> Server:
    """Return the server of an app; `run(sockets=[…])` blocks until a signal. Its own log would name every client."""
    return Server(
        uvicorn.Config(
            app, http="h11", ws="none", lifespan="on", log_level="critical", access_log=False, server_header=False,
            limit_concurrency=limits.max_connections, timeout_graceful_shutdown=limits.drain,
        )
    )  # fmt: skip
