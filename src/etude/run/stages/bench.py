"""The `bench` stage: what the model so far does with tasks, beside others if wished. A report, not a model."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.bench.agents import TRACES, BenchSettings, run_benchmark
from etude.errors import UserError
from etude.files import read_json, sha256_file, write_json
from etude.lineage import environment
from etude.lineage.record import DataUse, Parent
from etude.lineage.tree import find_model
from etude.models.bases import is_run, locate, resolve
from etude.run.stage import Job, Outcome
from etude.tasks.manifest import find_manifest, load_set, picked, read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from etude.bench.agents import Contestant
    from etude.bench.statistics import Estimate
    from etude.bench.trials import Trial
    from etude.report.benchmark import Scored

    Numbers = dict[str, float | int | str | None]

RESULTS = "results.json"
WITHOUT_EFFECT = {"tasks", "against", "concurrency", "device", "engine_memory"}


class BenchStageSettings(BenchSettings):
    """A benchmark inside a recipe."""

    tasks: str = Field(
        description="a manifest of tasks, as `etude tasks make` writes it; a benchmark or a training set"
    )
    only: str = Field(default="", description="only tasks whose ids begin with one of these words")
    against: list[str] = Field(
        default=[], description="models to measure as well: known bases, folders of runs or models; oracle, noop"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    engine_memory: float = Field(default=0.0, ge=0, description="GB for the engine's cache; 0: a share of what is free")


class BenchStage:
    """Measures the model that the stages before have made."""

    version = 1
    settings = BenchStageSettings
    makes_model = False
    reads_corpus = False

    def check(self, settings: BenchStageSettings) -> None:
        """Refuse a set without a task, and models that are not there."""
        path = find_manifest(settings.tasks, "bench.tasks")
        picked(f"bench.tasks: {settings.tasks}", read_rows(path)[2], settings.only)
        if len(set(settings.against)) < len(settings.against):
            raise UserError("bench.against names a model twice; name each once")
        if "oracle" in settings.against and not {"edit", "write"} <= {*settings.tools.tools}:
            raise UserError("the oracle needs the tools edit and write; add them to bench.tools, or leave it out")
        for word in settings.against:
            _identity(word)

    def inputs(self, settings: BenchStageSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return settings, tasks by content and the other models by identity; seeds are made of model, task and attempt."""
        if parent_digest is None:
            raise UserError("bench measures a model; set `base` in the recipe, or put a stage before it that makes one")
        found = settings.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        against = {word: _identity(word) for word in settings.against}
        return {
            "settings": found,
            "tasks": sha256_file(find_manifest(settings.tasks, "bench.tasks")),
            "against": against,
        }

    def run(self, settings: BenchStageSettings, job: Job) -> Outcome:
        """Make the trials that are missing, and write the report."""
        from etude.bench.trials import read_results
        from etude.models.load import choose_device
        from etude.report.benchmark import Scored, write_report

        assert job.parent is not None
        work, record, folder = job.work, job.parent.record, job.work.folder
        folders, manifest = _folders(settings, job), find_manifest(settings.tasks, "bench.tasks")
        tasks = load_set(manifest, work.cache, work.reporter, settings.only)
        began = time.monotonic()
        players = _contestants(settings, folders, job)
        asyncio.run(run_benchmark(tasks, players, settings, folder, work.cache, work.reporter))
        _free_memory()
        _count_compute(folders, time.monotonic() - began, job)
        lines = write_report([folder], folder)
        write_json(folder / RESULTS, {"lines": lines})
        return Outcome(
            parents=[Parent(name=record.stage, role="compared", record=record.id, model_digest=record.model_digest)],
            data=[_data_use(manifest, len(tasks.tasks))],
            device=environment.device_name(choose_device(settings.device).type),
            summary=_summary(Scored(read_results(folder), 0), record.stage),
        )

    def show(self, folder: Path, console: Console) -> None:
        """Print what was found."""
        for line in [*read_json(folder / RESULTS)["lines"], f"report: {folder / 'report.html'}"]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _identity(word: str) -> Any:
    """Return what decides what a model does, without loading it."""
    from etude.bench.agents import BUILT_IN, weights_mark

    if word in BUILT_IN:
        return word
    base = resolve(word)
    return {"model": weights_mark(find_model(base.folder))} if is_run(base) else base.identity()


def _folders(settings: BenchStageSettings, job: Job) -> dict[str, Path]:
    """Return the weights of all models by what the report calls them: the stage that made one, or the recipe's word."""
    from etude.bench.agents import BUILT_IN

    assert job.parent is not None
    own = job.parent.record.stage
    if own in settings.against:
        raise UserError(f"bench.against: {own!r} is also the stage that is measured; name the other by its path")
    words = [word for word in settings.against if word not in BUILT_IN]
    return {own: job.parent.folder} | {word: locate(word, job.work.cache, job.work.reporter)[1] for word in words}


def _contestants(settings: BenchStageSettings, folders: Mapping[str, Path], job: Job) -> list[Contestant]:
    from etude.agent.policies import in_folder
    from etude.bench.agents import BUILT_IN, entrant

    memory = int(settings.engine_memory * 1e9) or None
    models = [
        entrant(in_folder(name, folder, settings.device, job.work.reporter, memory=memory), name)
        for name, folder in folders.items()
    ]
    return [*models, *(BUILT_IN[word] for word in settings.against if word in BUILT_IN)]


def _free_memory() -> None:
    """Give a GPU's memory back: the stages after this one may work in processes of their own."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _count_compute(folders: Mapping[str, Path], seconds: float, job: Job) -> None:
    """Write down what sampling took. Seconds are those of this session; what a killed one had not written is not known."""
    from etude.agent.trace import read_traces
    from etude.models.shape import model_shape
    from etude.rl.metrics import sampling_flops

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
    found: Numbers = {}
    for name, score in sorted(scored.scores.items(), key=lambda each: each[0] != own):
        made = sum(trial.model == name for trial in scored.results.trials)
        numbers = _numbers(scored.valid[name], score) | {"invalid": made - len(scored.valid[name])}
        found |= {key if name == own else f"{key}/{name}": value for key, value in numbers.items()}
    return found


def _numbers(trials: Sequence[Trial], score: Estimate | None) -> Numbers:
    count = len(trials)
    ends = score[:3] if score else (None, None, None)
    solved = {
        name: end if end is None else round(end, 4)
        for name, end in zip(("solved", "solved_low", "solved_high"), ends, strict=True)
    }
    calling = sum(trial.calls > 0 for trial in trials)
    written = sum(trial.tokens.get("written", 0) for trial in trials)
    means = {"valid_calls": round(calling / count, 4), "tokens_per_trial": round(written / count, 1)} if count else {}
    return {**solved, **means, "trials": count, "tasks": score.tasks if score else 0}


def _data_use(path: Path, tasks: int) -> DataUse:
    return DataUse(name=f"{path.name} ({tasks} tasks)", source=f"file {path.absolute()}", revision=None, digest=sha256_file(path),
                   files=1, bytes=path.stat().st_size, left_out={})  # fmt: skip
