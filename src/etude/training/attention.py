"""Attention that never leaves a document.

transformers isolates the documents of a packed row only without a cache and without an attention mask, and says nothing
when it does not (docs/continued-pretraining.md). So we tell attention where each piece begins and ends, and let it see
nothing else. Both ways below cost what the pieces cost, not what the rows would. The way into any model is transformers' own
registry of attention functions.

    GPU   torch's variable-length flash attention; rows that are one piece each go to cuDNN's, which is 1.4 to 1.6 times as
          fast on an H200 but knows no pieces (its variable-length form, in torch 2.11, gives wrong gradients)
    CPU   one call of torch's attention a piece

A sink (GPT-OSS) is a position that all see and that says nothing: with log Σ exp of the other scores and the sink's added to it,
flash attention's own backward pass gives the gradients of all but the sink, and that one is a sum (`_with_sinks`).

Where ranks share rows (`context_parallel.py`), the keys are those of the whole row up to the end of each chunk of queries, and a
piece's queries are its last positions. Nothing here is of T × T but on a CPU, and there of the pieces' sizes.

For models whose attention does more than this (capped scores, say) there is transformers' own, `sdpa` or else `eager`, with a
block-diagonal mask made from the positions, of T × T. Whether it works is tried, not believed.

Shapes: B rows, T positions, H heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from etude.errors import UserError
from etude.training.batch import Rows
from etude.training.context_parallel import seen_keys

NAME = "etude_documents"
AttentionWish = Literal["auto", "documents", "sdpa"]

try:  # there is none in a build of torch without CUDA before 2.12
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
GROUPED = {"enable_gqa": True} if varlen_attn and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def documents_attention(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module,  # noqa: ARG001
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    whole_rows: int,
    shared_by: tuple[int, str, tuple[int, int]] | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of every position to those of its own piece up to itself: [B, T, H, D]. `s_aux`: sinks, [H]."""
    assert attention_mask is None, "packed rows are told apart by bounds, not by a mask"
    if shared_by:
        key_BKTD, value_BKTD = seen_keys(key_BKTD, value_BKTD, *shared_by)
    width = value_BKTD.shape[-1]
    value_BKTD = F.pad(value_BKTD, (0, query_BHTD.shape[-1] - width))  # latent attention: kernels want one width
    given, bounds = (query_BHTD, key_BKTD, value_BKTD), (cu_seq_lens_q, cu_seq_lens_k)
    if not query_BHTD.is_cuda:
        return _on_cpu(*given, bounds, scaling, sliding_window, s_aux)[..., :width], None
    length = query_BHTD.shape[2]
    if whole_rows and (s_aux is not None or (sliding_window or length) < length):  # which cuDNN's does not know
        begins = torch.arange(whole_rows, device=query_BHTD.device, dtype=torch.int32) * length
        bounds, whole_rows = (torch.cat([begins, cu_seq_lens_q + whole_rows * length]),) * 2, 0
    done = []
    if whole_rows:
        query, key, value = (each[:whole_rows] for each in given)
        done.append(_whole_rows(query, key, value, scaling))
    if whole_rows < len(query_BHTD):
        query, key, value = (each[whole_rows:] for each in given)
        done.append(_pieces(query, key, value, bounds, scaling, sliding_window, s_aux))
    return (torch.cat(done) if len(done) > 1 else done[0])[..., :width], None


def _whole_rows(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    if _has_fast_cudnn(query.device, query.dtype):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - a context manager would break the graph
            query, key, value, None, compute_log_sumexp=True, is_causal=True, scale=scaling
        )[0]
    else:
        out = _causal(query, key, value, scaling, None)
    return out.transpose(1, 2)


@cache
def _has_fast_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0) and dtype in {torch.bfloat16, torch.float16}


def _pieces(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, bounds: tuple[Tensor, Tensor], scaling: float, window: int | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query_BHTD, key_BKTD, value_BKTD)]
    longest, left = (query_BHTD.shape[2], key_BKTD.shape[2]), -1 if window is None else window - 1
    if sinks is not None:
        out, _ = _with_sinks(*flat, sinks, *bounds, *longest, scaling, left)
    else:
        out = varlen_attn(*flat, *bounds, *longest, scale=scaling, window_size=(left, 0), **GROUPED)
    return out.unflatten(0, (query_BHTD.shape[0], query_BHTD.shape[2]))


