"""A policy over HTTP: any vLLM or SGLang server, token ids in and out.

**Which log-probs.** A server reports one number a token, and what it means depends on the server and how it was started:
`raw` (temperature 1, nothing cut off: vLLM by default), `scaled` (after temperature, before top-k and top-p: SGLang by
default) or `processed` (the distribution sampled from: vLLM with `--logprobs-mode processed_logprobs`). No reply says
which, so it is found out when the policy is opened: the same likeliest tokens are asked for twice, at temperature 0 and at
temperature 2 with top_k 1. At temperature 1 with nothing cut off, which is what RL samples with, all three are one number
and both log-probs are exact. At temperature 0 the token was certain: the log-prob it was drawn with is 0. Otherwise the
one that the server does not tell is NaN, or the request is refused, as set.

**Versions.** A token carries the version the server reports with it (SGLang, where it is a number), else `policy.version`
as it is when the token arrives; whoever updates the weights sets it.

**Faults.** A request is sent again only while nothing came of it: no connection, 429 or 503, a connection lost before the
first token. What breaks later is `ServerFailed`; half a completion is never returned. Cancelling closes the connection,
on which both servers abort the request.

How vLLM and SGLang are asked for tokens and how they answer: bodies out, server-sent events in. No I/O.

Both take sampling defaults from the model's own `generation_config.json` or from flags, so every setting is sent. What
stops a completion is the caller's affair: the model's end-of-text token stops it only where it is among `stop_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field

from etude.errors import UserError, nearest, one_line
from etude.inference.policy import Busy, Completion, PolicyInfo, Sampling, Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    OnTokens = Callable[[list[Token]], None] | None
    T = TypeVar("T")

# SGLang streams all it has so far in every event, unless started with --incremental-streaming-output: long completions
# that nobody watches come in fewer, larger pieces.
UNWATCHED_INTERVAL = 32
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
Pairs = tuple[tuple[int, float], ...]  # token ids and log-probs


@dataclass(frozen=True)
class Piece:
    """What one event adds."""

    tokens: list[tuple[int, float, Pairs]]  # id, log-prob (whatever the server means by it), alternatives
    finish: str | None = None
    stopped_by: int | str | None = None
    cached: int = 0
    version: int | None = None


@dataclass(frozen=True)
class Dialect:
    """One kind of server."""

    name: str
    path: str
    body: Callable[[str, Sequence[int], Sampling, bool], dict[str, Any]]  # model, prompt, sampling, is it watched
    read: Callable[[Any, int, int], Piece]  # event, tokens had before, alternatives wanted


def message_in(body: str) -> str:
    """Return the text of an error, however the server wraps it."""
    try:
        said = json.loads(body)
        for key in ("error", "message", "detail"):
            said = said.get(key, said) if isinstance(said, dict) else said
    except ValueError:
        said = body
    return " ".join(str(said).split())[:300]


def _common(sampling: Sampling) -> dict[str, Any]:
    return PLAIN | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(sampling.stop_tokens),
        "skip_special_tokens": False,  # a stop text may be the text of a special token
    }


def _reported(rows: Any, tops: Any, count: int) -> list[tuple[int, float, Pairs]]:
    """Return (id, log-prob, the `count` likeliest) a token; the sampled token is among the likeliest only if it is one."""
    best = (tuple(sorted(top, key=lambda pair: -pair[1])[:count]) for top in tops)
    return [(operator.index(token), float(number), top) for (token, number), top in zip(rows, best, strict=True)]


def _vllm_body(model: str, prompt: Sequence[int], sampling: Sampling, _watched: bool) -> dict[str, Any]:  # noqa: FBT001
    asked = {"model": model, "prompt": list(prompt), "max_tokens": sampling.max_tokens}
    drawn = {"top_k": sampling.top_k, "seed": sampling.seed, "ignore_eos": True}
    told = {"logprobs": sampling.alternatives, "return_token_ids": True, "return_tokens_as_token_ids": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return _common(sampling) | asked | drawn | told | stream


def _vllm_read(event: Any, _have: int, count: int) -> Piece:
    cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not event["choices"]:
        return Piece([], cached=cached)
    choice = event["choices"][0]
    ids, told = choice.get("token_ids"), choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
    if ids is None:
        raise UserError("the server returns no token ids; vLLM from 0.10.2 on does, and so does etude: update it")
    tops = [[(int(name.removeprefix("token_id:")), top[name]) for name in top] for top in told["top_logprobs"]]
    rows = list(zip(ids, told["token_logprobs"], strict=True))
    return Piece(_reported(rows, tops, count), choice["finish_reason"], choice.get("stop_reason"), cached)


def _sglang_body(_model: str, prompt: Sequence[int], sampling: Sampling, watched: bool) -> dict[str, Any]:  # noqa: FBT001
    parameters = {
        "max_new_tokens": sampling.max_tokens,
        "top_k": sampling.top_k or -1,
        "ignore_eos": not sampling.stop_tokens,  # it would ignore those too
        "stream_interval": 1 if watched else UNWATCHED_INTERVAL,
    }
    told = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.alternatives}
    return {"input_ids": list(prompt), "sampling_params": _common(sampling) | parameters, "stream": True} | told


def _sglang_read(event: Any, have: int, count: int) -> Piece:
    meta = event["meta_info"]
    stop, total, version = meta["finish_reason"] or {}, meta["completion_tokens"], str(meta.get("weight_version"))
    rows = _new(meta.get("output_token_logprobs") or [], have, total)
    if len(rows) != total - have:
        raise UserError("the server returns no token ids with log-probs; SGLang's own /generate does: update it")
    tops = _new(meta["output_top_logprobs"], have, total) if count else [[]] * len(rows)
    tokens = _reported([row[1::-1] for row in rows], [[tuple(row[1::-1]) for row in top] for top in tops], count)
    finish = f"abort: {stop.get('message')}" if stop.get("type") == "abort" else stop.get("type")
    number = int(version) if version.isdecimal() else None
    return Piece(tokens, finish, stop.get("matched"), meta.get("cached_tokens") or 0, number)


def _new(rows: list[Any], have: int, total: int) -> list[Any]:
    """Return the rows that are new, from an event that holds all of them so far or only the new ones."""
    return rows[have:total] if len(rows) >= total else rows[: total - have]


VLLM = Dialect("vLLM", "/v1/completions", _vllm_body, _vllm_read)
SGLANG = Dialect("SGLang", "/generate", _sglang_body, _sglang_read)


Meaning = Literal["raw", "scaled", "processed"]
PROBE_TOKENS = 4
ADDRESS = r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/\S*)?"
RUBBISH = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # what reading a reply of another shape raises


class RemoteSettings(BaseModel):
    """How patient a remote policy is, and what it insists on."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    connect: float = Field(default=5.0, gt=0, description="seconds to wait for a connection")
    first_token: float = Field(
        default=600.0, gt=0, description="seconds to wait for the first token, queueing included"
    )
    between_tokens: float = Field(default=120.0, gt=0, description="seconds to wait for each further piece of a stream")
    total: float = Field(default=3600.0, gt=0, description="seconds a whole completion may take")
    retries: int = Field(default=5, ge=0, description="times a request is sent again of which nothing came")
    backoff: float = Field(default=0.5, gt=0, description="seconds before the first retry; doubles each time")
    longest_wait: float = Field(default=30.0, gt=0, description="seconds before a retry, at most; asked for more: busy")
    require_logprob: bool = Field(default=False, description="refuse requests whose log-prob as drawn would be NaN")
    require_raw_logprob: bool = Field(default=False, description="refuse requests whose raw log-prob would be NaN")


