"""A server that speaks the token API as vLLM does, over a toy language model whose every probability can be worked out.

It misbehaves on demand: `faults` names what happens to each next request, one name a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from dataclasses import dataclass, field
from typing import Any, Self

VOCABULARY = 40
CONTEXT = 64


def logits_after(tokens: list[int]) -> list[float]:
    seed = sum((place + 1) * (token + 3) for place, token in enumerate(tokens))
    return [2.0 * math.sin(0.7 * seed * (token + 1)) for token in range(VOCABULARY)]


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - total for logit in logits]


def distributions(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[str, list[float]]:
    """Return the log-probs a server may report: raw, scaled, processed."""
    raw = log_softmax(logits)
    if temperature == 0:
        return {"raw": raw, "scaled": raw, "processed": raw}
    scaled = log_softmax([logit / temperature for logit in logits])
    order = sorted(range(len(logits)), key=lambda token: -scaled[token])[: top_k if top_k > 0 else None]
    kept, mass = [], 0.0
    within = sum(math.exp(scaled[token]) for token in order)
    for token in order:
        if mass >= top_p * within:
            break
        kept.append(token)
        mass += math.exp(scaled[token])
    left = [scaled[token] if token in kept else -math.inf for token in range(len(logits))]
    return {"raw": raw, "scaled": scaled, "processed": log_softmax(left)}


def text_of(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@dataclass
class FakeServer:
    meaning: str = "raw"
    piece: int = 1  # tokens an event
    versions: list[dict[str, Any]] = field(default_factory=list)  # spans of the last event
    end_of_text: int = 7  # stopped at unless the request ignores it
    models: Any = None  # what /v1/models returns, where not the usual
    token: str | None = None
    faults: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client went away in the middle
    url: str = ""

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if self.token and f"authorization: bearer {self.token}" not in head:
                self.answer(writer, 401, {"error": "Unauthorized"})
            elif head.startswith("get /v1/models"):
                self.answer(writer, 200, {"data": self.cards()} if self.models is None else self.models)
            else:
                self.bodies.append(json.loads(body))
                fault = self.faults.pop(0) if self.faults else ""
                await self.generate(reader, writer, self.bodies[-1], fault)
            await writer.drain()
        writer.close()

    def cards(self) -> list[dict[str, Any]]:
        return [{"id": "toy", "owned_by": "vllm", "max_model_len": CONTEXT}, {"id": "toy-lora", "owned_by": "vllm"}]

    def answer(self, writer: asyncio.StreamWriter, status: int, value: Any, headers: str = "") -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n".encode() + body
        )

    async def generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Any, fault: str) -> None:
        what, _, detail = fault.partition(":")
        if what == "status":
            status, _, after = detail.partition(",")
            retry = f"retry-after: {after}\r\n" if after else ""
            return self.answer(writer, int(status), {"error": {"message": f"says {status}"}}, retry)
        if what == "drop":
            return writer.transport.abort()
        prompt = body["token_ids"]
        if max(prompt) >= VOCABULARY:
            return self.answer(writer, 400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        for number, event in enumerate(self.events(prompt, body["sampling_params"])):
            if detail and number == int(detail):
                if what == "die":
                    return writer.transport.abort()
                if what == "hang":
                    await reader.read()  # returns when the client goes away
                    return self.left.set()
                if what == "end":
                    break
            self.send(writer, self.spoilt(event, what))
            await writer.drain()
            await asyncio.sleep(0)
        self.send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return None

    def send(self, writer: asyncio.StreamWriter, event: Any) -> None:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def spoilt(self, event: Any, what: str) -> Any:
        """Return an event as a server would send it that is broken in this way."""
        whole = {
            "rubbish": "{]", "shapeless": {"hello": 1}, "number": "5", "error": {"error": {"message": "engine core died"}}
        }  # fmt: skip
        if what in whole:
            return whole[what]
        if not event["choices"]:
            return event
        choice = event["choices"][0]
        changes: dict[str, Any] = {
            "no_ids": {"token_ids": None}, "uneven": {"token_ids": [1, 2]}, "beyond": {"token_ids": [VOCABULARY]},
            "words": {"token_ids": ["one"], "logprobs": {"content": [{"logprob": "a"}]}},
            "off": {"logprobs": {"content": [{"logprob": -0.5}] * len(choice["token_ids"])}},
            "abort": {"finish_reason": "abort"} if choice["finish_reason"] else {},
        }  # fmt: skip
        return {**event, "choices": [choice | changes.get(what, {})]}

    def events(self, prompt: list[int], asked: Any) -> list[Any]:
        """Sample as asked, and return the events of it."""
        stops = set(asked["stop_token_ids"]) | (set() if asked["ignore_eos"] else {self.end_of_text})
        chance = random.Random(asked.get("seed") or 0)
        tokens: list[int] = []
        entries: list[dict[str, Any]] = []
        matched: int | str | None = None
        while len(tokens) < asked["max_tokens"] and matched is None:
            logits = logits_after([*prompt, *tokens])
            known = distributions(logits, asked["temperature"], asked["top_k"], asked["top_p"])
            weights = [math.exp(number) for number in known["processed"]]
            likeliest = weights.index(max(weights))
            token = likeliest if asked["temperature"] == 0 else chance.choices(range(VOCABULARY), weights)[0]
            tokens.append(token)
            numbers = known[self.meaning]
            # As vLLM has it: the sampled token first, then the others by rank, as many in all as were asked for.
            ranked = [
                token,
                *(other for other in sorted(range(VOCABULARY), key=lambda one: -numbers[one]) if other != token),
            ]
            top = [{"token_id": other, "logprob": numbers[other]} for other in ranked[: max(1, asked["logprobs"])]]
            entries.append({"token_id": token, "logprob": numbers[token], "top_logprobs": top})
            matched = (
                token if token in stops else next((text for text in asked["stop"] if text in text_of(tokens)), None)
            )
        starts = range(0, len(tokens), self.piece)
        usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
        return [*(self.event(tokens, entries, start, matched) for start in starts), usage]

    def event(self, tokens: list[int], entries: list[Any], start: int, matched: int | str | None) -> Any:
        end = start + self.piece
        last = end >= len(tokens)
        finish = {
            "finish_reason": ("length" if matched is None else "stop") if last else None,
            "stop_reason": matched if last else None,
        }
        spans = {"weight_versions": self.versions if last else None}
        return {
            "choices": [
                {
                    "index": 0,
                    "token_ids": tokens[start:end],
                    "logprobs": {"content": entries[start:end]},
                    **finish,
                    **spans,
                }
            ]
        }
