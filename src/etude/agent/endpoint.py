"""Any OpenAI-compatible chat endpoint as a policy: text for those who sell no token ids.

The harness speaks in tokens. An endpoint that takes messages and returns text has none to give, so its tokens are the bytes of the
text, and four more mark where a message begins and ends. What comes of it can be read, scored and served; it cannot be trained on,
since nobody knows the tokens that were sampled: log-probs are NaN. For training use a server that returns token ids
(inference/client.py).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2

from etude.agent.formats import ChatFormat, PlainCalls
from etude.errors import UserError, nearest, one_line
from etude.inference.client import message_in
from etude.inference.policy import Busy, Completion, PolicyInfo, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.inference.policy import OnTokens, Sampling

SYSTEM, USER, ASSISTANT, END = range(256, 260)
ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}
BYTES = 4  # of text in a token, about
CONTEXT = 32_768  # tokens; an endpoint does not say how many it takes, and refuses what is too long
TRIES = 4


class MessageTalk:
    """Messages as bytes between marks: the part of a `Talk` that needs a tokeniser elsewhere."""

    own_layout, opens_thinking, end_token = False, False, END
    stop_tokens = frozenset({END})

    def opening(self, system: str, tools: Sequence[dict[str, Any]], task: str) -> list[int]:  # noqa: ARG002 - the system text tells
        """Return the system's and the user's message, and the beginning of the assistant's."""
        return [SYSTEM, *self.encode(system), END, USER, *self.encode(task), END, ASSISTANT]

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return one message from the user: endpoints insist that roles take turns."""
        return [USER, *self.encode("\n\n".join(text for _, text in messages)), END, ASSISTANT]

    def encode(self, text: str) -> list[int]:
        """Return bytes; text that is none (lone surrogates from odd file names) is shown escaped."""
        return list(text.encode("utf-8", errors="backslashreplace"))

    def tokens(self, text: str) -> list[int]:
        """Return the same: no byte is special."""
        return self.encode(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, marks left out."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def message_format() -> ChatFormat:
    """Return how the harness talks to an endpoint: calls as raw text, which every model can be told of."""
    return ChatFormat(MessageTalk(), PlainCalls())


def messages_of(prompt: Sequence[int]) -> list[dict[str, str]]:
    """Return the messages of a context; the one that is begun and empty is left to the endpoint."""
    messages: list[dict[str, str]] = []
    held: list[int] = []
    role = ""
    for token in [*prompt, END]:
        if token in ROLES:
            role, held = ROLES[token], []
        elif token == END:
            if role and (held or role != "assistant"):
                messages.append({"role": role, "content": bytes(held).decode("utf-8", errors="replace")})
            role = ""
        else:
            held.append(token)
    return messages


class EndpointPolicy:
    """A `Policy` over /chat/completions; made by `open`."""

    def __init__(self, url: str, model: str, token: str, timeout: float, context: int) -> None:
        self._url = url.rstrip("/")
        details = {"url": self._url, "tokens": "bytes of text, not for training"}
        self.info = PolicyInfo(model, BYTES * context, 260, details)
        headers, patience = {"Authorization": f"Bearer {token}"} if token else {}, httpx2.Timeout(timeout, connect=10.0)
        self._client = httpx2.AsyncClient(headers=headers, timeout=patience, trust_env=False)

    @classmethod
    async def open(
        cls, url: str, model: str = "", token: str = "", timeout: float = 600.0, context: int = CONTEXT
    ) -> EndpointPolicy:
        """Connect to an endpoint such as http://127.0.0.1:8000/v1 and choose its first model, or the one named."""
        policy = cls(url, model, token, timeout, context)
        try:
            reply = await policy._ask("GET", "/models")
            names = [str(card["id"]) for card in reply["data"]]
            if not names or (model and model not in names):
                raise UserError(f"{url} serves no model {model!r}{nearest(model, names)}")
        except BaseException as error:
            await policy.close()
            if isinstance(error, KeyError | TypeError):
                wrong = "not an OpenAI-compatible endpoint; give its /v1 address"
                raise UserError(f"{url}/models names no models: {wrong}") from None
            raise
        policy.info = replace(policy.info, name=model or names[0])
        return policy

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return the endpoint's answer as bytes. Bounds count bytes here and tokens there: a token is a byte at least."""
        del session  # endpoints find shared prefixes by themselves
        body: dict[str, Any] = {
            "model": self.info.name, "messages": messages_of(prompt), "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
        }  # fmt: skip
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        reply = await self._ask("POST", "/chat/completions", body)
        try:
            choice = reply["choices"][0]
            said, finish = str(choice["message"].get("content") or ""), choice["finish_reason"]
        except (KeyError, TypeError, IndexError, AttributeError):
            raise UserError(f"{self._url} answered without a message: {str(reply)[:200]}") from None
        ids = list(said.encode())[: sampling.max_tokens]
        ended = finish != "length" and len(ids) < sampling.max_tokens
        tokens = [Token(each, math.nan, math.nan, 0) for each in ([*ids, END] if ended else ids)]
        if on_tokens:
            on_tokens(tokens)
        return Completion(tokens, "stop" if ended else "length", END if ended else None)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask, again where nothing came of it."""
        for attempt in range(TRIES):
            try:
                reply = await self._client.request(method, self._url + path, json=body)
            except httpx2.RequestError as error:
                if attempt + 1 == TRIES:
                    raise UserError(f"no answer from {self._url}{path} ({one_line(error)}); is it running?") from None
            else:
                if reply.status_code < 300:
                    return reply.json()
                said = f"{self._url}{path}: {message_in(reply.text)} (status {reply.status_code})"
                if reply.status_code not in {429, 500, 502, 503} or attempt + 1 == TRIES:
                    raise Busy(30.0) if reply.status_code == 429 else UserError(said)
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")
