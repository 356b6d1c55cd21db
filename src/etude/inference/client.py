"""The one client of the token API: a policy at an address, whether our engine answers there or a vLLM server.

An address is `http://HOST:PORT`, with or without /v1, or `unix:/PATH`. A vLLM server speaks the token API when it was started with
`--enable-scale-out` or `--tokens-only`.

**Which log-probs.** Our engine reports both: under the distribution sampled from, and under the model itself. vLLM reports one
number a token: `raw` (temperature 1, nothing cut off: its default), or `processed` (the distribution sampled from, with
`--logprobs-mode processed_logprobs`). No reply says which, so it is found out when the policy is opened: the same likeliest tokens
are asked for at temperature 0, and at temperature 2 with top_k 1. At temperature 1 with nothing cut off, which is what RL samples
with, they are one number and both log-probs are exact. At temperature 0 the token was certain: the log-prob it was drawn with is
0. Otherwise the one that the server does not report is NaN, or the request is refused, as set.

**Versions.** Every token carries the version of the weights that sampled it, as the server's `weight_versions` say. vLLM sends them
with its last event; until then `on_tokens` sees the version last set through this client.

**Faults.** A request is sent again while nothing came of it: no connection, 429 or 503, a connection lost before the first token.
With `resume` it outlives its server: when the connection is lost, the rest is asked for after the tokens that came, as often as it
takes. Since a seed gives each position its own random number, another engine of ours writes what the first would have written, if
with newer weights. Without `resume` what breaks half-way is `ServerFailed`: half a completion is never returned. Cancelling closes
the connection, on which servers abort the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from etude.errors import UserError, nearest, one_line
from etude.inference.connection import ConnectionLost, Connections, Unreachable
from etude.inference.policy import Busy, Completion, PolicyInfo, Sampling, Token, from_npy
from etude.inference.weight_sync import BrokenStore, Swap

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from etude.inference.connection import Reply
    from etude.inference.policy import OnTokens

    T = TypeVar("T")

Meaning = Literal["both", "raw", "processed"]
PROBE_TOKENS = 4
PROBES = 5
ADDRESS = r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/\S*)?|unix:/.+"
# what reading a reply of another shape raises
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError)
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
BEAT = 1.0  # seconds between two questions whether the server is well


class ClientSettings(BaseModel):
    """How patient the client is, and what it insists on."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    connect: float = Field(default=5.0, gt=0, description="seconds to wait for a connection")
    first_token: float = Field(default=600.0, gt=0, description="seconds to the first token, queueing included")
    between_tokens: float = Field(default=120.0, gt=0, description="seconds to wait for each further event of a stream")
    total: float = Field(default=3600.0, gt=0, description="seconds a whole completion may take")
    retries: int = Field(default=5, ge=0, description="retries of a request that got no answer")
    backoff: float = Field(default=0.5, gt=0, description="seconds before the first retry; doubles each time")
    longest_wait: float = Field(default=30.0, gt=0, description="longest wait before a retry, in seconds")
    resume: bool = Field(default=False, description="wait for a lost server, and resume after the tokens received")
    require_logprob: bool = Field(default=False, description="refuse requests whose log-prob as sampled would be NaN")


OUTLIVING = ClientSettings(
    resume=True, connect=30.0, backoff=0.05, longest_wait=0.5, between_tokens=1e9, first_token=1e9, total=1e9
)


class ServerFailed(UserError):  # noqa: N818 - a state of the server
    """The server or the connection broke: nothing is wrong with the request, and nothing of its result can be used."""


class TryAgain(Exception):  # noqa: N818 - a state, not a mistake
    """Nothing was lost by an attempt; `final` is what to raise when no attempt is left."""

    def __init__(self, final: Exception, after: float = 0.0) -> None:
        self.final, self.after = final, after


def message_in(body: str) -> str:
    """Return the text of an error, however the server wraps it."""
    try:
        message = json.loads(body)
        for key in ("error", "message", "detail"):
            message = message.get(key, message) if isinstance(message, dict) else message
    except ValueError:
        message = body
    return " ".join(str(message).split())[:300]


def exact(meaning: Meaning, sampling: Sampling) -> tuple[bool, bool]:
    """Return whether the server's number is the log-prob the token was sampled with, and whether it is the raw one."""
    plain = sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
    return meaning != "raw" or plain, meaning != "processed" or plain


