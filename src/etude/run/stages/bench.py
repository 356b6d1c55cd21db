"""The `bench` stage: the model so far on a set of tasks, beside other models if wished. A report, not a model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.agent.policies import in_folder
from etude.agent.trace import read_traces
from etude.bench.agents import BUILT_IN, TRACES, Agent, BenchSettings, model_agent, run_benchmark, weights_mark
from etude.bench.arenas import run_arena
from etude.bench.trials import Trial, read_results
from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json
from etude.lineage import environment
from etude.lineage.facts import Measured
from etude.lineage.record import load_lineage
from etude.lineage.tree import find_model
from etude.models.bases import is_run, locate, resolve
from etude.models.load import choose_device
from etude.models.shape import model_shape
from etude.questions.settings import CODE
from etude.report.benchmark import Scored, write_report
from etude.rl.arenas import Choice, check_judge
from etude.rl.metrics import sampling_flops
from etude.run.folder import readable_record
from etude.run.stage import Ahead, Job, Outcome, Stage, file_used, free_gpu_memory
from etude.sandbox.images import decides
from etude.tasks.manifest import find_manifest, load_set, picked, read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.bench.statistics import Estimate

    Numbers = dict[str, float | int | str | None]

RESULTS = "results.json"
WITHOUT_EFFECT = {"sandbox", "tasks", "against", "concurrency", "device", "engine_memory"}


class BenchStageSettings(BenchSettings):
    """A benchmark inside a recipe."""

    tasks: str = Field(description="task manifest, as `etude tasks make` writes it; a benchmark or a training set")
    only: str = Field(default="", description="prefixes of the ids of tasks to use, separated by spaces; empty: all")
    against: list[str] = Field(default=[], description="further models: known bases, runs, model folders; oracle, noop")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    engine_memory: float = Field(default=0.0, ge=0, description="KV cache in GB; 0: a share of the free memory")


class BenchStage(Stage):
    """Measures the model that the stages before have made."""

    settings = BenchStageSettings
    needs_model = True

    def check(self, settings: BenchStageSettings) -> None:
        if settings.arena == CODE:
            path = find_manifest(settings.tasks, "bench.tasks")
            picked(f"bench.tasks: {settings.tasks}", read_rows(path)[2], settings.only)
        else:
            _choice(settings).open()
            check_judge(settings.questions.judge, Path())
        if len(set(settings.against)) < len(settings.against):
            raise UserError("bench.against names a model twice; name each once")
        if settings.arena == CODE and "oracle" in settings.against and not {"edit", "write"} <= {*settings.tools.tools}:
            raise UserError("the oracle needs the tools edit and write; add them to bench.tools, or leave it out")
        for word in settings.against:
            _identity(word)

    def check_order(self, settings: BenchStageSettings, ahead: Ahead) -> None:
        if (own := ahead.made_by[-1]) in settings.against:
            raise UserError(f"bench.against: {own!r} is also the stage that is measured; name the other by its path")

    def inputs(self, settings: BenchStageSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return settings, tasks by content and the other models by identity; seeds are made of model, task and attempt."""
        tasks, without = "", WITHOUT_EFFECT
        if settings.arena == CODE:
            tasks, without = sha256_file(find_manifest(settings.tasks, "bench.tasks")), without | {"arena", "questions"}
        else:
            arena = _choice(settings).open()
            tasks = digest_of([arena.digest, arena.about])
        return {
            "settings": settings.model_dump(mode="json", exclude=without),
            "tasks": tasks,
            "against": {word: _identity(word) for word in settings.against},
            **decides(settings.sandbox),
        }

    def run(self, settings: BenchStageSettings, job: Job) -> Outcome:
        """Run the trials that are missing, and write the report."""
        work, own, folder = job.work, job.model.record.stage, job.work.folder
        folders = _folders(settings, job)
        agents = _agents(settings, folders, job)
        if settings.arena == CODE:
            manifest = find_manifest(settings.tasks, "bench.tasks")
            tasks = load_set(manifest, work.cache, work.reporter, settings.only, settings.sandbox)
            count, began = len(tasks.tasks), time.monotonic()
            asyncio.run(run_benchmark(tasks, agents, settings, folder, work.cache, work.reporter))
        else:
            manifest, began = Path(settings.tasks).expanduser(), time.monotonic()
            count = asyncio.run(run_arena(_choice(settings, work.cache), agents, settings, folder, work.reporter))
        free_gpu_memory()
        _count_compute(folders, time.monotonic() - began, job)
        write_json(folder / RESULTS, {"lines": write_report([folder], folder, stage=job.name)})
        return Outcome(
            parents=[job.model.as_parent("compared")],
            data=[file_used(manifest, f"{manifest.name} ({count} tasks)")] if manifest.is_file() else [],
            device=environment.device_name(choose_device(settings.device).type),
            summary=_summary(Scored(read_results(folder)), own),
        )

    def show(self, folder: Path) -> list[str]:
        return [*read_json(folder / RESULTS)["lines"], f"report: {folder / 'report.html'}"]


