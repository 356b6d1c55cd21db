"""Requests as OpenAI's clients write them.

What would change the answer and is not understood here is refused by name; what changes nothing is accepted. A null is the same
as nothing, except inside a tool's JSON schema.

What goes wrong with a request, as OpenAI's clients expect to hear it: a status and `{"error": {…}}`.

How much a client may ask for, and how much all of them together.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import from_json

from etude.errors import UserError, nearest, one_line
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


HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"}
ASKS_NOTHING: dict[str, list[Any]] = {  # fields that are not understood, and the values with which they change nothing
    "audio": [], "best_of": [1], "echo": [False], "frequency_penalty": [0], "function_call": ["none"], "functions": [[]],
    "ignore_eos": [False], "logit_bias": [{}], "min_p": [0], "modalities": [["text"]], "parallel_tool_calls": [True],
    "prediction": [], "presence_penalty": [0], "reasoning_effort": [], "repetition_penalty": [1],
    "response_format": [{"type": "text"}], "suffix": [""], "verbosity": [], "web_search_options": [],
}  # fmt: skip
ECHOED = {"annotations", "provider_specific_fields"}  # of an answer that a client sends back in the conversation


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parsed(value: Any) -> Any:
    return from_json(value or "{}") if isinstance(value, str) else value


def _joined(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and type(part.get("text")) is str):
            raise ValueError("this model reads text only; give a text or a list of {type: text, text: …}")
    return "".join(part["text"] for part in value)


def _prompts(value: Any) -> Any:
    prompts = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not (isinstance(prompts, list) and prompts and all(type(one) is str or _is_tokens(one) for one in prompts)):
        raise ValueError("give a text, a list of token ids, or a list of such prompts")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


Role = Literal["system", "developer", "user", "assistant", "tool"]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Wire(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A JSON object of a request."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and key not in ECHOED}


class Function(Wire):
    """A tool as a template shows it to the model."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Literal[False] = Field(default=False, exclude=True)  # nobody here forces the model to keep to a schema


class Tool(Wire):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class FunctionCall(Wire):
    """A call in an earlier answer. Templates want the arguments as an object; clients send them as text."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)] = {}


class ToolCall(Wire):
    """One call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int = Field(default=0, exclude=True)
    function: FunctionCall


class Message(Wire):
    """One message of a conversation."""

    role: Annotated[
        Role, AfterValidator(lambda role: "system" if role == "developer" else role)
    ]  # templates know no other
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(Wire):
    """What else a stream tells."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(Wire):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1)
    stop: Annotated[list[StopText], Field(max_length=16), BeforeValidator(_listed)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_cache_key: str | None = None  # requests of one conversation name the same one, and share what was computed
    return_token_ids: bool = False  # as vLLM has it


class ChatRequest(Request):
    """A request for the next message."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"  # a call cannot be forced here
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def offered(self) -> list[Tool]:
        """The tools the model hears of."""
        return self.tools if self.tool_choice == "auto" else []

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are wanted at each place; None: no log-probs at all."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None


class CompletionRequest(Request):
    """A request to go on with a text, or with tokens."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are wanted at each place; None: no log-probs at all."""
        return self.logprobs


AnyRequest = TypeVar("AnyRequest", bound=Request)


def parse(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Return a checked request, or say what is wrong with it and where."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {one_line(error)}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body is JSON, but not an object")
    asked = {key: value for key, value in given.items() if _asks(key, value)}
    for key in asked.keys() - kind.model_fields.keys():
        advice = "leave it out" if key in ASKS_NOTHING else f"no such field{nearest(key, kind.model_fields)}"
        raise ApiError(400, f"{key[:80]!r} is not supported by this server: {advice}", param=key[:80])
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{where}: {first['msg']}", param=where) from None


def _asks(key: str, value: Any) -> bool:
    return not (value is None or key in HARMLESS or value in ASKS_NOTHING.get(key, []))


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