class ServerFailed(UserError):  # noqa: N818 - a state of the server
    """The server or the way to it broke: nothing is wrong with the request, and nothing of its result can be used."""


class _TryAgain(Exception):  # noqa: N818 - a state, not a mistake
    """Nothing came of an attempt; `final` is what to raise when no attempt is left."""

    def __init__(self, final: Exception, after: float = 0.0) -> None:
        self.final, self.after = final, after


def told(meaning: Meaning, sampling: Sampling) -> tuple[bool, bool]:
    """Return whether the server's number is the log-prob the token was drawn with, and whether it is the raw one."""
    scaled = sampling.temperature not in {0.0, 1.0}
    cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
    if meaning == "scaled":
        return not cut, not scaled
    return meaning == "processed" or not (scaled or cut), meaning == "raw" or not (scaled or cut)


def meaning_of(greedy: Sequence[float], hot: Sequence[float]) -> Meaning:
    """Return what a server's numbers mean, from those of the same tokens at temperature 0, and 2 with top_k 1."""
    if all(abs(number) < 1e-5 for number in hot):
        return "processed"  # one token was left to choose from
    same = all(math.isclose(one, two, rel_tol=0.02, abs_tol=0.02) for one, two in zip(greedy, hot, strict=True))
    return "raw" if same else "scaled"  # bf16 differs by a hundredth, temperature 2 by far more


