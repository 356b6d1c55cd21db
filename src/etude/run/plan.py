"""What a recipe will take, before anything is fetched, allocated or run: memory by part, rows at once, hours (`etude plan`).

Each stage that trains is planned by the function that its session obeys (`training/memory.py`), from the base's config.json alone.
Tokens a second are the GPU's peak times the share of it (MFU) that was measured on the nearest
size of model, from `gpus.toml`; of a GPU that was never measured the share is the H200's, and that is said.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, nearest
from etude.lineage.compute import training_flops
from etude.models.bases import resolve
from etude.models.context import stretch
from etude.models.fetch import default_cache, fetch
from etude.models.shape import model_shape, read_config, shape_of, text_config
from etude.progress import Reporter
from etude.rl.division import divide
from etude.run.stages.pretrain import llama_config
from etude.run.stages.sft import CONTEXT
from etude.training import memory

if TYPE_CHECKING:
    from pathlib import Path

    from etude.recipe.recipe import Recipe, StageEntry

TRAINED = ("pretrain", "cpt", "extend", "sft", "mtp", "rl")
MACHINE = re.compile(r"(?:(?P<count>\d+)x)?(?P<name>[a-z0-9-]+)", re.IGNORECASE)
MEASURED = "h200"


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind."""

    name: str
    count: int
    facts: dict[str, Any]  # of gpus.toml

    def share(self, kind: str, parameters: int) -> tuple[float, str]:
        """Return the share of the peak that a kind of work reached on the nearest size of model, and where that is from."""
        rates = [rate for rate in gpus()[MEASURED]["measured"] if rate["kind"] == kind]
        rate = min(rates, key=lambda each: abs(math.log(each["parameters"] / parameters)))
        unlike = "" if self.name == MEASURED else f", not measured on {self.name}: as on {MEASURED}"
        unlike += "" if self.count == 1 else ", several ranks not measured"
        return rate["mfu"], f"MFU {rate['mfu']:.0%} as {rate['source']}{unlike}"


@cache
def gpus() -> dict[str, Any]:
    """Return what is known of GPUs."""
    return tomllib.loads(resources.files("etude.run").joinpath("gpus.toml").read_text(encoding="utf-8"))


def machine(word: str) -> Machine:
    """Return the machine that `8xH200` means."""
    match = MACHINE.fullmatch(word)
    name = match["name"].lower() if match else ""
    if not match or name not in gpus() or match["count"] == "0":
        known = f"{', '.join(gpus())}, or several as 8xh200"
        raise UserError(f"--on {word!r} is no machine known here, which are {known}{nearest(name, gpus())}")
    return Machine(name, int(match["count"] or 1), gpus()[name])


@dataclass(frozen=True)
class Planned:
    """One stage."""

    name: str
    plan: memory.Plan
    micro: int  # rows at once; 0: none fits
    length: int
    remedy: str  # what would make it fit
    tokens: int | None = None  # of the whole stage; None: not known before it runs
    rate: float = 0.0  # tokens a second
    source: str = ""  # of the rate
    engine: int = 0  # bytes of an engine's weights beside it, for `rl`
    cache: int = 0  # and of its KV cache

    @property
    def hours(self) -> float | None:
        return self.tokens / self.rate / 3600 if self.tokens and self.rate else None


def plan_recipe(recipe: Recipe, on: Machine, cache_folder: Path | None = None) -> list[Planned]:
    """Plan the stages that train."""
    config = base_config(recipe.base, cache_folder) if recipe.base is not None else None
    corpus: Any = recipe.data.settings if recipe.data else None
    planned = []
    for entry in (each for each in recipe.stages if each.kind in TRAINED):
        settings: Any = entry.settings
        if entry.kind not in {"sft", "rl"} and corpus is None:
            raise UserError(f"{entry.name} trains on a corpus, and this recipe has none; describe one in [data]")
        if entry.kind == "pretrain":
            config = text_config(llama_config(settings.model, corpus.tokeniser.vocabulary, 0))
        if config is None:
            raise UserError(f"{entry.name} needs a model to start from; set `base` in the recipe")
        context = int(config.get_text_config().max_position_embeddings)
        usual = {"sft": min(CONTEXT, context), "rl": context}
        length = settings.length or usual.get(entry.kind) or corpus.length
        if entry.kind == "extend" and length > context:
            config = stretch(config, length, settings.rope)
        planned.append(plan_stage(entry, config, length, on))
    return planned


