"""What a recipe will take, before anything is fetched, allocated or run: memory by part, rows at once, hours (`etude plan`).

Each stage that trains is planned by the function that its session obeys (`training/memory.py`), from the base's config.json alone.
Tokens a second are the GPU's peak times the share of it (MFU) that was measured on the nearest
size of model, from `gpus.toml`; of a GPU that was never measured the share is the H200's, and that is said. How long rollouts will be
nobody knows before: the hours of `rl` are those of rollouts that are all as long as a row, sampled at a share of what memory allows.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import UserError, nearest
from etude.jsonl import numbers, read_lines
from etude.lineage.compute import forward_flops, training_flops
from etude.lineage.record import RECORD_FILE, load_record
from etude.models.bases import Base, resolve
from etude.models.context import stretch
from etude.models.fetch import default_cache, fetch
from etude.models.shape import ModelShape, model_shape, read_config, routed_share, shape_of, text_config
from etude.progress import Reporter
from etude.rl.division import beside, divide
from etude.run import forecast
from etude.run.folder import METRICS
from etude.run.stage import resolve_model
from etude.run.stages.pretrain import llama_config
from etude.run.stages.sft import CONTEXT
from etude.training import memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from etude.recipe.cluster import EnginePlaces
    from etude.recipe.recipe import Recipe, StageEntry

TRAINED = ("pretrain", "cpt", "extend", "sft", "mtp", "rl")
MACHINE = re.compile(r"(?:(?P<count>\d+)x)?(?P<name>[a-z0-9-]+)", re.IGNORECASE)
MEASURED = "h200"
FORWARDS = {
    "train": 3,
    "lora": 2,
    "mtp": 3,
}  # what a step costs in forward passes; recomputing the activations costs one more


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind."""

    name: str
    count: int
    facts: dict[str, Any]  # of gpus.toml
    counted: bool = True  # whether somebody said how many

    def share(self, kind: str, parameters: int, *, experts: bool = False, recompute: bool = False) -> tuple[float, str]:
        """Return the share of the peak that a kind of work reached on the nearest size of model, and where that is from."""
        rates = [rate for rate in gpus()[MEASURED]["measured"] if rate["kind"] == kind]
        alike = [rate for rate in rates if rate.get("experts", False) == experts] or rates
        rate = min(alike, key=lambda each: abs(math.log(each["parameters"] / parameters)))
        unlike = "" if self.name == MEASURED else f", not measured on {self.name}: as on {MEASURED}"
        unlike += "" if self.count == 1 else ", several ranks not measured"
        of = "of what memory allows" if kind == "decode" else "MFU"
        if kind in FORWARDS and recompute != rate.get("recompute", False):
            unlike += f", by arithmetic {'with' if recompute else 'without'} recompute"
            rate = rate | {"mfu": rate["mfu"] * (FORWARDS[kind] + 1 - recompute) / (FORWARDS[kind] + recompute)}
        return rate["mfu"], f"{rate['mfu']:.0%} {of} as {rate['source']}{unlike}"


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
    return Machine(name, int(match["count"] or 1), gpus()[name], bool(match["count"]))


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
    apart: bool = False  # whether that engine has GPUs of its own

    @property
    def hours(self) -> float | None:
        return self.tokens / self.rate / 3600 if self.tokens and self.rate else None


def plan_recipe(recipe: Recipe, on: Machine, cache_folder: Path | None = None) -> list[Planned]:
    """Plan the stages that train: on one machine, or as [cluster] places them where that has GPUs and `on` does not say how many."""
    engines: list[EnginePlaces] = []
    if recipe.cluster and recipe.cluster.trainer.gpus and not on.counted:
        on, engines = replace(on, count=recipe.cluster.ranks), recipe.cluster.engines
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
        planned.append(plan_stage(entry, config, length, on, engines, cache_folder))
    return planned


