"""Requests as OpenAI's clients write them. A null is the same as nothing, except inside a tool's JSON schema."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import from_json

from etude.inference.http import Listed, StreamOptions, Wire


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


class Function(Wire):
    """A tool as a template shows it to the model."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = Field(default=False, exclude=True)  # not for the template


class Tool(Wire):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Wire):
    """A tool by its name."""

    name: str


class NamedTool(Wire):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Wire):
    """A schema that the reply must keep to; it always does, strict or not."""

    name: str = ""
    description: str = ""
    given: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(Wire):
    """What the reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of(self) -> dict[str, Any]:
        """Return the schema of a reply in JSON."""
        return self.json_schema.given if self.type == "json_schema" and self.json_schema else {"type": "object"}


class FunctionCall(Wire):
    """A call in an earlier answer. Templates want the arguments as an object; clients send them as text."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)] = Field(default={})


class ToolCall(Wire):
    """One call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int = Field(default=0, exclude=True)
    function: FunctionCall


class Message(Wire):
    """One message of a conversation."""

    role: Annotated[Role, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Request(Wire):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1)
    stop: Annotated[list[StopText], Field(max_length=16), Listed] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_cache_key: str | None = None  # requests of one conversation name the same one, and share what was computed
    return_token_ids: bool = False  # as vLLM has it


class ChatRequest(Request):
    """A request for the next message."""

    prompts: ClassVar = 1
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] = Field(default=[])
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    # the template's to heed
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def offered(self) -> list[Tool]:
        """The tools the model hears of."""
        return self.tools if self.tool_choice != "none" else []

    @property
    def forces_one(self) -> bool:
        """Whether one tool is named that must be called, once."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def forced(self) -> list[Tool]:
        """The tools of which one must be called; none: the model may answer in text."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []

    @model_validator(mode="after")
    def _has_what_is_forced(self) -> Self:
        known = {tool.function.name for tool in self.tools}
        if self.tool_choice == "required" and not known:
            raise ValueError("tool_choice is required, but there are no tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in known:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.response_format and self.response_format.type == "json_schema" and not self.response_format.json_schema:
            raise ValueError("response_format json_schema has no json_schema")
        return self

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are wanted at each place; None: no log-probs at all."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None


class CompletionRequest(Request):
    """A request to go on with a text, or with tokens."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> int:
        """How many there are."""
        return len(self.prompt)

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are wanted at each place; None: no log-probs at all."""
        return self.logprobs
