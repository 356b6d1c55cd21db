"""Attention over the cache, registered with transformers, so that any model's own code calls it.

A pass has the new tokens of many requests, one after the other in a single row. Their keys and values go into the cache first; then
each token attends to what its own request has there, up to itself. No more of the cache is read than is filled.

Shapes: G requests with T new tokens each, N = all new tokens, H heads, K key/value heads, R = H / K, L positions, D width of a head.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from etude.inference.kv_cache import LayerShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.inference.kv_cache import Cache, Plan

NAME = "etude_cache"
Turn = tuple[Tensor, Tensor] | None


class Order(NamedTuple):
    """Requests by where their pages lie. None: they are in that order already."""

    places: Tensor | None
    back: Tensor | None
    runs: list[tuple[int, int, int]]  # from which request to which, and the first one's page


@dataclass
class Pass:
    """What attention needs to know while a model runs."""

    cache: Cache
    plan: Plan
    # The layer that attends next: layers come in order, and a compiler would compile one for each number it is given.
    layer: int = 0
    masks: dict[int, Tensor | None] = field(default_factory=dict)  # by window; the same for all layers
    order: Order | None = None  # on a CPU; the same for all layers


@dataclass
class Probe:
    """What is seen of a model that runs without attending."""

    layers: list[LayerShape] = field(default_factory=list)
    windows: set[int] = field(default_factory=set)  # that masks were asked for


AnyPass = TypeVar("AnyPass", Pass, Probe)
_now = threading.local()  # the pass of this thread: a model's code hands over tensors and settings, no objects of ours


@contextlib.contextmanager
def during(now: AnyPass) -> Iterator[AnyPass]:
    """Run a model inside this: a `Pass`, or a `Probe` to learn what its layers keep, with nothing attended to."""
    _now.it = now
    try:
        yield now
    finally:
        _now.it = None


def cached_attention(
    query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, scaling: float, window: int, turn: Turn = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return [1, N, H, D]; `window` 0: none; `turn`, `sinks_H`: see `attend`."""
    now: Pass | Probe = _now.it
    if isinstance(now, Probe):
        now.layers.append(LayerShape(key_1KND.shape[1], key_1KND.shape[3], value_1KND.shape[3], scaling, window))
        return query_1HND.new_zeros(1, query_1HND.shape[2], query_1HND.shape[1], value_1KND.shape[3])
    query_HND, key_KND, value_KND = query_1HND[0], key_1KND[0], value_1KND[0]
    layer, now.layer = now.layer, now.layer + 1
    if query_HND.is_cuda:
        from etude.inference.kernels import attend_pages, write_pages

        write_pages(now.cache, layer, now.plan, key_KND, value_KND, turn)
        return attend_pages(query_HND, now.cache, layer, now.plan, scaling, window, turn, sinks_H)[None]
    assert turn is None
    now.cache.write(layer, now.plan, key_KND, value_KND)
    together = now.plan.each and all(len(pages) == 1 for pages in now.plan.pages)
    return (_together if together else _one_by_one)(query_HND, layer, now, scaling, window, sinks_H)[None]


@torch.library.custom_op("etude::cached_attention", mutates_args=())  # type: ignore[untyped-decorator]
def _opaque(
    query: Tensor, key: Tensor, value: Tensor, turn: list[Tensor], sinks: Tensor | None, scaling: float, window: int
) -> Tensor:
    # To a compiler, one operation. That it changes the cache need not be known: nothing else touches it in between.
    turned = (turn[0], turn[1]) if turn else None
    return cached_attention(query, key, value, scaling, window, turned, sinks).contiguous()