def plan_stage(
    entry: StageEntry, config: Any, length: int, on: Machine, engines: Sequence[EnginePlaces] = (),
    cache_folder: Path | None = None,
) -> Planned:  # fmt: skip
    """Plan one stage. `engines`: what samples for `rl` on GPUs of its own; none: the trainer's GPU does."""
    settings: Any = entry.settings
    samplers, apart = sum(each.count for each in engines), max((each.gpus for each in engines), default=0)
    depth = getattr(settings, "depth", 1) if entry.kind == "mtp" or getattr(settings, "mtp", None) else 0
    frozen, shared = entry.kind == "mtp", getattr(settings, "shared", True)
    counts, lora = memory.count_config(config, depth, shared=shared, frozen=frozen), getattr(settings, "lora", None)
    if lora:
        counts = counts.with_lora(lora.rank)
    ranks = settings.ranks if entry.kind == "rl" and not apart else on.count
    held: dict[str, Any] = {}
    if entry.kind == "rl":
        held = beside(settings, lambda word: _config_of(resolve_model(word), cache_folder))
    way = memory.Way(length, recompute=settings.recompute, ranks=ranks, **held)
    adamw, total = settings.optimiser.name == "adamw", int(on.facts["memory_gb"] * 1e9)
    if entry.kind == "rl":
        plan, rows, kept = divide(counts, way, settings, total, apart=apart)
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
    if apart and entry.kind == "rl" and not kept and not settings.engine:
        help_with, fits = "an engine of more GPUs", 0
    shape, experts = shape_of(config), bool(counts.experts)
    flops = training_flops(shape.compute, length) / length  # of a token
    if entry.kind == "mtp":  # a frozen trunk; for every depth a layer that learns, and the head without its gradient
        head, learnt = counts.vocabulary * counts.hidden, counts.trained / (1 if shared else depth)
        flops = forward_flops(shape.compute, length) / length + depth * (6 * learnt + 4 * head)
    work = "mtp" if frozen else "lora" if lora else "train"
    mfu, source = on.share(work, shape.active_parameters, experts=experts, recompute=settings.recompute)
    rate, tokens = ranks * mfu * on.facts["bf16_tflops"] * 1e12 / flops, getattr(settings, "tokens", None)
    if entry.kind == "rl":
        tokens = settings.steps * settings.groups * settings.group_size * length
    if kept:
        share, how = on.share("decode", shape.active_parameters, experts=experts)
        together, routed = -(-settings.at_once // max(1, samplers)), routed_share(config.get_text_config())
        sampled = share * sampling_floor(counts, shape, routed, together, length, kept, on)
        sampled *= (
            sum(each.count * each.gpus for each in engines) if apart else 1
        )  # GPUs of one engine read its weights together
        rate = min(rate, sampled) if apart else 1 / (1 / rate + 1 / sampled)
        source = f"at most, if every rollout is {length:,} tokens long; sampling {how}; {source}"
    return Planned(
        entry.name, plan, micro if fits else 0, length, help_with, tokens, rate, source, bool(kept) * 2 * counts.weights, kept,
        bool(apart),
    )  # fmt: skip


def sampling_floor(
    counts: memory.Counts, shape: ModelShape, share: float, wanted: int, length: int, cache: int, on: Machine
) -> float:
    """Return the tokens a second of a step that reads every weight it needs and the cache, half full, once.

    `share`: of routed experts that a token passes through. As many rollouts go on at once as are `wanted` and the cache holds.
    """
    position = 2 * counts.cached  # bytes
    together = max(1, min(wanted, cache // max(1, position * length)))
    routed = (shape.parameters - shape.active_parameters) / (1 - share) if share < 1 else 0.0
    touched = shape.parameters - routed + routed * (1 - (1 - share) ** together)
    return float(together * on.facts["bandwidth_tbs"] * 1e12 / (2 * touched + together * position * length / 2))


def base_config(word: str, cache_folder: Path | None) -> Any:
    """Return the config of a base: of a folder, which needs to hold nothing else, or of one that is fetched."""
    return _config_of(resolve(word), cache_folder)


def _config_of(base: Base, cache_folder: Path | None) -> Any:
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
        "available": plan.available, "main_memory": plan.main_memory,
        "fits": bool(stage.micro), "micro": stage.micro, "remedy": stage.remedy, "tokens": stage.tokens,
        "tokens_per_second": stage.rate or None, "hours": stage.hours, "rate_source": stage.source if stage.rate else None,
    }  # fmt: skip


Measured = dict[tuple[str, str, str], forecast.Curve]  # by stage, kind of stage, and what was measured
SOLVED, BITS = "solved", "bits_per_byte/"


def read_curves(run: Path) -> Measured:
    """Return what the finished stages of a run measured."""
    if not (folders := sorted(path.parent for path in run.glob(f"*/{RECORD_FILE}"))):
        raise UserError(f"--from {run} is no run with a finished stage; give a folder that etude run has written")
    kinds = {folder: load_record(folder).kind for folder in folders}
    return {(folder.name, kind, what): curve for folder, kind in kinds.items() if kind in TRAINED
            for what, curve in _stage_curves(folder / METRICS).items()}  # fmt: skip


def _stage_curves(path: Path) -> dict[str, forecast.Curve]:
    """Return bits per byte by domain over tokens, and the share solved over steps."""
    if not path.is_file():
        raise UserError(f"{path} does not exist, so there is no curve; leave this run out of --from")
    lines, torn = read_lines(path)
    seen, solved, bits = 0.0, [], dict[str, list[tuple[float, float]]]()
    for number, line in enumerate(lines + [b"torn"] * bool(torn), 1):
        try:
            row = json.loads(line)
            part, _, step = row["key"].partition("/")
            values = dict(numbers(row)) if part in {"train", "eval"} else {}
            seen += values.get("tokens", 0.0)
            if part == "train" and SOLVED in values:
                solved.append((int(step), values[SOLVED], values["episodes"]))
            for name in (each for each in values if each.startswith(BITS)):
                bits.setdefault(name.removeprefix(BITS), []).append((seen, values[name]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}, line {number}: no row as stages write it; leave this run out of --from") from None
    curves = {what: forecast.bits_curve(points) for what, points in bits.items() if points[-1][0] > 0}
    return curves | ({SOLVED: forecast.share_curve(solved)} if any(row[2] > 0 for row in solved) else {})


def outlook(curves: Sequence[forecast.Curve], budget: float, hours: float | None, unknown: str) -> tuple[Any, Any]:
    """Return what comes at a budget and at twice that, as JSON has it, and draws of what an hour gives in between, or None.

    What cannot be told is said in its place: `unknown`, or what the curves give reason to.
    """
    curves = forecast.comparable(curves)
    bits, values = curves[0].bits, np.concatenate([curve.values for curve in curves])
    known: list[Any] = [unknown or forecast.doubt(curves, times * budget) for times in (1, 2)]
    gains = spread = None
    if not known[0]:
        told = forecast.predict(curves, [budget, 2 * budget])
        known = [doubt or [float(each[at]) for each in told[:3]] for at, doubt in enumerate(known)]
        if hours and not isinstance(known[1], str):
            gains = np.diff(told.draws, axis=0)[0] * (-1 if bits else 1) / hours
            spread = [float(each) for each in np.quantile(gains, [0.5, forecast.TAIL, 1 - forecast.TAIL])]
    last, best = float(np.mean([curve.end()[1] for curve in curves])), float(values.min() if bits else values.max())
    return {"unit": "bits per byte" if bits else "share of tasks", "runs": len(curves), "last": last, "best": best,
            "budget": budget, "at_budget": known[0], "at_twice": known[1], "hours": hours, "gain_an_hour": spread}, gains  # fmt: skip


def outlooks(recipe: Recipe, planned: Sequence[Planned], runs: Sequence[Measured]) -> dict[str, Any]:
    """Return the outlooks of all stages that train and that runs have under the same name and of the same kind, and a verdict."""
    rows, gains = [], dict[tuple[str, str, str], Any]()
    for entry, plan in zip((each for each in recipe.stages if each.kind in TRAINED), planned, strict=True):
        budget = float(getattr(entry.settings, "steps", 0) if entry.kind == "rl" else plan.tokens or 0)
        unknown = "" if budget else f"its budget is not known before it runs; set {entry.name}.tokens"
        for key in dict.fromkeys(key for run in runs for key in run if key[:2] == (entry.name, entry.kind)):
            row, gain = outlook([run[key] for run in runs if key in run], budget, plan.hours, unknown)
            rows.append({"stage": entry.name, "measure": key[2], **row})
            gains |= {} if gain is None else {key: gain}
    return {"forecasts": rows, "verdict": verdict(gains, runs)}


def verdict(gains: dict[tuple[str, str, str], Any], runs: Sequence[Measured]) -> str:
    """Say which stage gives more for the next hour, if that can be told: by the same measure, or by what a bit per byte was worth."""
    by_measure: dict[str, dict[str, Any]] = {}
    for key, gain in gains.items():
        by_measure.setdefault(key[2], {})[key[0]] = gain
        ends = [(run[key].end()[1], run[rl].end()[1]) for run in runs for rl in run if rl[2] == SOLVED and key in run]
        if key[2] != SOLVED and (worth := forecast.worth(ends)) is not None:
            by_measure.setdefault(SOLVED, {})[f"{key[0]} by {key[2]}"] = gain * worth
    lines = []
    for what, same in by_measure.items():
        said = f"{best} gives more" if (best := forecast.better(same)) else f"{' and '.join(same)} cannot be told apart"
        lines += [f"for the next hour, by {what}: {said}"] * (len(same) > 1)
    need = f"two forecasts by one measure, or {forecast.PAIRS} runs with bits per byte and RL, some with more CPT"
    return "; ".join(lines) or f"which stage gives more for the next hour cannot be told: that takes {need}"
