"""How much a client may ask for, and how much all of them together."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Limits(BaseModel, extra="forbid", strict=True, frozen=True):
    """Bounds on memory and time. Each request holds at most its body, its unread tokens and the socket's buffer."""

    max_queue: int = Field(default=256, ge=1, description="requests at once, running and waiting; more get a 429")
    max_request_bytes: int = Field(default=4 << 20, ge=1, description="size of one request's body")
    timeout: float = Field(default=600.0, gt=0, description="seconds for one request, waiting included")
    body_timeout: float = Field(default=30.0, gt=0, description="seconds for a client to send its request")
    max_choices: int = Field(default=64, ge=1, description="completions in one request, prompts times n")
    max_unread: int = Field(default=8192, ge=1, description="tokens kept for a slow reader; with more it is cut off")
    context: int | None = Field(default=None, ge=2, description="tokens of prompt and completion; None: the model's")
    max_connections: int = Field(default=2048, ge=1, description="open connections; more are answered 503")
    drain: int = Field(default=30, ge=0, description="seconds that requests under way have to end after SIGTERM")
