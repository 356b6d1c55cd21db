"""The `rl` stage: learn from one's own attempts at tasks."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import fsync_tree, read_json, sha256_file, write_json
from etude.lineage.environment import device_name
from etude.lineage.record import DataUse, Parent
from etude.rl.settings import RlSettings
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome, Stage, file_used
from etude.run.stages.training import UNTRAINED_HEADS, carry_heads, copy_side_files, is_trained
from etude.tasks.demos import refuse_benchmarks
from etude.tasks.manifest import find_manifest, load_set, picked, read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from etude.tasks.manifest import TaskSet

RESULTS = "results.json"
WITHOUT_EFFECT = {
    "micro", "checkpoint_every", "keep", "ranks", "anchor_every", "engine_memory", "processes", "keep_traces", "tasks"
}  # fmt: skip
LATER = {"algorithm", "window", "tau", "lora", "attention", "engine"}
SCRATCH = ("exchange", "weights", "trainer", "job.json", "engine.log", "trainer.log", "reward_weights.json")
CHECKED = 2  # tasks whose check is tried before any time is spent on episodes


class RlStage(Stage):
    """Trains on tasks."""

    version = 1
    settings = RlSettings
    makes_model = True
    reads_corpus = False

    def check(self, settings: RlSettings) -> None:
        """Refuse a manifest that is not there, or has no task to play."""
        refuse_benchmarks(find_manifest(settings.tasks, "rl.tasks"))
        _, _, tasks = read_rows(find_manifest(settings.tasks, "rl.tasks"))
        picked(f"rl.tasks: {settings.tasks}", tasks, settings.only)

    def inputs(self, settings: RlSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return the settings that decide the result, and the tasks by content."""
        if parent_digest is None:
            raise UserError(
                "rl needs a model to start from; set `base` in the recipe, or put a stage before it that makes one"
            )
        chosen = settings.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        for name in LATER & chosen.keys():  # what was finished before these came is still what it was
            if chosen[name] == RlSettings.model_fields[name].default:
                del chosen[name]
        return {"settings": chosen, "seed": seed, "tasks": sha256_file(find_manifest(settings.tasks, "rl.tasks"))}

    def run(self, settings: RlSettings, job: Job) -> Outcome:
        """Train, unless that was done before the session was interrupted, and tidy up."""
        assert job.parent is not None
        folder, record = job.work.folder, job.parent.record
        if not is_trained(folder):
            manifest = find_manifest(settings.tasks, "rl.tasks")
            _trained(load_set(manifest, job.work.cache, job.work.reporter, settings.only), settings, job)
        for name in (*SCRATCH, *([] if settings.keep_traces else ["episodes"])):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        results = read_json(folder / RESULTS)
        return Outcome(
            parents=[Parent(name=record.stage, role="weights", record=record.id, model_digest=record.model_digest)],
            lineages=[job.parent.lineage],
            data=[_data_use(settings, results["tasks"])],
            device=results["device"],
            summary=results["summary"],
        )

    def show(self, folder: Path, console: Console) -> None:
        """Print what came of it."""
        from etude.report.rl import PAGE, steps_of, verdict

        for line in [*verdict(steps_of(folder)), *read_json(folder / RESULTS)["notes"], f"report: {folder / PAGE}"]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _trained(tasks: TaskSet, settings: RlSettings, job: Job) -> None:
    from etude.models.load import choose_device
    from etude.rl.environment import CodingEnvironment
    from etude.rl.orchestrator import orchestrate

    assert job.parent is not None
    parent, work, model = job.parent.folder, job.work, job.work.folder / MODEL
    environment = CodingEnvironment(tasks, settings, work.cache)
    asyncio.run(
        orchestrate(environment, parent.absolute(), settings, work, job.seed, before=lambda: _tasks_work(tasks))
    )
    # Imported here, as they take seconds, and others can begin before them.
    from etude.models.mtp_heads import keep_apart
    from etude.report.rl import write_report

    copy_side_files(parent, model)
    heads = carry_heads(parent, model)
    keep_apart(model)
    fsync_tree(model)  # before the results, which say that it is there
    write_report(work.folder, work.folder)
    notes = [UNTRAINED_HEADS] if heads else []
    device = device_name(choose_device(settings.device).type)
    write_json(
        work.folder / RESULTS,
        {"device": device, "tasks": len(tasks.tasks), "summary": _summary(work.folder), "notes": notes},
    )


async def _tasks_work(tasks: TaskSet) -> None:
    """Refuse a set whose checks are broken here: every reward would be 0, and nothing would be learnt from it."""
    from etude.tasks.score import check

    spread = tasks.tasks[:: max(1, len(tasks.tasks) // CHECKED)][:CHECKED]
    for task, wrong in zip(spread, await asyncio.gather(*(check(t, tasks.codebase(t)) for t in spread)), strict=True):
        if wrong:
            raise UserError(f"task {task.id}: its check is broken: {wrong}; look at the set with `etude tasks check`")


def _summary(folder: Path) -> dict[str, float | int]:
    """Return what the record tells: rewards and tasks solved at the beginning and at the end, and how much was done."""
    from etude.report.rl import steps_of
    from etude.rl.metrics import ends

    rows = steps_of(folder)
    both = {name: ends(rows, name) or (0.0, 0.0) for name in ("reward", "solved")}
    rewards = {
        f"{name}_{end}": round(both[name][place], 4) for name in both for place, end in enumerate(("first", "last"))
    }
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("episodes", "sampled_tokens")}
    return {"steps": len(rows), **sums, **rewards}


def _data_use(settings: RlSettings, tasks: int) -> DataUse:
    path = find_manifest(settings.tasks, "rl.tasks")
    _, codebases, rows = read_rows(path)
    licence = {row["codebase"]: row["licence"] for row in codebases}
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[licence[row["codebase"]]] += len(json.dumps(row))
    return file_used(path, f"{path.name} ({tasks} tasks)", dict(sizes))
