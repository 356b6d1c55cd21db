"""The token API: a policy over HTTP, in vLLM's words, so that our engine and a vLLM server are the same to a client.

    POST /inference/v1/generate        token ids in; token ids, log-probs, weight versions and routed experts out, whole or streamed
    POST /inference/v1/abort_requests  end requests by their `request_id`; their last event says "abort"
    POST /pause /resume /start_weight_update /update_weights /finish_weight_update, GET /is_paused /weight_info
                                       the weight life cycle; only where a weight store is given

Beyond vLLM: every event carries the spans of `weight_versions` so far, not only the last, so that whoever loses this server half-way
knows which weights wrote what came; and a token whose log-prob under the distribution sampled from (after temperature, top-k, top-p)
differs from the model's own has that as `sampled_logprob`. `update_weights` brings a version of the store to the device while
tokens are written; `finish_weight_update` puts it in place between two steps, and requests in flight go on with it.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.inference.http import ApiError, Endpoint, Listed, StreamOptions, Wire, parse, running, supported
from etude.inference.policy import Sampling, to_npy
from etude.inference.weight_sync import BrokenStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.applications import Starlette
    from starlette.requests import Request

    from etude.inference.http import Inbox, Reply, Served, Tasks
    from etude.inference.policy import Completion, Token
    from etude.inference.weight_sync import Receiver

LEAST = -9999.0  # what clients expect for a log-prob of minus infinity, which JSON cannot say
SESSION = b"x-session-id"  # requests of one session extend each other: what was computed is kept


class SamplingParams(Wire):
    """How to sample, under vLLM's names and defaults."""

    max_tokens: int | None = None  # None: what fits
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or −1: all
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=1)
    stop: Annotated[list[str], Listed] = Field(default=[])
    stop_token_ids: list[int] = Field(default=[])
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    routed_experts: bool = False  # ours: vLLM returns them where its server was started so
    routed_experts_prompt_start: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return supported(given, cls) if isinstance(given, dict) else given

    def sampling(self, room: int, ends: frozenset[int]) -> Sampling:
        """Return the same as our own; `room`: tokens that fit after the prompt, `ends`: the model's end tokens."""
        return Sampling(
            self.max_tokens if self.max_tokens is not None else max(1, room), self.temperature, self.top_p, max(0, self.top_k),
            self.seed, frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else ends), tuple(self.stop),
            self.logprobs or 0, self.routed_experts, self.routed_experts_prompt_start,
        )  # fmt: skip