@_opaque.register_fake  # type: ignore[untyped-decorator]
def _(
    query: Tensor, key: Tensor, value: Tensor, turn: list[Tensor], sinks: Tensor | None, scaling: float, window: int
) -> Tensor:
    del key, turn, sinks, scaling, window
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _attention(
    _module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    *, scaling: float, sliding_window: int | None = None, softcap: float | None = None, s_aux: Any = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert attention_mask is None
    if softcap is not None:
        raise ValueError("its attention caps scores, and ours does not")  # shown by model_runner.py
    return attend(query, key, value, scaling, sliding_window or 0, sinks_H=s_aux), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int, turn: Turn = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the cache of the pass under way: [1, H, N, D] and twice [1, K, N, D] to [1, N, H, D].

    `turn`, on a GPU only: cosine and sine, [N, D], to turn queries and keys with. `sinks_H`: for each head the score of a position
    that is always seen and has nothing to say (GPT-OSS).
    """
    if not torch.compiler.is_compiling():
        return cached_attention(query, key, value, scaling, window, turn, sinks_H)
    return _opaque(query, key, value, list(turn or ()), sinks_H, scaling, window)


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Make no mask; note a window that a model asks its masks for, as not every one tells its attention too."""
    if isinstance(now := getattr(_now, "it", None), Probe) and local_size:
        now.windows.add(local_size)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def _filled(cache: Tensor, pages: list[int], length: int) -> Tensor:
    """Return what one request has in the cache, [1, K, L, D]: a view if it is in one page."""
    if len(pages) == 1:
        return cache[pages[0], :, :length][None]
    used = pages[: -(-length // cache.shape[2])]
    return cache[used].transpose(0, 1).flatten(1, 2)[None, :, :length]


def _one_by_one(
    query_HND: Tensor, layer: int, now: Pass, scaling: float, window: int, sinks_H: Tensor | None
) -> Tensor:
    plan, cache, done = now.plan, now.cache, []
    of_requests = (query_HND.split(plan.counts, 1), plan.position_N.split(plan.counts), plan.pages, plan.lengths)
    for part, position, pages, length in zip(*of_requests, strict=True):
        key, value = _filled(cache.keys[layer], pages, length), _filled(cache.values[layer], pages, length)
        mask = _seen(position[:, None], length, window) if len(position) != length or window else None
        how: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": True}
        attended = F.scaled_dot_product_attention(part[None], key, value, **how)
        if sinks_H is not None:
            seen = _seen(position[:, None], length, window)
            shared = part.unflatten(0, (key.shape[1], -1))[None].flatten(2, 3)  # [1, K, R·T, D]
            shares = _shares(shared, key, seen.repeat(shared.shape[2] // len(seen), 1), scaling, sinks_H)
            attended = attended * shares.view(1, len(sinks_H), -1, 1)
        done.append(attended[0].transpose(0, 1))
    return torch.cat(done)


def _shares(query: Tensor, key: Tensor, seen: Tensor | None, scaling: float, sinks_H: Tensor) -> Tensor:
    """Return what is left for the positions of a text beside each head's sink, [G, K, R·T, 1].

    A softmax over scores s and one more, the sink: that over s alone, times Σ exp s / (Σ exp s + exp sink).
    """
    scores = (query.float() @ key.float().mT) * scaling
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    sinks = (
        sinks_H.float().view(1, key.shape[1], -1, 1).repeat_interleave(query.shape[2] * key.shape[1] // len(sinks_H), 2)
    )
    return torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks).to(query.dtype)


def _together(query_HND: Tensor, layer: int, now: Pass, scaling: float, window: int, sinks_H: Tensor | None) -> Tensor:
    plan = now.plan
    requests, each, longest = len(plan.pages), plan.each, max(plan.lengths)
    keys, values = now.cache.keys[layer], now.cache.values[layer]
    heads = keys.shape[1]
    if window not in now.masks:
        now.masks[window] = _mask(plan, longest, query_HND.shape[0] // heads, window)
    query_GKRTD = query_HND.unflatten(1, (requests, each)).unflatten(0, (heads, -1)).permute(2, 0, 1, 3, 4)
    query, mask = query_GKRTD.flatten(2, 3), now.masks[window]
    if now.order is None:
        now.order = _neighbours([pages[0] for pages in plan.pages])
    out = _by_neighbours(query, keys, values, now.order, longest, mask, scaling)
    if sinks_H is not None:
        first = keys[[pages[0] for pages in plan.pages], :, :longest]
        out = out * _shares(query, first, mask, scaling, sinks_H)
    return out.unflatten(2, (-1, each)).permute(0, 3, 1, 2, 4).reshape(requests * each, -1, values.shape[3])


def _neighbours(pages: list[int]) -> Order:
    """Return requests in the order of their pages, and the runs of neighbouring pages among them."""
    order = sorted(range(len(pages)), key=pages.__getitem__)
    begins = [0, *(i for i in range(1, len(order)) if pages[order[i]] != pages[order[i - 1]] + 1), len(order)]
    runs = [(first, end, pages[order[first]]) for first, end in pairwise(begins)]
    if order == list(range(len(pages))):
        return Order(None, None, runs)
    places = torch.tensor(order)
    return Order(places, places.argsort(), runs)


def _by_neighbours(
    query: Tensor, keys: Tensor, values: Tensor, order: Order, longest: int, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend to pages where they lie, a run of neighbours at a time: copying them first would take twice as long as reading them."""
    if order.places is not None:
        query, mask = query[order.places], mask[order.places] if mask is not None else None
    done = [
        F.scaled_dot_product_attention(
            query[first:end], keys[page : page + end - first, :, :longest], values[page : page + end - first, :, :longest],
            attn_mask=mask[first:end] if mask is not None else None, scale=scaling,
        )
        for first, end, page in order.runs
    ]  # fmt: skip
    out = done[0] if len(done) == 1 else torch.cat(done)
    return out if order.back is None else out[order.back]


def _mask(plan: Plan, longest: int, groups: int, window: int) -> Tensor | None:
    """Return which positions each token sees, [G, 1, R·T, L]; None if that is all of them."""
    if plan.each == 1 and not window and min(plan.lengths) == longest:
        return None
    return _seen(plan.position_N.view(-1, plan.each, 1), longest, window).repeat(1, groups, 1)[:, None]


def _seen(position: Tensor, longest: int, window: int) -> Tensor:
    ahead = torch.arange(longest) - position
    return (ahead <= 0) & (ahead > -window) if window else ahead <= 0
