"""Start the server on an address, and end it well: what is under way may finish, new requests are refused.

What `/v1/models` tells of the model: where it comes from, and what its licences want to be shown.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.duties import Product, evaluate, licence_uses
from etude.lineage.record import LINEAGE_FILE, load_lineage
from etude.lineage.tree import render
from etude.serve.app import Gate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import FrameType

    from etude.lineage.duties import Duty
    from etude.lineage.record import Lineage, Origin
    from etude.serve.openai_schema import Limits

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


@dataclass(frozen=True)
class ModelCard:
    """The model that is served."""

    id: str
    lineage: dict[str, Any] = field(default_factory=dict)
    display: list[dict[str, Any]] = field(default_factory=list)
    stop_tokens: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))

    def told(self, context: int) -> dict[str, Any]:
        """Return the model as a client sees it in a list of models."""
        return {"id": self.id, "object": "model", "created": self.created, "owned_by": "etude", "max_model_len": context,
                "lineage": self.lineage, "display": self.display}  # fmt: skip


def card_of(name: str, folder: Path, origin: Origin | None) -> ModelCard:
    """Return the card of a model's folder."""
    lineage = load_lineage(folder) if (folder / LINEAGE_FILE).is_file() else None
    duties = evaluate(licence_uses(folder), Product(hosted=True))
    return ModelCard(name, _told(name, lineage, origin), to_display(duties), stop_tokens_of(folder))


def _told(name: str, lineage: Lineage | None, origin: Origin | None) -> dict[str, Any]:
    if lineage is None:
        known = origin.model_dump(mode="json") if origin else None
        return {"record": None, "told": "it was not made by Etude and carries no record", "origin": known}
    records = lineage.model_dump(mode="json")["records"]
    return {"record": lineage.head, "tree": render(lineage, name), "records": records}


def to_display(duties: Iterable[Duty]) -> list[dict[str, Any]]:
    """Return the texts that licences want shown. `always`: by whoever serves it; else it depends on the product."""
    return [
        {"licence": duty.licence, "always": duty.outcome == "fires", "any_of": list(duty.words), "where": duty.where,
         "duty": duty.text}
        for duty in duties if duty.kind == "display" and duty.outcome != "not"
    ]  # fmt: skip


def stop_tokens_of(folder: Path) -> frozenset[int]:
    """Return the tokens a model ends with, as its own files say."""
    files = [folder / name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
    told = [read_json(file).get("eos_token_id") for file in files]
    return frozenset(end for each in told for end in (each if isinstance(each, list) else [each]) if end is not None)
