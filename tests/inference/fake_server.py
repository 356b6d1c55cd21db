"""A server that speaks as vLLM or SGLang does, over a toy language model whose every probability can be worked out.

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
    kind: str = "vllm"
    meaning: str = "raw"
    incremental: bool = False  # SGLang: whether an event holds only what is new
    piece: int = 1  # tokens an event
    weight_version: str = "default"
    end_of_text: int = 7  # stopped at unless told to ignore it
    models: Any = None  # what /v1/models returns, where not the usual
    token: str | None = None
    faults: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    gets: int = 0
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
                self.gets += 1
                self.answer(writer, 200, {"data": self.cards()} if self.models is None else self.models)
            else:
                self.bodies.append(json.loads(body))
                fault = self.faults.pop(0) if self.faults else ""
                await self.generate(reader, writer, self.bodies[-1], fault)
            await writer.drain()
        writer.close()

    def cards(self) -> list[dict[str, Any]]:
        return [
            {"id": "toy", "owned_by": self.kind, "max_model_len": CONTEXT},
            {"id": "toy-lora", "owned_by": self.kind},
        ]

    def answer(self, writer: asyncio.StreamWriter, status: int, value: Any, headers: str = "") -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n".encode() + body
        )

    async def generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Any, fault: str) -> None:
        what, _, detail = fault.partition(":")
        if what == "status":
            status, _, after = detail.partition(",")
            return self.answer(
                writer,
                int(status),
                {"error": {"message": f"says {status}"}},
                f"retry-after: {after}\r\n" if after else "",
            )
        if what == "drop":
            return writer.transport.abort()
        prompt = body["prompt"] if self.kind == "vllm" else body["input_ids"]
        if max(prompt) >= VOCABULARY:
            return self.answer(writer, 400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        events = self.events(prompt, body)
        for number, event in enumerate(events):
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
        choice = event.get("choices", [{}])[0] if event.get("choices") else {}
        meta = event.get("meta_info", {})
        if what == "rubbish":
            return "{]"
        if what == "shapeless":
            return {"hello": 1}
        if what == "number":
            return "5"
        if what == "no_ids":
            return (
                {**event, "choices": [{**choice, "token_ids": None}]}
                if choice
                else {**event, "meta_info": meta | {"output_token_logprobs": None}}
            )
        if what == "words":
            return (
                {**event, "choices": [{**choice, "token_ids": ["one"]}]}
                if choice
                else {**event, "meta_info": meta | {"output_token_logprobs": [["a", "b", None]]}}
            )
        if what == "uneven":
            return (
                {**event, "choices": [{**choice, "token_ids": [1, 2]}]}
                if choice
                else {**event, "meta_info": meta | {"completion_tokens": 9}}
            )
        if what == "beyond":
            return (
                {**event, "choices": [{**choice, "token_ids": [VOCABULARY]}]}
                if choice
                else {**event, "meta_info": meta | {"output_token_logprobs": [[-1.0, VOCABULARY, None]]}}
            )
        if what == "error":
            return {"error": {"message": "engine core died"}}
        if what == "abort" and (choice.get("finish_reason") or meta.get("finish_reason")):
            return (
                {**event, "choices": [{**choice, "finish_reason": "abort"}]}
                if choice
                else {**event, "meta_info": meta | {"finish_reason": {"type": "abort", "message": "engine core died"}}}
            )
        return event

    def events(self, prompt: list[int], body: Any) -> list[Any]:
        """Sample as asked, and return the events that tell of it."""
        asked = body if self.kind == "vllm" else body["sampling_params"]
        budget, count = (
            (body["max_tokens"], body["logprobs"])
            if self.kind == "vllm"
            else (asked["max_new_tokens"], body["top_logprobs_num"])
        )
        stops = set(asked["stop_token_ids"]) if self.kind == "vllm" or not asked["ignore_eos"] else set()
        stops |= set() if asked["ignore_eos"] else {self.end_of_text}
        chance = random.Random(body.get("seed") or 0)
        tokens: list[int] = []
        rows: list[tuple[int, float, list[tuple[int, float]]]] = []
        matched: int | str | None = None
        while len(tokens) < budget and matched is None:
            told = distributions(logits_after([*prompt, *tokens]), asked["temperature"], asked["top_k"], asked["top_p"])
            weights = [math.exp(number) for number in told["processed"]]
            token = (
                weights.index(max(weights))
                if asked["temperature"] == 0
                else chance.choices(range(VOCABULARY), weights)[0]
            )
            tokens.append(token)
            best = sorted(enumerate(told[self.meaning]), key=lambda pair: -pair[1])[:count]
            rows.append((token, told[self.meaning][token], best))
            matched = (
                token if token in stops else next((text for text in asked["stop"] if text in text_of(tokens)), None)
            )
        starts = range(0, len(rows), self.piece)
        make = self.vllm_event if self.kind == "vllm" else self.sglang_event
        events = [make(rows, start, min(start + self.piece, len(rows)), matched) for start in starts]
        usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
        return [*events, usage] if self.kind == "vllm" else events

    def vllm_event(self, rows: list[Any], start: int, end: int, matched: int | str | None) -> Any:
        tops = [
            {f"token_id:{token}": number for token, number in [(row[0], row[1]), *row[2]]} for row in rows[start:end]
        ]
        finish = None if end < len(rows) else "length" if matched is None else "stop"
        told = {"token_logprobs": [row[1] for row in rows[start:end]], "top_logprobs": tops}
        choice = {"token_ids": [row[0] for row in rows[start:end]], "logprobs": told, "finish_reason": finish}
        return {"choices": [choice | {"stop_reason": matched if finish == "stop" else None}]}

    def sglang_event(self, rows: list[Any], start: int, end: int, matched: int | str | None) -> Any:
        shown = rows[start:end] if self.incremental else rows[:end]
        reason = {"type": "length", "length": end} if matched is None else {"type": "stop", "matched": matched}
        meta = {
            "output_token_logprobs": [[row[1], row[0], None] for row in shown],
            "output_top_logprobs": [[[number, token, None] for token, number in row[2]] for row in shown],
            "completion_tokens": end,
            "finish_reason": reason if end == len(rows) else None,
            "cached_tokens": 3,
            "weight_version": self.weight_version,
        }
        return {"meta_info": meta}
