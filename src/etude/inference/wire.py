"""How vLLM and SGLang are asked for tokens and how they answer: bodies out, server-sent events in. No I/O.

Both take sampling defaults from the model's own `generation_config.json` or from flags, so every setting is sent. What
stops a completion is the caller's affair: the model's end-of-text token stops it only where it is among `stop_tokens`.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.inference.policy import Sampling

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