class _Answer:
    """What came of one request so far."""

    def __init__(self, sampling: Sampling, meaning: Meaning) -> None:
        self.sampling = sampling
        self.drawn, self.raw = (0.0 if known else math.nan for known in told(meaning, sampling))  # added to the number
        self.tokens: list[Token] = []
        self.last, self.cached = Piece([]), 0

    def add(self, piece: Piece, version: int) -> list[Token]:
        """Take in a piece and return its tokens."""
        stamp = version if piece.version is None else piece.version
        certain = self.sampling.temperature == 0
        fresh = [
            Token(token, 0.0 if certain else number + self.drawn, number + self.raw, stamp, others)
            for token, number, others in piece.tokens
        ]
        self.tokens += fresh
        self.last = piece if piece.finish else self.last
        self.cached = max(self.cached, piece.cached)
        return fresh

    def completion(self, url: str) -> Completion:
        """Return the whole, or say why there is none."""
        finish, stop = self.last.finish, self.last.stopped_by
        if finish == "length":
            return Completion(self.tokens, "length", cached=self.cached)
        if finish != "stop":
            raise ServerFailed(f"{url} ended after {len(self.tokens)} tokens, saying {finish!r}; see its log")
        if stop not in self.sampling.stop_tokens | set(self.sampling.stop):
            advice = "if it is the model's end of text, add it to stop_tokens: given others, SGLang stops there too"
            raise UserError(f"{url} stopped at {stop!r}, which is not among the stops asked for; {advice}")
        return Completion(self.tokens, "stop", stop, self.cached)


