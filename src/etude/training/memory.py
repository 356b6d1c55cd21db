"""Memory: one plan of what a training takes, made before anything is allocated, which `etude plan` prints and every session obeys.

The plan is a pure function of the model's shape (`count` of a model, which may be on torch's `meta` device, or `count_config`,
which needs no torch), of how it is trained (`Way`) and of the bytes there are. Weights, masters, gradients and AdamW's moments are
counted exactly; gathered layers of a sharded model and what the update needs besides, by what FSDP2 and `CompactAdamW` do. What is
kept of the forward pass for the backward pass is estimated in the computing dtype: for each position and layer some vectors as
wide as the model, as its attention and as its feed-forward part, of a mixture of experts for each expert that the token goes to;
with recomputation one vector a layer, and one layer whole. A trunk that only MTP heads learn from keeps nothing, the heads a layer
a depth. Then the logits, up to a chunk of them, some copies each. On a CPU the estimates cover
what torch was seen to hold, and are less than twice that (tests/training/test_memory.py); on a GPU they are within 10 % of the peaks
that were measured (tests/run/test_resources.py).

A CPU's memory is then kept between operations (`keep_freed_memory`): glibc would give every large block back to the system when it is
freed, and the kernel would clear the pages of the next. Steps of sprout became a third faster (docs/lab-notes.md); the peak stays
the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.models.shape import FULL, TextConfig, on_meta, routed_share, sizes_of

if TYPE_CHECKING:
    import torch

    from etude.training.settings import OptimiserSettings

# What is estimated, and where each number comes from. Those marked CPU were measured there.
SHARE = 0.85  # of the memory that may be planned for; a guess, for fragments and what libraries take
STREAMS = (
    6  # vectors as wide as the model that a layer keeps (CPU, with the next two: Llama shapes of 2 to 57M parameters)
)
ATTENTION = 2  # of queries and outputs, and of keys and values
FEED_FORWARD = 4  # vectors as wide as the feed-forward part
DISPATCHED = 2  # vectors as wide as the model for each expert of a token: its input and output in the expert's order (by the code)
# Of logits in float32. Compiled there are logits and slopes in bf16 (by the code; within 5 % of the peaks of an H200); with MTP heads
# the target in float32 besides, before and after its softmax.
COPIES = {"cpu": 3.75, "cuda": 1.0, "distilled on cuda": 2.5, "distilled": 11.0}
UPDATE = 8  # float32 copies of the numbers that `CompactAdamW` updates at once (by the code)
LAYERS_GATHERED = (
    2  # whole layers on a device at once under FSDP2: one is computed, the next is on its way (by the code)
)
LOGITS_AT_ONCE = 1 << 29  # a loss makes no more of them at a time (`cross_entropy.py`)
UPDATED_AT_ONCE = (
    2**24
)  # numbers that `CompactAdamW` updates at once: what it needs besides is some copies of them in float32


@dataclass(frozen=True)
class Counts:
    """A model in numbers (of weights, of vectors' widths), without its weights."""

    weights: int
    trained: int
    layer: int  # weights of the largest layer
    outside: int  # weights outside the layers
    layers: int
    kept_layers: int  # of which the backward pass needs something
    heads: int  # depth of MTP heads
    hidden: int
    attention: int  # queries, keys and values of a token
    feed_forward: int  # of all experts that a token goes to
    experts: int  # that a token goes to; 0: dense
    vocabulary: int
    linear: int  # Σ inputs + outputs of the matrices that LoRA takes: what rank 1 trains
    cached: int  # keys and values of a position, over all layers

    def with_lora(self, rank: int) -> Counts:
        """Return what would be counted with adapters."""
        more = rank * self.linear
        return replace(self, trained=more, weights=self.weights + more, layer=self.layer + more // self.layers)


def count_config(config: Any, depth: int = 0, *, shared: bool = True, frozen: bool = False) -> Counts:
    """Count the model of a config, with MTP heads if `depth` says so, `frozen` beneath them: by arithmetic where that is known."""
    if not isinstance(config, TextConfig) or (depth and FULL not in config.layer_types):
        from etude.models.mtp_heads import MtpHeads

        model = on_meta(config).requires_grad_(requires_grad=not frozen)
        if depth:
            model.mtp = MtpHeads.for_model(model, depth=depth, shared=shared)
        return count(model)
    sizes = sizes_of(config)
    heads = sizes.heads(config, depth, shared=shared) if depth else 0
    blocks, (attention, feed_forward, cached) = sizes.blocks, _widths(config)
    return Counts(
        sizes.total + heads, heads if frozen else sizes.total + heads, max(block.weights for block in blocks),
        sizes.total + heads - sum(block.weights for block in blocks), len(blocks), 1 if depth and frozen else len(blocks), depth,
        config.hidden_size, attention, feed_forward, config.num_experts_per_tok if routed_share(config) < 1 else 0,
        config.vocab_size, sum(block.linear for block in blocks), cached,
    )  # fmt: skip


def count(model: Any) -> Counts:
    """Count a model, which may be on the meta device."""
    import torch

    config = model.config.get_text_config()
    weights = {id(weight): weight for weight in model.parameters()}
    if config.tie_word_embeddings and (head := model.get_output_embeddings()) is not None:
        weights.pop(id(head.weight), None)  # on the meta device they are two
        weights[id(model.get_input_embeddings().weight)] = model.get_input_embeddings().weight
    decoder = model.get_decoder()
    blocks = [
        sum(weight.numel() for weight in layer.parameters())
        for part in decoder.children() if isinstance(part, torch.nn.ModuleList) for layer in part
    ]  # fmt: skip
    heads, moved = (
        model.mtp.depth if hasattr(model, "mtp") else 0,
        any(each.requires_grad for each in decoder.parameters()),
    )
    matrices = [part for part in decoder.modules() if isinstance(part, torch.nn.Linear)]
    total, (attention, feed_forward, cached) = sum(weight.numel() for weight in weights.values()), _widths(config)
    return Counts(
        total, sum(weight.numel() for weight in weights.values() if weight.requires_grad), max(blocks), total - sum(blocks),
        len(blocks), len(blocks) if moved or not heads else 1, heads, config.hidden_size, attention, feed_forward,
        config.num_experts_per_tok if routed_share(config) < 1 else 0, config.vocab_size,
        sum(part.in_features + part.out_features for part in matrices), cached,
    )  # fmt: skip


def _widths(config: Any) -> tuple[int, int, int]:
    """Return the widths of a token's queries, keys and values together, of its feed-forward part, and of what is cached of it."""
    heads, routed = config.num_attention_heads, routed_share(config) < 1
    kept = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = 2 * kept * width
    if getattr(config, "kv_lora_rank", None):
        kept, width = heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        cached = config.kv_lora_rank + config.qk_rope_head_dim
    one = (
        (routed and getattr(config, "moe_intermediate_size", None))
        or getattr(config, "intermediate_size", None)
        or 4 * config.hidden_size
    )
    experts = config.num_experts_per_tok + (getattr(config, "n_shared_experts", None) or 0) if routed else 1
    return (heads + kept) * width, one * experts, cached * config.num_hidden_layers


@dataclass(frozen=True)
class Way:
    """How a model is trained, as far as memory is concerned."""

    length: int
    gpu: bool = True
    masters: str = "float32"
    states: str = "float32"
    recompute: bool = False
    ranks: int = 1
    reference: str = ""  # "start", "average": a frozen copy, or other adapters
    teachers: int = 0  # weights of other models, which only score


@dataclass(frozen=True)
class Plan:
    """Bytes on one rank, by part."""

    way: Way
    parts: dict[str, int]  # whatever the rows
    row: int  # activations for each row at once
    available: int
    logits: int = 0  # for each row at once,
    most_logits: int = 0  # but not more than this in all
    main_memory: int = 0  # what optimiser states take there

    def needed(self, rows: int) -> int:
        """Return what so many rows at once take."""
        return sum(self.parts.values()) + rows * self.row + min(rows * self.logits, self.most_logits)

    def rows(self) -> int:
        """Return how many rows fit at once."""
        room = self.available * SHARE - sum(self.parts.values())
        return max(0, int(room // (self.row + self.logits)), int((room - self.most_logits) // self.row))


def plan(counts: Counts, way: Way, available: int) -> Plan:
    """Plan one rank."""
    half = way.gpu or way.masters == "none"
    kept = 2 if half else 4  # bytes of a number kept for the backward pass
    layer = STREAMS * counts.hidden + ATTENTION * counts.attention + FEED_FORWARD * counts.feed_forward
    layer += DISPATCHED * counts.experts * counts.hidden
    streams = (counts.kept_layers + counts.heads) * layer
    if way.recompute:
        streams = counts.kept_layers * counts.hidden + layer
    row = way.length * kept * (streams + 4 * counts.hidden)
    where = "cuda" if half else "cpu"
    logit = round(4 * COPIES[{"cuda": "distilled on cuda", "cpu": "distilled"}[where] if counts.heads else where])
    return Plan(
        way, _fixed(counts, way, kept), row, available, way.length * counts.vocabulary * logit, LOGITS_AT_ONCE * logit,
        8 * counts.trained // way.ranks if way.gpu and way.states == "cpu" else 0,
    )  # fmt: skip


def _fixed(counts: Counts, way: Way, computed: int) -> dict[str, int]:
    exact, trained = way.masters == "float32", counts.trained // way.ranks
    moments = {"float32": 8 * trained, "8bit": 2 * trained + trained // 32, "cpu": 0 if way.gpu else 8 * trained}
    compact = way.states != "float32" or not exact
    if way.ranks == 1:
        parts = {"weights": computed * counts.weights, "masters": 4 * trained if exact and computed == 2 else 0}
        # Of a micro-batch in bf16, and their sum in float32.
        parts["gradients"] = trained * (6 if parts["masters"] else computed)
    else:
        shard, whole = 4 if exact else 2, counts.outside + LAYERS_GATHERED * counts.layer
        frozen = (counts.weights - counts.trained) // way.ranks
        parts = {"weights": computed * whole, "masters": shard * trained + computed * frozen}
        # Of what was gathered and is trained, before and while it is reduced in float32.
        parts["gradients"] = shard * trained + (computed + 4) * min(counts.trained, counts.outside + counts.layer)
    parts["optimiser states"] = moments[way.states] + (4 * UPDATE * min(trained, UPDATED_AT_ONCE) if compact else 0)
    if way.reference:
        # With LoRA it is the policy with other adapters, and those that are exchanged meanwhile.
        copied = counts.weights // way.ranks if counts.trained == counts.weights else 2 * trained
        parts["frozen reference"] = computed * copied + (4 * trained if way.reference == "average" else 0)
    if way.teachers:
        parts["teachers"] = computed * way.teachers // way.ranks
    return parts


LESS_AND_LESS = (("float32", "float32"), ("float32", "8bit"), ("none", "8bit"), ("none", "cpu"))


def settle(counts: Counts, way: Way, wish: OptimiserSettings, available: int) -> Plan:
    """Return the plan with the first masters and states that fit, where the wish leaves them open; the least if none does."""
    tried = LESS_AND_LESS if way.gpu and wish.name == "adamw" else LESS_AND_LESS[:1]
    given = [(wish.masters.replace("auto", masters), wish.states.replace("auto", states)) for masters, states in tried]
    plans = [plan(counts, replace(way, masters=masters, states=states), available) for masters, states in given]
    return next((each for each in plans if each.rows()), plans[-1])


def remedy(counts: Counts, way: Way, available: int, *, adamw: bool = True, lora: bool = True) -> str:
    """Return the nearest thing that would make one row fit, found by trying: first what costs least; "" if nothing does."""
    lighter: list[dict[str, Any]] = [{}]
    if way.gpu and adamw:
        lighter += [{"states": "8bit"}, {"masters": "none", "states": "8bit"}, {"masters": "none", "states": "cpu"}]
    changes = [{**less, **more} for less in lighter for more in ({}, {"recompute": True})]
    more_ranks = (
        [{**each, "ranks": way.ranks * factor} for factor in (2, 4, 8, 16) for each in changes[:4]] if way.gpu else []
    )
    shorter = [{"recompute": True, "length": way.length >> by} for by in range(1, 8) if way.length >> by >= 16]
    for rank, change in [*((0, each) for each in changes), *((16, each) for each in changes[:2] if lora),
                         *((0, each) for each in [*more_ranks, *shorter])]:  # fmt: skip
        changed = replace(way, **change)
        if (rank or changed != way) and plan(counts.with_lora(rank) if rank else counts, changed, available).rows():
            return _words(way, changed, lora=bool(rank))
    return ""


def _words(way: Way, changed: Way, *, lora: bool) -> str:
    said = {
        "recompute = true": changed.recompute and not way.recompute, f"length = {changed.length}": changed.length != way.length,
        f'optimiser.states = "{changed.states}"': changed.states != way.states, "LoRA ([….lora])": lora,
        f'optimiser.masters = "{changed.masters}"': changed.masters != way.masters,
        f"{changed.ranks} ranks": changed.ranks != way.ranks,
    }  # fmt: skip
    return " and ".join(words for words, is_so in said.items() if is_so)


def available_on(device: torch.device, model: Any) -> int:
    """Return the bytes that a training may take on a device, where its model may be already."""
    import torch

    held: int = sum(weight.nbytes for weight in model.parameters() if weight.device.type == device.type)
    if device.type == "cuda":
        unused: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused + held
    try:  # what is free and what files take up only as long as nobody needs it
        return 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) + held
    except (OSError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_micro(wish: int, rows: int, planned: Plan, help_with: str = "") -> int:
    """Return how many rows to work on at once: as wished, or the largest divisor of a rank's rows that fits; refuse what will not."""
    fits, wish = planned.rows(), min(wish, rows)
    there = f"{gigabytes(planned.available * SHARE)} may be used, {SHARE:.0%} of what is there"
    if fits < 1:
        advice = f"{help_with} would do" if help_with else "take a smaller base"
        raise UserError(f"not even one row of {planned.way.length} tokens fits: about {gigabytes(planned.needed(1))} are needed and"
                        f" {there}; {advice} (see `etude plan`)")  # fmt: skip
    if wish > fits:
        other = "" if planned.way.recompute else ", or recompute = true"
        raise UserError(f"micro = {wish} rows will not fit: about {gigabytes(planned.needed(wish))} are needed and"
                        f" {there}; set micro = {fits}{other}")  # fmt: skip
    return wish or max(size for size in range(1, rows + 1) if rows % size == 0 and size <= fits)


def gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt(3)


@cache
def keep_freed_memory() -> None:
    """Tell the C library, if it is one that can be told. It holds for the whole process."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