def _choice(settings: BenchStageSettings, cache: Path = Path()) -> Choice:
    given = {name: getattr(settings, name) for name in ("arena", "tasks", "harness", "only", "questions", "device")}
    return Choice(**given, cache=cache, setting="bench")


def _identity(word: str) -> Any:
    """Return what decides what a model does, without loading it."""
    if word in BUILT_IN:
        return word
    base = resolve(word)
    return {"model": weights_mark(find_model(base.folder))} if is_run(base) else base.identity()


def _folders(settings: BenchStageSettings, job: Job) -> dict[str, Path]:
    """Return the weights of all models by what the report calls them: the stage that made one, or the recipe's word."""
    own = job.model.record.stage
    words = [word for word in settings.against if word not in BUILT_IN]
    return {own: job.model.folder} | {word: locate(word, job.work.cache, job.work.reporter)[1] for word in words}


def _agents(settings: BenchStageSettings, folders: Mapping[str, Path], job: Job) -> list[Agent]:
    memory = int(settings.engine_memory * 1e9) or None
    models = [
        model_agent(in_folder(name, folder, settings.device, job.work.reporter, memory=memory), name)
        for name, folder in folders.items()
    ]
    return [*models, *(BUILT_IN[word] for word in settings.against if word in BUILT_IN)]


def _count_compute(folders: Mapping[str, Path], seconds: float, job: Job) -> None:
    """Write down what sampling took. Seconds are those of this session; what a killed one had not written is not known."""
    shapes = {name: model_shape(folder).compute for name, folder in folders.items()}
    metrics, path = job.work.metrics, job.work.folder / TRACES
    for trace in read_traces(path)[0] if path.exists() else []:  # it is not, where every trial was invalid
        if (key := f"trial/{trace.id}") not in metrics and (name := trace.id.rsplit(":", 2)[0]) in shapes:
            flops, tokens = sampling_flops(trace, shapes[name]), sum(len(node.tokens) for node in trace.nodes)
            held = max((node.began + node.seconds for node in trace.nodes), default=0.0)
            metrics.put(key, tokens=tokens, flops=flops, sampling_flops=flops, sandbox_seconds=round(held, 3))
    metrics.put(f"session/{1 + sum(1 for _ in metrics.rows('session/')):03d}", device_seconds=round(seconds, 3))


def _summary(scored: Scored, own: str) -> Numbers:
    """Return the numbers of the stage's model, and those of the others with their names behind a slash."""
    summary: Numbers = {}
    for name, score in sorted(scored.scores.items(), key=lambda each: each[0] != own):
        made = sum(trial.model == name for trial in scored.results.trials)
        numbers = _numbers(scored.valid[name], score) | {"invalid": made - len(scored.valid[name])}
        summary |= {key if name == own else f"{key}/{name}": value for key, value in numbers.items()}
    return summary


def _numbers(trials: Sequence[Trial], score: Estimate | None) -> Numbers:
    count = len(trials)
    shares = [round(share, 4) for share in score[:3]] if score else [None] * 3
    solved = dict(zip(("solved", "solved_low", "solved_high"), shares, strict=True))
    calling = sum(trial.calls > 0 for trial in trials)
    written = sum(trial.tokens.get("written", 0) for trial in trials)
    means = {"valid_calls": round(calling / count, 4), "tokens_per_trial": round(written / count, 1)} if count else {}
    return {**solved, **means, "trials": count, "tasks": score.tasks if score else 0}


def scores_of(folder: Path, model: Path) -> list[Measured]:
    """Return the scores of this model, and of no other, from a benchmark's folder; a stage calls it by the stage that made it."""
    results = read_results(folder)
    scored = Scored(results)
    stage, lineage = readable_record(folder), load_lineage(model)
    digest = lineage.records[lineage.head].model_digest
    stages = [each.name for each in stage.parents if each.model_digest == digest] if stage else []
    mine = [name for name in scored.valid if name.endswith(f"@{weights_mark(model)}") or name in stages]
    rules = f"harness {results.header.harness}, task set {results.header.tasks[:12]}"
    task, metric = f"etude bench {folder.absolute().name}", f"avg@{results.attempts}"
    scores = [score for name in mine if (score := scored.scores[name])]
    return [Measured(task, metric, each[0], each[1:3], f"{each.tasks} tasks, {rules}") for each in scores]