class RemotePolicy:
    """A `Policy` over a vLLM or SGLang server; made by `open`."""

    def __init__(self, url: str, vocabulary: int, token: str, settings: RemoteSettings) -> None:
        self.version = 0  # of the weights; set by whoever updates them
        self._settings, self._dialect, self._info = settings, VLLM, PolicyInfo("", 0, vocabulary)
        self._meaning: Meaning = "raw"  # until `open` has found out: then raw log-probs are the numbers as they came
        self._url = url.rstrip("/").removesuffix("/v1")
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False
        self._client = httpx2.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx2.Timeout(None, connect=settings.connect),  # the rest is timed by tokens, in _attempt
            limits=httpx2.Limits(),  # none: the server knows how many requests it takes
            verify=self._url.startswith("https:"),  # loading certificates takes a tenth of a second
            trust_env=False,
        )

    @classmethod
    async def open(
        cls, url: str, vocabulary: int, model: str = "", token: str = "", settings: RemoteSettings | None = None
    ) -> RemotePolicy:
        """Connect to the server at `url`, for example http://127.0.0.1:8000, and find out what its log-probs mean.

        `vocabulary` is the caller's: one more than the largest id it may send. `model` is a name the server serves, by
        default its first; `token` goes out as `Authorization: Bearer`. Proxies in the environment are not used.
        """
        if not re.fullmatch(ADDRESS, url):
            raise UserError(f"{url!r} is not the address of a server; write it like http://127.0.0.1:8000")
        policy = cls(url, vocabulary, token, settings or RemoteSettings())
        try:
            card, context = await policy._insist(lambda: policy._card(model))
            policy._dialect = SGLANG if card.get("owned_by") == "sglang" else VLLM
            policy._info = PolicyInfo(card["id"], context, vocabulary)
            policy._meaning = await policy._find_meaning()
        except BaseException:
            await policy.close()
            raise
        policy._info.details.update(url=policy._url, server=policy._dialect.name, logprobs=policy._meaning)
        return policy

    @property
    def info(self) -> PolicyInfo:
        """Return the served model's name and context; `details` says what the server's log-probs mean."""
        return self._info

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,  # noqa: ARG002 - both servers find shared prefixes by themselves
        on_tokens: OnTokens = None,
    ) -> Completion:
        """Return a completion. UserError: the request is wrong. ServerFailed: the server is. Busy: not now."""
        self._check(prompt, sampling)
        return await self._sample(prompt, sampling, on_tokens)

    async def close(self) -> None:
        """Close all connections; requests under way end with `ServerFailed`."""
        self._closed = True
        for limit in self._limits:
            limit.reschedule(0)
        await self._client.aclose()

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse here what the server would refuse, ignore or not tell."""
        if not prompt:
            raise UserError("the prompt is empty; give at least one token id")
        for token in {*prompt, *sampling.stop_tokens}:
            if not 0 <= token < self._info.vocabulary:
                raise UserError(f"token id {token} is outside the vocabulary of {self._info.vocabulary}")
        if len(prompt) + sampling.max_tokens > self._info.context:
            asked = f"{len(prompt)} tokens of prompt and max_tokens = {sampling.max_tokens}"
            raise UserError(f"{asked} are more than the context of {self._info.context} tokens of {self._info.name}")
        if sampling.experts:
            raise UserError(f"{self._url} cannot return routed experts; use the local engine")
        if sampling.seed is not None and sampling.temperature > 0 and self._dialect is SGLANG:
            raise UserError("SGLang heeds no seed of a single request; leave the seed out")
        drawn, raw = told(self._meaning, sampling)
        needs_raw = self._settings.require_raw_logprob or sampling.alternatives
        if (self._settings.require_logprob and not drawn) or (needs_raw and not raw):
            why = f"{self._url} reports {self._meaning} log-probs, not the ones required at this temperature, top_p and top_k"
            raise UserError(f"{why}; use temperature 1 without top_p and top_k, or another --logprobs-mode of vLLM")

    async def _find_meaning(self) -> Meaning:
        """Ask for the same tokens twice; the prompt is the largest id the caller may send, so a smaller vocabulary shows."""
        probe = [self._info.vocabulary - 1]
        greedy = await self._sample(probe, Sampling(PROBE_TOKENS, temperature=0.0))
        hot = await self._sample(probe, Sampling(PROBE_TOKENS, temperature=2.0, top_k=1))
        return meaning_of(greedy.raw_logprobs, hot.raw_logprobs)

    async def _card(self, model: str) -> tuple[dict[str, Any], int]:
        """Return what the server tells of the model asked for, or of its first, and its context."""
        try:
            async with asyncio.timeout(self._settings.first_token):
                reply = await self._client.get("/v1/models")
            await self._refuse(reply)
            cards = reply.json()["data"]
            by_name = {card["id"]: card for card in cards}
            if model and model not in by_name:
                raise UserError(f"{self._url} serves no model {model!r}{nearest(model, by_name)}")
            card = by_name[model or cards[0]["id"]]
            return card, int(card.get("max_model_len") or cards[0]["max_model_len"])  # an adapter has its base's
        except TimeoutError:
            raise ServerFailed(self._why_late(0, late=False)) from None
        except httpx2.RequestError as error:
            raise _TryAgain(self._lost(error, tokens=0)) from error
        except RUBBISH as error:
            raise ServerFailed(f"{self._url}/v1/models tells no model: no vLLM or SGLang server") from error

    async def _sample(self, prompt: Sequence[int], sampling: Sampling, on_tokens: OnTokens = None) -> Completion:
        body = self._dialect.body(self._info.name, prompt, sampling, on_tokens is not None)
        end = asyncio.get_running_loop().time() + self._settings.total
        return await self._insist(lambda: self._attempt(body, sampling, on_tokens, end))

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Attempt until something comes of it or the retries are used up."""
        wait, left = self._settings.backoff, self._settings.retries
        while True:
            try:
                return await attempt()
            except _TryAgain as again:
                if not left or again.after > self._settings.longest_wait:
                    raise again.final from again.__cause__
                pause = max(again.after, wait * random.uniform(0.5, 1.0))  # noqa: S311 - so that all do not come at once
                await asyncio.sleep(min(pause, self._settings.longest_wait))
                wait, left = 2 * wait, left - 1

    async def _attempt(self, body: Any, sampling: Sampling, on_tokens: OnTokens, end: float) -> Completion:
        if self._closed:
            raise ServerFailed(f"the policy at {self._url} is closed")
        answer, now = _Answer(sampling, self._meaning), asyncio.get_running_loop().time
        limit = asyncio.timeout_at(min(now() + self._settings.first_token, end))
        self._limits.add(limit)
        try:
            async with limit, self._client.stream("POST", self._dialect.path, json=body) as reply:
                await self._refuse(reply)
                async for piece in self._pieces(reply, answer):
                    fresh = answer.add(piece, self.version)
                    if fresh and on_tokens:
                        on_tokens(fresh)
                    limit.reschedule(min(now() + self._settings.between_tokens, end))
            return answer.completion(self._url)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServerFailed(self._why_late(len(answer.tokens), late=now() >= end)) from None
        except httpx2.RequestError as error:
            lost = self._lost(error, len(answer.tokens))
            raise (lost if answer.tokens else _TryAgain(lost)) from error
        finally:
            self._limits.discard(limit)

    async def _pieces(self, reply: httpx2.Response, answer: _Answer) -> AsyncIterator[Piece]:
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            try:
                event = json.loads(data)
                if event.get("error"):
                    raise self._explained(message_in(data), ServerFailed)
                piece = self._dialect.read(event, len(answer.tokens), answer.sampling.alternatives)
            except RUBBISH as error:
                raise ServerFailed(f"{self._url} sent no reply of {self._dialect.name}: {data[:100]!r}") from error
            for token, *_ in piece.tokens:
                if not 0 <= token < self._info.vocabulary:
                    raise ServerFailed(f"{self._url} sampled {token}, outside the caller's vocabulary: another model")
            yield piece

    async def _refuse(self, reply: httpx2.Response) -> None:
        """Raise what a status other than 200 means."""
        if reply.status_code == 200:
            return
        said = f"{message_in((await reply.aread()).decode(errors='replace'))} (status {reply.status_code})"
        if reply.status_code in {429, 503}:
            asked = reply.headers.get("retry-after", "")
            after = float(asked) if asked.isdecimal() else 0.0  # a date is left to our own backoff
            raise _TryAgain(Busy(after or self._settings.longest_wait), after)
        raise self._explained(said, UserError if reply.status_code < 500 else ServerFailed)

    def _explained(self, said: str, fault: type[UserError]) -> UserError:
        """Say in our words what a server's message comes down to."""
        if "vocab" in said.lower():
            return UserError(f"{self._url} does not know all {self._info.vocabulary} ids: another model; {said}")
        if "context length" in said or "max_model_len" in said:
            return UserError(f"the request is too long for {self._info.name} at {self._url}: {said}")
        if "(status 401)" in said or "(status 403)" in said:
            return UserError(f"{self._url} asks for a token; pass the one it was started with: {said}")
        return fault(f"{self._url} {'failed' if fault is ServerFailed else 'refuses the request'}: {said}")

    def _why_late(self, tokens: int, *, late: bool) -> str:
        if self._closed:
            return f"the policy at {self._url} was closed after {tokens} tokens"
        if late:
            return f"{self._url} took longer than {self._settings.total:g} s in all; {tokens} tokens came"
        if tokens:
            return f"{self._url} sent nothing for {self._settings.between_tokens:g} s after {tokens} tokens"
        return f"{self._url} sent nothing in {self._settings.first_token:g} s; it is overloaded, stuck or no vLLM or SGLang"

    def _lost(self, error: Exception, tokens: int) -> ServerFailed:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return ServerFailed(f"no server at {self._url} ({one_line(error)}); start it, or check the address")
        return ServerFailed(f"{self._url} hung up after {tokens} tokens ({one_line(error)}); see its log")
