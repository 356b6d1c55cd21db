"""How engine and trainer divide a GPU: by one plan that both compute alike from the model's shape, not by who comes first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.models.shape import read_config
from etude.training import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.rl.settings import RlSettings

AT_ONCE = {"cpu": 8192, "cuda": 32_768}  # tokens; more would not be faster, and a GPU's last rows are padding
# Not measured yet: what two CUDA contexts take, and what the engine computes with beside weights and cache.
CONTEXTS, ENGINE_WORK = 1.2e9, 3e9
LEAST = 2  # rollouts of full length that the cache must hold: one would wait for itself


def divide(
    counts: memory.Counts, way: memory.Way, settings: RlSettings, total: int, *, apart: int = 0
) -> tuple[memory.Plan, int, int]:
    """Return the trainer's plan, the rows it wants at once, and the bytes of the KV cache.

    The cache is to hold all rollouts. Where it cannot beside the rows that the trainer wants, these become fewer until it holds half
    of them: tokens are sampled for longer than they are trained on. A server elsewhere takes nothing here, and has 0.

    `apart`: how many GPUs of this size an engine has to itself, as on a cluster; 0: it shares the trainer's. The cache of one that
    does not fit its own is 0.
    """
    rows, rollout = max(settings.micro, AT_ONCE["cuda"] // way.length, 1), 2 * counts.cached * way.length
    given, wish = int(settings.engine_memory * 1e9), settings.optimiser
    left = int(max(1, apart) * (total - CONTEXTS - ENGINE_WORK) - 2 * counts.weights)
    if settings.engine or apart:
        fits = not settings.engine and left >= (given or LEAST * rollout)
        kept = (given or min(left, settings.at_once * rollout)) if fits else 0
        return memory.settle(counts, way, wish, int(total - CONTEXTS)), rows, kept
    least, enough = (given or share * rollout for share in (LEAST, max(LEAST, settings.at_once // 2)))
    while True:
        plan = memory.settle(counts, way, wish, max(0, left - least))
        free = left - int(plan.needed(rows) / memory.SHARE)
        if free >= enough or rows == 1 or settings.micro:
            break
        rows //= 2
    kept = given or max(least, min(free, settings.at_once * rollout))
    return memory.settle(counts, way, wish, max(0, left - kept)), rows, kept


def beside(settings: RlSettings, config: Callable[[str], Any]) -> dict[str, Any]:
    """Return what of a way to train is frozen beside the policy: reference and teachers; `config`: of a teacher."""
    teachers = sum(memory.count_config(config(word)).weights for word in set(settings.teacher.models.values()))
    return {"reference": settings.kl.reference if settings.kl.coefficient else "", "teachers": teachers}


def of_run(model: Path, settings: RlSettings, length: int, *, apart: int) -> tuple[int, int]:
    """Return the bytes that the trainer may plan with on this GPU, and those of the engine's KV cache."""
    import torch

    counts = memory.count_config(read_config(model))
    if settings.lora:
        counts = counts.with_lora(settings.lora.rank)
    frozen = beside(settings, lambda folder: read_config(Path(folder)))
    way = memory.Way(length, recompute=settings.recompute, ranks=settings.ranks, **frozen)
    plan, _, kept = divide(counts, way, settings, int(torch.cuda.get_device_properties(0).total_memory), apart=apart)
    if plan.available <= 0:
        raise UserError("engine and trainer do not fit this GPU together; `etude plan` says what would")
    return plan.available, kept