def meaning_of(greedy: Sequence[float], hot: Sequence[float]) -> Meaning:
    """Return what a server's numbers mean, from those of the same tokens at temperature 0, and 2 with top_k 1."""
    if all(abs(number) < 1e-5 for number in hot):
        return "processed"  # one token was left to choose from
    if all(math.isclose(one, two, rel_tol=0.02, abs_tol=0.02) for one, two in zip(greedy, hot, strict=True)):
        return "raw"  # bf16 differs by a hundredth
    raise UserError("the server reports log-probs after temperature; start vLLM with --logprobs-mode raw_logprobs")


class _Answer:
    """What came of one request so far, over one connection or several."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, meaning: Meaning) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        # added to the number
        self.sampled, self.raw = (0.0 if known else math.nan for known in exact(meaning, sampling))
        self.tokens: list[Token] = []
        self.began = 0  # tokens that came over connections before this one
        self.finish: str | None = None
        self.stop: int | str | None = None
        self.cached = 0
        self.experts: Any = None

    def body(self, model: str) -> bytes:
        """Return the request for what is missing. Servers have defaults of their own, so every setting is sent."""
        own, self.began = self.sampling, len(self.tokens)
        params = NEUTRAL | {
            "max_tokens": own.max_tokens - self.began, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k,
            "seed": own.seed, "stop": list(own.stop), "stop_token_ids": sorted(own.stop_tokens), "ignore_eos": True,
            "skip_special_tokens": False,  # a stop text may be the text of a special token
            # vLLM's list begins with the sampled token, likely or not
            "logprobs": own.alternatives + 1 if own.alternatives else 0,
        }  # fmt: skip
        if own.experts:
            params |= {"routed_experts": True, "routed_experts_prompt_start": own.experts_from}
        text = [*self.prompt, *(token.id for token in self.tokens)]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return to_json({"model": model, "token_ids": text, "sampling_params": params, **stream})

    def add(self, event: Any, version: int) -> list[Token]:
        """Take in an event and return its tokens."""
        usage = event.get("usage") or {}
        self.cached = self.cached or (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not event["choices"]:
            return []
        choice = event["choices"][0]
        ids, entries = choice["token_ids"] or [], (choice.get("logprobs") or {}).get("content") or []
        fresh = [self._token(number, entry, version) for number, entry in zip(ids, entries, strict=True)]
        self.tokens += fresh
        for span in choice.get("weight_versions") or []:
            self._stamp(span["version"], self.began + span["start"], self.began + span["end"])
        if choice.get("routed_experts"):
            self.experts = from_npy(choice["routed_experts"])
        self.finish, self.stop = choice.get("finish_reason"), choice.get("stop_reason")
        return self.tokens[len(self.tokens) - len(fresh) :]

    def _token(self, number: int, entry: Any, version: int) -> Token:
        value, others = entry["logprob"], tuple[tuple[int, float], ...]()
        sampled = 0.0 if self.sampling.temperature == 0 else entry.get("sampled_logprob", value) + self.sampled
        if self.sampling.alternatives:
            pairs = [(int(other["token_id"]), float(other["logprob"])) for other in entry["top_logprobs"]]
            others = tuple(sorted(pairs, key=lambda pair: -pair[1])[: self.sampling.alternatives])
        return Token(number, sampled, value + self.raw, version, others)

    def _stamp(self, version: str, start: int, end: int) -> None:
        if not version.isdecimal():  # vLLM's first is called "default"
            return
        for place in range(start, end):
            if self.tokens[place].version != int(version):
                self.tokens[place] = self.tokens[place]._replace(version=int(version))

    def ended(self) -> bool:
        """Whether all of it came, though the server could not say so any more."""
        if self.tokens and (last := self.tokens[-1].id) in self.sampling.stop_tokens:
            self.finish, self.stop = "stop", last
        elif len(self.tokens) == self.sampling.max_tokens:
            self.finish = "length"
        return self.finish is not None

    def completion(self, url: str) -> Completion:
        """Return the whole, or say why there is none."""
        if self.finish not in {"stop", "length"}:
            raise ServerFailed(f"{url} ended after {len(self.tokens)} tokens, saying {self.finish!r}; see its log")
        return Completion(self.tokens, self.finish, self.stop, self.cached, self.experts)  # type: ignore[arg-type]


class RemotePolicy:
    """A `Policy` at an address; made by `open`."""

    api = "/v1"  # where the models are listed

    def __init__(self, url: str, vocabulary: int, token: str = "", settings: ClientSettings | None = None) -> None:
        if not re.fullmatch(ADDRESS, url):
            raise UserError(f"{url!r} is not the address of a server; write http://127.0.0.1:8000 or unix:/path")
        self.version = 0  # of the weights, as far as they were set through this client
        self.card: dict[str, Any] = {}  # what the server says of its model
        self._settings = settings or ClientSettings()
        self.info = PolicyInfo("", 0, vocabulary)  # `details` says what the server's log-probs mean
        self._meaning: Meaning = "raw"  # until `open` has found out: then raw log-probs are the numbers as they came
        self._url = url.rstrip("/").removesuffix("/v1")
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = Connections(self._url, headers, self._settings.connect)

    @classmethod
    async def open(
        cls, url: str, vocabulary: int = 0, model: str = "", token: str = "", settings: ClientSettings | None = None
    ) -> Self:
        """Connect to a server and find out what its log-probs mean.

        `vocabulary` is one more than the largest id the caller may send; 0: as the server says, which vLLM does not. `model` is a
        name the server serves, by default its first; `token` goes out as `Authorization: Bearer`. Proxies in the environment are
        not used.
        """
        policy = cls(url, vocabulary, token, settings)
        try:
            await policy.connect(model)
        except BaseException:
            await policy.close()
            raise
        return policy

    async def connect(self, model: str = "") -> PolicyInfo:
        """Wait for the server and ask what it serves."""
        self.card = await self.ask_card(model)
        if not self.card["max_model_len"]:
            raise ServerFailed(f"{self._url}/v1/models tells no max_model_len: neither vLLM nor etude")
        vocabulary = self.info.vocabulary or self.card.get("vocabulary", 0)
        self.info = PolicyInfo(self.card["id"], int(self.card["max_model_len"]), vocabulary)
        ours = self.card.get("owned_by") == "etude"
        self._meaning = "both" if ours else await self._find_meaning()
        self.info.details.update(url=self._url, server="etude" if ours else "vLLM", logprobs=self._meaning)
        return self.info

    async def ask_card(self, model: str = "") -> dict[str, Any]:
        """Return what the server says of a model, by default of its first."""
        return await self._insist(lambda: self._card(model))

    async def speaks_tokens(self) -> bool:
        """Whether the server has the token API: one that has none does not know the path."""
        reply = await self._insist(lambda: self._post("/inference/v1/generate", {}, refuse=False))
        if reply.status in {401, 403}:
            raise self._explained(f"{message_in(reply.text)} (status {reply.status})", UserError)
        return reply.status not in {404, 405}

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return a completion. UserError: the request is wrong. ServerFailed: the server is. Busy: not now."""
        self._check(prompt, sampling)
        return await self._sample(prompt, sampling, session, on_tokens)

    async def close(self) -> None:
        """Close all connections; requests that run end with `ServerFailed`."""
        self._closed = True
        for limit in self._limits:
            limit.reschedule(0)
        await self._connections.close()

    async def update_weights(self, version: int) -> Swap:
        """Have our engine take over a version of its weight store. BrokenStore: it cannot be had, and nothing was changed."""
        await self.tell("/start_weight_update")
        await self.tell("/update_weights", {"update_info": {"version": version}})
        reply = await self.tell("/finish_weight_update", {"weight_version": str(version)})
        if reply["version"] < version:  # another engine took over in between, and could not have it
            raise BrokenStore(f"{self._url} is at version {reply['version']}, not {version}")
        self.version = reply["version"]
        return Swap(**{name: reply[name] for name in asdict(Swap(0, 0, 0.0, 0.0))})

    async def tell(self, path: str, body: Any = None) -> Any:
        """Post to a route of the weight life cycle; return what came back."""
        reply = await self._insist(lambda: self._post(path, body or {}))
        return reply.json() if reply.content else None

    async def watch(self, patience: float, on_hung: Callable[[], None]) -> None:
        """Ask once a second whether the server is well, until cancelled; after `patience` seconds without a reply call `on_hung`.

        Only a server that accepts and does not answer hangs: one that is gone is started again by others. Beats are counted, not
        seconds: this side may have been held up itself.
        """
        beat, missed = min(BEAT, patience / 10), 0
        asking: asyncio.Task[Any] | None = None
        try:
            while True:
                asking = asking or asyncio.create_task(self._connections.fetch("GET", "/health"))
                await asyncio.wait([asking], timeout=beat)
                missed = 0 if asking.done() else missed + 1
                if asking.done():
                    asking.exception()
                    asking = None
                    await asyncio.sleep(beat)
                elif missed * beat >= patience:
                    on_hung()
                    missed = 0
        finally:
            if asking:
                asking.cancel()

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse here what the server would refuse, ignore or not report."""
        self.info.check(prompt, sampling, sampling.stop_tokens)
        if sampling.score or sampling.constraint:
            what = "log-probs of the prompt's tokens" if sampling.score else "constrained decoding"
            raise UserError(f"{what} cannot be had of {self._url}: open the model's folder instead of its address")
        sampled, raw = exact(self._meaning, sampling)
        if (self._settings.require_logprob and not sampled) or (sampling.alternatives and not raw):
            why = f"{self._url} reports {self._meaning} log-probs, not the ones required at this temperature, top_p and top_k"
            raise UserError(f"{why}; use temperature 1 without top_p and top_k, or another --logprobs-mode of vLLM")

    async def _find_meaning(self) -> Meaning:
        """Ask for the same tokens twice; the prompt is the largest id the caller may send, so a smaller vocabulary shows."""
        probe = [max(0, self.info.vocabulary - 1)]
        self._meaning = "raw"  # numbers as they come, whatever was found of a server before
        for left in reversed(
            range(PROBES)
        ):  # bf16 beside other requests may say something else, and weights may change in between
            greedy = await self._sample(probe, Sampling(PROBE_TOKENS, temperature=0.0))
            hot = await self._sample(probe, Sampling(PROBE_TOKENS, temperature=2.0, top_k=1))
            with contextlib.suppress(*([UserError] if left else [])):
                return meaning_of(greedy.raw_logprobs, hot.raw_logprobs)
        raise AssertionError

    async def _card(self, model: str) -> dict[str, Any]:
        """Return what the server says of the model asked for, or of its first. An adapter has its base's context; 0: not told."""
        try:
            async with asyncio.timeout(self._settings.first_token):
                reply = await self._connections.fetch("GET", f"{self.api}/models")
            await self._refuse(reply)
            cards = reply.json()["data"]
            by_name = {card["id"]: card for card in cards}
            if model and model not in by_name:
                raise UserError(f"{self._url} serves no model {model!r}{nearest(model, by_name)}")
            card = by_name[model or cards[0]["id"]]
            return {**card, "max_model_len": card.get("max_model_len") or cards[0].get("max_model_len") or 0}
        except TimeoutError:
            raise ServerFailed(self._why_late(0, late=False)) from None
        except ConnectionLost as error:
            raise TryAgain(self._lost(error, tokens=0)) from error
        except MALFORMED as error:
            raise ServerFailed(f"{self._url}/v1/models names no model: neither vLLM nor etude") from error

    async def _post(self, path: str, body: Any, *, refuse: bool = True) -> Reply:
        try:
            reply = await self._connections.fetch("POST", path, to_json(body))
        except ConnectionLost as error:
            raise TryAgain(self._lost(error, tokens=0)) from error
        if reply.status == 409:
            raise BrokenStore(message_in(reply.text))
        if refuse:
            await self._refuse(reply)
        return reply

    async def _sample(
        self, prompt: Sequence[int], sampling: Sampling, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        answer = _Answer(prompt, sampling, self._meaning)
        end = asyncio.get_running_loop().time() + self._settings.total
        return await self._insist(lambda: self._attempt(answer, session, on_tokens, end))

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Attempt until something comes of it or the retries are used up; a client that resumes has no end of them."""
        own = self._settings
        wait, left = own.backoff, math.inf if own.resume else own.retries
        while True:
            try:
                return await attempt()
            except TryAgain as again:
                if self._closed:
                    raise ServerFailed(f"the policy at {self._url} is closed") from None
                outlived = own.resume and not isinstance(again.final, Busy)
                if (not left or again.after > own.longest_wait) and not outlived:
                    raise again.final from again.__cause__
                pause = max(again.after, wait * random.uniform(0.5, 1.0))  # noqa: S311 - so that all do not come at once
                await asyncio.sleep(min(pause, own.longest_wait))
                wait, left = min(2 * wait, own.longest_wait), left - 1

    async def _attempt(self, answer: _Answer, session: str | None, on_tokens: OnTokens, end: float) -> Completion:
        if self._closed:
            raise ServerFailed(f"the policy at {self._url} is closed")
        now = asyncio.get_running_loop().time
        limit = asyncio.timeout_at(min(now() + self._settings.first_token, end))
        self._limits.add(limit)
        try:
            body = answer.body(self.info.name)
            sent = self._connections.request("POST", "/inference/v1/generate", body, session or "")
            async with limit, sent as reply:
                await self._refuse(reply)
                async for event in self._events(reply):
                    fresh = self._read(answer, event)
                    if fresh and on_tokens:
                        on_tokens(fresh)
                    limit.reschedule(min(now() + self._settings.between_tokens, end))
            return answer.completion(self._url)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServerFailed(self._why_late(len(answer.tokens), late=now() >= end)) from None
        except ConnectionLost as error:
            return self._resume(answer, self._lost(error, len(answer.tokens)))
        finally:
            self._limits.discard(limit)

    def _resume(self, answer: _Answer, lost: ServerFailed) -> Completion:
        """Go on after a lost connection, if that is wanted and can be; a stop text may lie across the border."""
        resumable = self._settings.resume and not answer.sampling.stop
        if answer.tokens and resumable and answer.ended():
            return answer.completion(self._url)
        raise TryAgain(lost) if resumable or not answer.tokens else lost

    def _read(self, answer: _Answer, data: bytes) -> list[Token]:
        try:
            event = from_json(data)
            if error := event.get("error"):
                if isinstance(error, dict) and error.get("code") == 503:  # the engine has stopped: another takes over
                    raise ConnectionLost(message_in(data.decode()))
                raise self._explained(message_in(data.decode()), ServerFailed)
            fresh = answer.add(event, self.version)
        except MALFORMED as error:
            shown = data[:100].decode(errors="replace")
            raise ServerFailed(f"{self._url} sent no reply of the token API: {shown!r}") from error
        for token in fresh:
            if not 0 <= token.id < self.info.vocabulary:
                raise ServerFailed(f"{self._url} sampled {token.id}, outside the caller's vocabulary: another model")
        return fresh

    async def _events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield the data of server-sent events."""
        rest = b""
        async for chunk in reply.chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if data and data != b"[DONE]":
                    yield data

    async def _refuse(self, reply: Reply) -> None:
        """Raise what a status other than 200 means."""
        if reply.status == 200:
            return
        message = f"{message_in((await reply.read()).decode(errors='replace'))} (status {reply.status})"
        if reply.status in {429, 503}:
            asked = reply.headers.get("retry-after", "")
            after = float(asked) if asked.isdecimal() else 0.0  # a date is left to our own backoff
            lost = self._settings.resume and reply.status == 503
            final = ServerFailed(f"{self._url}: {message}") if lost else Busy(after or self._settings.longest_wait)
            raise TryAgain(final, after)
        raise self._explained(message, UserError if reply.status < 500 else ServerFailed)

    def _explained(self, message: str, fault: type[UserError]) -> UserError:
        """Say in our words what a server's message comes down to."""
        if "vocab" in message.lower():
            return UserError(f"{self._url} does not know all {self.info.vocabulary} ids: another model; {message}")
        if "context length" in message or "max_model_len" in message:
            return UserError(f"the request is too long for {self.info.name} at {self._url}: {message}")
        if "(status 401)" in message or "(status 403)" in message:
            return UserError(f"{self._url} asks for a token; pass the one it was started with: {message}")
        return fault(f"{self._url} {'failed' if fault is ServerFailed else 'refuses the request'}: {message}")

    def _why_late(self, tokens: int, *, late: bool) -> str:
        if self._closed:
            return f"the policy at {self._url} was closed after {tokens} tokens"
        if late:
            return f"{self._url} took longer than {self._settings.total:g} s in all; {tokens} tokens came"
        if tokens:
            return f"{self._url} sent nothing for {self._settings.between_tokens:g} s after {tokens} tokens"
        return f"{self._url} sent nothing in {self._settings.first_token:g} s; it is overloaded, hangs, or is neither vLLM nor etude"

    def _lost(self, error: Exception, tokens: int) -> ServerFailed:
        if isinstance(error, Unreachable):
            return ServerFailed(f"no server at {self._url} ({one_line(error)}); start it, or check the address")
        return ServerFailed(f"{self._url} hung up after {tokens} tokens ({one_line(error)}); see its log")