@torch.library.custom_op("etude::attention_with_sinks", mutates_args=())  # type: ignore[untyped-decorator]
def _with_sinks(  # noqa: PLR0913, PLR0917 - an operation of torch takes all by position
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, queries: Tensor, keys: Tensor, longest: int, longest_keys: int,
    scaling: float, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention with sinks, [N, H, D], and log Σ exp of all scores, [H, N]. `left`: positions looked back at, or −1."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - varlen_attn has no gradient by lse
        query, key, value, queries, keys, longest, longest_keys, 0.0, left < 0, False,  # noqa: FBT003
        scale=scaling, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    with_sink = torch.logaddexp(lse, sinks.float()[:, None])
    return (out * (lse - with_sink).exp().T[..., None]).to(out.dtype), with_sink


@_with_sinks.register_fake  # type: ignore[untyped-decorator]
def _(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    del key, value
    return torch.empty_like(query), query.new_empty(len(sinks), len(query), dtype=torch.float32)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.longest_keys, ctx.scaling, ctx.left = inputs
    ctx.save_for_backward(*tensors, *output)


def _back_through_sinks(ctx: Any, out_gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, sinks, queries, keys, out, with_sink = ctx.saved_tensors
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout
    gradients = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
        out_gradient.contiguous(), query, key, value, out, with_sink, queries, keys, ctx.longest, ctx.longest_keys, 0.0,
        ctx.left < 0, none, none, scale=ctx.scaling, window_size_left=ctx.left, window_size_right=0,
    )  # fmt: skip
    shares_HN = (sinks.float()[:, None] - with_sink).exp()
    of_sinks = -(shares_HN * (out_gradient.float() * out.float()).sum(-1).T).sum(1)
    return *gradients, of_sinks.to(sinks.dtype), None, None, None, None, None, None


_with_sinks.register_autograd(_back_through_sinks, setup_context=_keep_for_backward)


def _on_cpu(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, bounds: tuple[Tensor, Tensor], scaling: float, window: int | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    sizes: list[list[tuple[int, int]]] = [
        [] for _ in range(len(query_BHTD))
    ]  # of queries and keys of the pieces of each row
    for (begin, end), (first, last) in zip(*(itertools.pairwise(each.tolist()) for each in bounds), strict=True):
        if last > first:
            sizes[first // key_BKTD.shape[2]].append((end - begin, last - first))
    done = []
    for query, key, value, own in zip(query_BHTD.split(1), key_BKTD.split(1), value_BKTD.split(1), sizes, strict=True):
        queries, keys = (list(each) for each in zip(*own, strict=True))
        pieces = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
        done.append(torch.cat([_causal(*piece, scaling, window, sinks) for piece in pieces if piece[0].shape[2]], 2))
    return torch.cat(done).transpose(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Return the attention of the last positions of a piece, or of all, to those up to each."""
    count, length = query.shape[2], key.shape[2]
    if sinks is None and count == length and length <= (window or length):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    before = length - count
    near = torch.ones(count, length, dtype=torch.bool, device=query.device)
    near = near.tril(before).triu(before + 1 - (window or length))
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=near, scale=scaling, enable_gqa=True)
    # A column more of scores, and none of values.
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(~near, -torch.inf)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, count, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


AttentionInterface.register(NAME, documents_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def isolate(model: Any, wish: AttentionWish) -> str:
    """Make a model attend inside documents only; return which way was taken."""
    config = model.config.get_text_config()
    reason = _not_plain(config)
    if wish == "documents" and reason:
        raise UserError(f'attention = "documents" cannot serve this model: {reason}; use "sdpa" or "auto"')
    odd_scores = getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss"
    ours = [] if reason or wish == "sdpa" else [NAME]
    theirs = ["eager"] if odd_scores else ["sdpa", "eager"]  # sdpa would leave caps and sinks out, and say nothing
    for chosen in [*ours, *([] if wish == "documents" else theirs)]:
        if _takes(model, chosen) and _keeps_apart(model):
            return "documents" if chosen == NAME else chosen
    what = f"{type(model).__name__} cannot keep the documents of a row apart (attention = {wish!r})"
    raise UserError(f"{what}; take another base")


def _takes(model: Any, attention: str) -> bool:
    """Set a model's attention; return whether it took it, as some refuse and others say nothing."""
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        return False
    return bool(model.config.get_text_config()._attn_implementation == attention)  # noqa: SLF001 - there is no other way to ask


@torch.no_grad()  # type: ignore[untyped-decorator]
def _keeps_apart(model: Any) -> bool:
    """Try it: other tokens in the first piece of each row must leave the logits of the second alone.

    Layers with a memory of their own (state space, convolution) carry it from piece to piece, whatever attention does.
    """
    device, some = next(model.parameters()).device, torch.arange(32).view(2, 16)
    tokens, places, bounds = 1 + some % 7, some % 8, torch.arange(0, 33, 8, dtype=torch.int32)
    seen = []
    for changed in (tokens, torch.cat([tokens[:, :8] % 7 + 1, tokens[:, 8:]], 1)):
        rows = Rows(*(each.to(device) for each in (changed, changed, torch.ones(2, 16), places, bounds)))
        try:
            seen.append(model(**packed(rows)).logits[:, 8:].float())
        except (TypeError, ValueError):  # it takes no such arguments, or knows that it cannot
            return False
    rounding = 1e-4 if model.dtype == torch.float32 else 3e-2
    return bool((seen[0] - seen[1]).abs().max() <= rounding * seen[0].abs().max())


def _not_plain(config: Any) -> str | None:
    """Return what a model's attention does besides attending, as far as its config tells."""
    if getattr(config, "index_topk", None):
        return "it attends to positions that it chooses"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention scores"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"it has layers of another kind ({min(kinds)})" if kinds else None


def packed(rows: Rows) -> dict[str, Any]:
    """Return the arguments that tell a model's forward pass where pieces begin, for both ways."""
    split = rows.split
    ours = {
        "cu_seq_lens_q": rows.bounds, "cu_seq_lens_k": split.bounds if split else rows.bounds, "whole_rows": rows.whole,
        "shared_by": (split.ranks, split.group, split.ends) if split else None,
    }  # fmt: skip
    # With a mask of ones, or with a cache, transformers' own way leaks.
    plain = {"input_ids": rows.tokens_BT, "position_ids": rows.positions_BT, "attention_mask": None, "use_cache": False}
    return plain | ours