class TokenRequest(Wire):
    """A request for tokens."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class TokenEndpoint(Endpoint):
    """`/inference/v1/generate`."""

    def __init__(self, served: Served, model: str, ends: frozenset[int]) -> None:
        super().__init__(served, "generate")
        self.model, self.ends = model, ends
        self.aborting: dict[str, asyncio.Task[Completion]] = {}

    async def answer(self, body: bytes, headers: dict[bytes, bytes], reply: Reply) -> None:
        request = parse(body, TokenRequest)
        if request.model not in {None, self.model}:
            raise ApiError(404, f"there is no model {request.model!r} here, only {self.model!r}", param="model")
        inbox = self.served.inbox() if request.stream else None
        session = headers.get(SESSION, b"").decode() or None
        async with running(self.served.policy, [self._order(request)], session, inbox) as tasks:
            self.aborting[request.request_id] = tasks[0]
            try:
                await (self._stream(request, tasks, inbox, reply) if inbox else self._whole(request, tasks, reply))
            except asyncio.CancelledError:
                if not tasks[0].cancelled():  # the client went away
                    raise
                aborted = {"index": 0, "token_ids": [], "finish_reason": "abort"}
                message = {"request_id": request.request_id, "choices": [aborted]}
                await (reply.event(message, last=True) if inbox else reply.json(200, message))
            else:
                self.served.count(len(request.token_ids), [tasks[0].result()])
            finally:
                del self.aborting[request.request_id]

    def _order(self, request: TokenRequest) -> tuple[list[int], Sampling]:
        context = min(self.served.policy.info.context, self.served.limits.context or 1 << 62)
        room = context - len(request.token_ids)
        sampling = request.sampling_params.sampling(room, self.ends)
        if sampling.max_tokens > room:
            into = f"{len(request.token_ids)} tokens of prompt and {sampling.max_tokens} to be sampled"
            raise ApiError(400, f"{into} are more than the context length of {context}")
        return request.token_ids, sampling

    async def _whole(self, request: TokenRequest, tasks: Tasks, reply: Reply) -> None:
        done = await asyncio.shield(tasks[0])
        await reply.json(
            200, _Shape(request).event(done.tokens, done) | {"usage": usage(len(request.token_ids), [done])}
        )

    async def _stream(self, request: TokenRequest, tasks: Tasks, inbox: Inbox, reply: Reply) -> None:
        shape = _Shape(request)
        async for _, tokens, completion in self.served.as_they_come(tasks, inbox):
            if completion is None:
                await reply.event(shape.event(tokens, None))
                continue
            end: list[dict[str, Any]] = [shape.event(completion.tokens[shape.sent :], completion)]
            if request.stream_options.include_usage:
                counts = usage(len(request.token_ids), [completion])
                end.append({"request_id": request.request_id, "choices": [], "usage": counts})
            await reply.event(*end, b"[DONE]", last=True)

    async def abort(self, request: Request) -> dict[str, Any]:
        """End the requests of some ids."""
        names = (await request.json()).get("request_ids")
        if not isinstance(names, list):
            raise ApiError(400, "request_ids: give a list of the ids of requests")
        for name in names:
            if task := self.aborting.get(name):
                task.cancel()
        return {}


class _Shape:
    """Tokens of one request as vLLM writes them."""

    def __init__(self, request: TokenRequest) -> None:
        self.id, self.counted = request.request_id, request.sampling_params.logprobs
        self.sent = 0
        self.spans: list[dict[str, Any]] = []

    def event(self, tokens: Sequence[Token], completion: Completion | None) -> dict[str, Any]:
        for version, same in itertools.groupby(token.version for token in tokens):
            end = self.sent + len(list(same))
            if self.spans and self.spans[-1]["version"] == str(version):
                self.spans[-1]["end"] = end
            else:
                self.spans.append({"version": str(version), "start": self.sent, "end": end})
            self.sent = end
        choice: dict[str, Any] = {
            "index": 0, "token_ids": [token.id for token in tokens], "finish_reason": None, "weight_versions": self.spans
        }  # fmt: skip
        if self.counted is not None:
            choice["logprobs"] = {"content": [_logprob(token) for token in tokens]}
        if completion:
            choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stopped_by}
            if completion.experts is not None:
                choice["routed_experts"] = to_npy(completion.experts)
        return {"request_id": self.id, "choices": [choice]}


def _logprob(token: Token) -> dict[str, Any]:
    entry: dict[str, Any] = {"token_id": token.id, "logprob": max(token.raw_logprob, LEAST)}
    if token.logprob != token.raw_logprob:
        entry["sampled_logprob"] = token.logprob
    if token.alternatives:
        others = [{"token_id": other, "logprob": max(value, LEAST)} for other, value in token.alternatives]
        entry["top_logprobs"] = others
    return entry


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return how many tokens went in and came out."""
    out = sum(len(completion.tokens) for completion in completions)
    cached = min(prompt_tokens, sum(completion.cached for completion in completions))
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": out, "total_tokens": prompt_tokens + out}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def weight_routes(served: Served, receiver: Receiver) -> list[Route]:
    """The weight life cycle of our engine; its weights come from one store."""
    lock, policy = asyncio.Lock(), receiver.policy

    async def update(request: Request) -> dict[str, Any]:
        version = (await request.json()).get("update_info", {}).get("version")
        if type(version) is not int:
            raise ApiError(400, "update_info.version: give the number of a version of the weight store")
        async with lock:
            try:
                await receiver.stage(version)
            except BrokenStore as error:
                raise ApiError(409, str(error)) from None
        return {"message": "Weights updated"}

    async def finish(_: Request) -> dict[str, Any]:
        async with lock:
            return {"message": "Weight update finished", **asdict(await receiver.commit())}

    async def pause(request: Request) -> dict[str, Any]:
        if (mode := request.query_params.get("mode", "abort")) != "keep":
            raise ApiError(400, f"mode = {mode!r}: this engine pauses with mode=keep only; abort requests by their ids")
        await policy.pause(wanted=True)
        return {"status": "paused"}

    async def resume(_: Request) -> dict[str, Any]:
        await policy.pause(wanted=False)
        return {"status": "resumed"}

    return [
        # Nothing stops before the weights are there.
        served.route("/start_weight_update", lambda _: {"message": "Weight update started"}, "POST"),
        served.route("/update_weights", update, "POST"),
        served.route("/finish_weight_update", finish, "POST"),
        served.route("/pause", pause, "POST"),
        served.route("/resume", resume, "POST"),
        served.route("/weight_info", lambda _: {"weight_version": str(receiver.version)}),
        served.route("/is_paused", lambda _: {"is_paused": policy.paused}),
    ]


def build_app(
    served: Served, card: dict[str, Any], ends: frozenset[int], receiver: Receiver | None = None, more: Sequence[Route] = (),
    on_end: Callable[[], None] = lambda: None,
) -> Starlette:  # fmt: skip
    """Return the application: the token API, the weight life cycle if there is a receiver, and `more`. Its end closes the policy.

    `card`: what `/v1/models` says of the model; `ends`: tokens that end a completion unless a request ignores them.
    """
    policy, name, info = served.policy, card["id"], served.policy.info
    limit = min(info.context, served.limits.context or info.context)
    about = {"object": "model", "owned_by": "etude", "max_model_len": limit, "vocabulary": info.vocabulary, **card}
    generate = TokenEndpoint(served, name, ends)

    def model(request: Request) -> dict[str, Any]:
        if request.path_params["name"] != name:
            raise ApiError(404, f"there is no such model here, only {name!r}", code="model_not_found")
        return about

    async def health(_: Request) -> JSONResponse:
        if beat := getattr(policy, "beat", None):
            await beat()  # the engine's thread may hang while this one is well
        return JSONResponse({"status": "ok", "model": name, "in_flight": served.in_flight})

    async def close() -> None:
        on_end()
        await policy.close()

    routes = [
        Route("/inference/v1/generate", generate, methods=["POST"]),
        *(served.route(f"{prefix}/abort_requests", generate.abort, "POST") for prefix in ("/inference/v1", "")),
        served.route("/v1/models", lambda _: {"object": "list", "data": [about]}),
        served.route("/v1/models/{name:path}", model),
        *(weight_routes(served, receiver) if receiver else ()),
        Route("/health", health),
        *more,
    ]
    return served.app(routes, close)
