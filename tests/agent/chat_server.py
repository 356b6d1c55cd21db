"""An OpenAI-compatible chat endpoint that says what it was told to, for tests: a real server on a real port."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


class ChatServer:
    """Answers each request with the next line; `asked` holds the messages of all. A line that is a number is a status."""

    def __init__(self, lines: Iterable[str | int]) -> None:
        self.asked: list[list[dict[str, str]]] = []
        said, asked = iter(lines), self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "scripted"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.path.endswith("/chat/completions"):  # it speaks text only
                    self.answer(404, {"error": {"message": "not found"}})
                    return
                asked.append(body["messages"])
                line = next(said, "There is nothing left to say.")
                message = {"message": {"role": "assistant", "content": line}, "finish_reason": "stop"}
                status = line if isinstance(line, int) else 200
                self.answer(status, {"choices": [message]} if status == 200 else {"error": {"message": "not now"}})

            def answer(self, status: int, body: Any) -> None:
                sent = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
