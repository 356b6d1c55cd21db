"""Any OpenAI-compatible chat endpoint as a policy, for services that return text and no token ids.

The harness works with tokens. For an endpoint that takes messages and returns text, the bytes of the text serve as tokens, and four
more mark where a message begins and ends. Such traces can be read, scored and served, but not trained on: the sampled tokens are not
known, and log-probs are NaN. For training use a server that returns token ids (inference/client.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from etude.agent.formats import ChatFormat, PlainCalls
from etude.errors import UserError
from etude.inference.client import ClientSettings, RemotePolicy, ServerFailed, TryAgain, message_in
from etude.inference.policy import Completion, OnTokens, PolicyInfo, Sampling, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.inference.connection import Reply

SYSTEM, USER, ASSISTANT, END = range(256, 260)
ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}
BYTES = 4  # of text in a token, until an endpoint has said how many tokens a prompt has
SHRINK = 0.8  # of the context that is left after a prompt was too long for it
CONTEXT = 32_768  # tokens, where an endpoint does not say how many it takes


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


class EndpointPolicy(RemotePolicy):
    """A `Policy` over /chat/completions; made by `open`. Its context, prompts and completions are counted in bytes."""

    def __init__(
        self, url: str, vocabulary: int = 260, token: str = "", settings: ClientSettings | None = None
    ) -> None:
        super().__init__(url, vocabulary, token, settings)
        self.api = "/v1" if url.rstrip("/").endswith("/v1") or urlsplit(url).path in {"", "/"} else ""

    async def connect(self, model: str = "") -> PolicyInfo:
        """Choose the first model, or the one named."""
        self.card = await self.ask_card(model)
        details = {"url": self._url, "tokens": "bytes of text, not for training"}
        self.info = PolicyInfo(self.card["id"], 0, 260, details)
        self.set_context(int(self.card["max_model_len"] or CONTEXT))
        return self.info

    def set_context(self, tokens: int, size: float = BYTES) -> None:
        """Set how many tokens the model takes, and how many bytes there are in one."""
        self.context, self.size = tokens, size
        self.info = replace(self.info, context=int(size * tokens))

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str | None = None, on_tokens: OnTokens = None
    ) -> Completion:
        """Return the endpoint's answer as bytes. How many of them make a token shows with its answers."""
        del session  # endpoints find shared prefixes by themselves
        most = max(1, int(sampling.max_tokens / self.size))
        body: dict[str, Any] = {
            "model": self.info.name, "messages": messages_of(prompt), "max_tokens": most,
            "temperature": sampling.temperature, "top_p": sampling.top_p,
        }  # fmt: skip
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        reply = await self._asked(body)
        if reply is None:  # a context that is too small: the harness sums up, or ends
            self.set_context(self.context, self.size * SHRINK)
            return Completion([], "length")
        try:
            choice = reply["choices"][0]
            said, finish = str(choice["message"].get("content") or ""), choice["finish_reason"]
            counted = (reply.get("usage") or {}).get("prompt_tokens") or 0
        except (KeyError, TypeError, IndexError, AttributeError):
            raise UserError(f"{self._url} answered without a message: {str(reply)[:200]}") from None
        if counted and len(prompt) < self.size * counted:
            self.set_context(self.context, len(prompt) / counted)
        ids = list(said.encode())[: sampling.max_tokens]
        ended = finish != "length" and len(ids) < sampling.max_tokens
        tokens = [Token(each, math.nan, math.nan, 0) for each in ([*ids, END] if ended else ids)]
        if on_tokens:
            on_tokens(tokens)
        return Completion(tokens, "stop" if ended else "length", END if ended else None)

    async def _asked(self, body: dict[str, Any]) -> Any:
        """Return the reply. If prompt and limit exceed the context, ask again without a limit; None: the prompt alone is too long."""
        for limited in (True, False):
            try:
                return await self.tell(f"{self.api}/chat/completions", body)
            except UserError as error:
                if "context" not in str(error) or "(status 400)" not in str(error):
                    raise
                if limited:
                    del body["max_tokens"]
        return None

    async def _refuse(self, reply: Reply) -> None:
        if reply.status in {500, 502, 504}:  # which pass, where many machines answer
            raise TryAgain(ServerFailed(f"{self._url} failed: {message_in(reply.text)} (status {reply.status})"))
        await super()._refuse(reply)
