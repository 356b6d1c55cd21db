"""What goes wrong with a request, as OpenAI's clients expect to hear it: a status and `{"error": {…}}`."""

from __future__ import annotations

import logging
import math
from typing import Any

from etude.errors import UserError
from etude.inference.policy import Busy

log = logging.getLogger("etude.serve")


class ApiError(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: dict[str, str] = {"www-authenticate": "Bearer"} if status == 401 else {}

    def body(self) -> dict[str, Any]:
        """Return the error as clients read it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error. One that nobody foresaw is told to the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, Busy):
        busy = ApiError(429, str(error), code="queue_full")
        busy.headers["retry-after"] = str(max(1, math.ceil(error.after)))
        return busy
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows; ask for fewer tokens", code="timeout")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why")