def plan_stage(entry: StageEntry, config: Any, length: int, on: Machine) -> Planned:
    """Plan one stage."""
    settings: Any = entry.settings
    depth = getattr(settings, "depth", 1) if entry.kind == "mtp" or getattr(settings, "mtp", None) else 0
    frozen, shared = entry.kind == "mtp", getattr(settings, "shared", True)
    counts, lora = memory.count_config(config, depth, shared=shared, frozen=frozen), getattr(settings, "lora", None)
    if lora:
        counts = counts.with_lora(lora.rank)
    ranks = settings.ranks if entry.kind == "rl" else on.count
    reference = settings.kl.reference if entry.kind == "rl" and settings.kl.coefficient else ""
    way = memory.Way(length, recompute=settings.recompute, ranks=ranks, reference=reference)
    adamw, total = settings.optimiser.name == "adamw", int(on.facts["memory_gb"] * 1e9)
    if entry.kind == "rl":
        plan, rows, kept = divide(counts, way, settings, total)
    else:
        plan, rows, kept = memory.settle(counts, way, settings.optimiser, total), max(1, settings.batch // ranks), 0
    fits = plan.rows()
    micro = max((size for size in range(1, rows + 1) if rows % size == 0 and size <= fits), default=0)
    help_with = "" if fits else memory.remedy(counts, plan.way, plan.available, adamw=adamw, lora=not lora)
    if settings.micro and fits:
        micro = min(settings.micro, rows)
        help_with, fits = (f"micro = {fits}", 0) if micro > fits else ("", fits)
    if ranks > 1 and not adamw:
        help_with, fits = "one rank, as Muon cannot be used on several yet,", 0
    shape = shape_of(config)
    mfu, source = on.share("lora" if lora else "train", shape.active_parameters)
    flops = training_flops(shape.compute, length) / length  # of a token
    rate = 0.0 if entry.kind in {"mtp", "rl"} else ranks * mfu * on.facts["bf16_tflops"] * 1e12 / flops
    tokens, sampler = getattr(settings, "tokens", None), 2 * counts.weights if kept else 0
    return Planned(entry.name, plan, micro if fits else 0, length, help_with, tokens, rate, source, sampler, kept)


def base_config(word: str, cache_folder: Path | None) -> Any:
    """Return the config of a base: of a folder, which needs to hold nothing else, or of one that is fetched."""
    base = resolve(word)
    here = base.place in {"folder", "shipped"}
    folder = base.folder if here else fetch(base, cache_folder or default_cache(), Reporter()).folder
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json, which a plan needs (and nothing else of it)")
    model_shape(folder)  # refuses what is no causal language model
    return read_config(folder)


def described(stage: Planned) -> dict[str, Any]:
    """Return a plan as JSON has it; bytes."""
    plan, rows = stage.plan, max(1, stage.micro)
    parts = {**plan.parts, "activations": rows * plan.row, "logits": min(rows * plan.logits, plan.most_logits)}
    beside = {"engine weights": stage.engine, "KV cache": stage.cache} if stage.cache else {}
    return {
        "stage": stage.name, "way": asdict(plan.way), "parts": parts, "needed": plan.needed(rows), "beside": beside,
        "available": plan.available, "fits": bool(stage.micro), "micro": stage.micro, "remedy": stage.remedy, "tokens": stage.tokens,
        "tokens_per_second": stage.rate or None, "hours": stage.hours, "rate_source": stage.source if stage.rate else None,
    }  # fmt: skip
