"""The `rl` stage: learn from one's own attempts at tasks."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json
from etude.inference.client import RemotePolicy
from etude.lineage.environment import device_name
from etude.models.load import choose_device, load_tokeniser, weight_files
from etude.models.shape import model_shape, read_config
from etude.questions.question import read_set, refuse_benchmark
from etude.questions.settings import CODE, QUESTIONS
from etude.report.rl import PAGE, steps_of, verdict, write_report
from etude.rl.arenas import Choice, check_judge
from etude.rl.environment import CodingEnvironment
from etude.rl.metrics import ends
from etude.rl.settings import RlSettings
from etude.run.folder import MODEL
from etude.run.stage import Ahead, Job, Outcome, Source, Stage, file_used, identity_of, resolve_model, source_of
from etude.run.stages.training import is_trained, refuse_long, without_later
from etude.sandbox.images import settled
from etude.tasks.demos import refuse_benchmarks
from etude.tasks.manifest import TaskSet, find_manifest, load_set, picked, read_rows
from etude.tasks.score import check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from etude.lineage.record import DataUse
    from etude.progress import Reporter
    from etude.rl.arenas import Arena

    Before = Callable[[], Awaitable[None]]

RESULTS = "results.json"
WITHOUT_EFFECT = {
    "micro", "checkpoint_every", "checkpoint_seconds", "keep",
    "ranks", "anchor_every", "engine_memory", "processes", "keep_traces", "tasks"
}  # fmt: skip
LATER = {"sandbox", "algorithm", "window", "tau", "lora", "attention", "engine", "router_replay"}
SCRATCH = ("exchange", "weights", "trainer", "job.json", "engine.log", "trainer.log", "reward_weights.json", "cluster")
CHECKED = 2  # tasks whose check is tried before any time is spent on episodes


class RlStage(Stage):
    """Trains on tasks."""

    settings = RlSettings
    needs_model = True
    makes_model = True

    def check(self, settings: RlSettings) -> None:
        """Refuse tasks that are not there or cannot be played, and whoever does not answer."""
        if settings.arena == CODE:
            manifest = find_manifest(settings.tasks, "rl.tasks")
            refuse_benchmarks(manifest)
            rows = picked(f"rl.tasks: {settings.tasks}", read_rows(manifest)[2], settings.only)
            tasks = [row["task"] for row in rows]
        else:
            tasks = [item.id for item in arena_of(settings, Path()).items]
            if settings.arena == QUESTIONS:
                path = Path(settings.tasks).expanduser()
                refuse_benchmark(path, read_set(path))
                check_judge(settings.questions.judge, Path())
        if settings.engine:
            asyncio.run(_answers(settings.engine))
        if settings.teacher.models:
            settings.teacher.refuse_gaps(tasks)
        for folder in _here(settings):
            model_shape(folder)
            weight_files(folder)

    def check_order(self, settings: RlSettings, ahead: Ahead) -> None:
        refuse_long(settings.length, ahead.context)
        for folder in _here(settings):
            refuse_unfit(folder, ahead.tokens, settings.length or ahead.context or 0)

    def inputs(self, settings: RlSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the settings that decide the result, and the tasks by content."""
        chosen = settings.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        for name in LATER & chosen.keys():  # what was finished before these came is still what it was
            if chosen[name] == RlSettings.model_fields[name].default:
                del chosen[name]
        del chosen["teacher"]
        if settings.teacher.models:
            models = {prefix: identity_of(resolve_model(word)) for prefix, word in settings.teacher.models.items()}
            chosen["teacher"] = settings.teacher.model_dump(mode="json") | {"models": models}
        if settings.harness.temperature != 1 or settings.kl.coefficient:
            chosen["revision"] = (
                2  # the first was off-policy there, and its penalty did not act where rewards are alike
            )
        if settings.arena == CODE:
            for name in ("arena", "questions"):
                del chosen[name]
            tasks = sha256_file(find_manifest(settings.tasks, "rl.tasks"))
        else:
            arena = arena_of(settings, Path())
            tasks = digest_of([arena.digest, arena.about])
        return {"settings": without_later(chosen), "seed": seed, "tasks": tasks}

    def run(self, settings: RlSettings, job: Job) -> Outcome:
        """Train, unless that was done before the session was interrupted, and tidy up."""
        folder = job.work.folder
        teachers = _teachers(settings, job)
        if not is_trained(folder):
            self._train(_with_folders(settings, teachers, job.model.folder), job)
        for name in (*SCRATCH, *([] if settings.keep_traces else ["episodes"])):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        results, known = read_json(folder / RESULTS), job.model.lineage.records  # whose licences travel with the model
        return Outcome(
            parents=[job.model.as_parent(), *(each.edge for each in teachers.values())],
            lineages=[job.model.lineage, *(each.lineage for each in teachers.values() if each.lineage)],
            licence_folders={
                each.edge.name: each.folder for each in teachers.values() if each.edge.record not in known
            },
            data=_data_uses(settings, results["tasks"]),
            device=results["device"],
            summary=results["summary"],
        )

    def play(
        self, environment: CodingEnvironment | Arena, model: Path, settings: RlSettings, job: Job, before: Before
    ) -> None:
        """Let episodes be played and learnt from, on this machine."""
        from etude.rl.orchestrator import orchestrate

        playing = orchestrate(environment, model, settings, job.work, job.seed, before=before)
        asyncio.run(closing(environment, playing, job.work.reporter.say))

    def _train(self, settings: RlSettings, job: Job) -> None:
        from etude.run.train import UNTRAINED_HEADS, complete_model

        parent, work = job.model.folder, job.work
        settings = with_replay(settings, parent)
        environment = environment_of(settings, work.cache, work.reporter)
        if isinstance(environment, CodingEnvironment):
            self.play(environment, parent.absolute(), settings, job, partial(_tasks_work, environment.set))
        else:
            self.play(environment, parent.absolute(), settings, job, partial(environment.ready, work.reporter.say))
        carried = complete_model(parent, work.folder / MODEL)
        write_report(work.folder, work.folder, job.name)
        results = {
            "device": device_name(choose_device(settings.device).type),
            "tasks": len(environment.items),
            "sandbox": settled(settings.sandbox),
            "summary": _summary(work.folder),
            "notes": [UNTRAINED_HEADS] if carried else [],
        }
        write_json(work.folder / RESULTS, results)

    def show(self, folder: Path) -> list[str]:
        return [*verdict(steps_of(folder)), *read_json(folder / RESULTS)["notes"], f"report: {folder / PAGE}"]


async def closing(environment: CodingEnvironment | Arena, playing: Awaitable[None], say: Callable[[str], None]) -> None:
    """Let episodes be played, then close what an arena has opened."""
    try:
        await playing
    finally:
        if not isinstance(environment, CodingEnvironment):
            await environment.close(say)


async def _answers(address: str) -> None:
    """Refuse an engine that cannot be reached, or does not speak tokens."""
    policy = RemotePolicy(address, 0)
    try:
        if not await policy.speaks_tokens():
            raise UserError(f"rl.engine: {address} returns no token ids; start vLLM with --enable-scale-out")
    finally:
        await policy.close()


def environment_of(settings: RlSettings, cache: Path, reporter: Reporter | None = None) -> CodingEnvironment | Arena:
    """Return the environment of settings on any machine: its tasks are unpacked into the cache there."""
    from etude.progress import Reporter as Quiet

    if settings.arena != CODE:
        return arena_of(settings, cache)
    manifest, say = find_manifest(settings.tasks, "rl.tasks"), reporter or Quiet(quiet=True)
    tasks = load_set(manifest, cache, say, settings.only, settings.sandbox)
    return CodingEnvironment(tasks, settings, cache)


def arena_of(settings: RlSettings, cache: Path) -> Arena:
    """Return the arena of settings that is not `code`."""
    given = {
        name: getattr(settings, name)
        for name in ("arena", "tasks", "harness", "only", "questions", "rewards", "seconds", "device")
    }
    return Choice(**given, cache=cache).open()


def with_replay(settings: RlSettings, model: Path) -> RlSettings:
    """Return settings that say whether the experts of rollouts are trained on: they are, unless told otherwise, if it has any."""
    shape = model_shape(model)
    mixture = shape.active_parameters < shape.parameters
    if settings.router_replay and not mixture:
        raise UserError(f"router_replay = true: {model.name} has no experts to replay; leave it out")
    chosen = mixture if settings.router_replay is None else settings.router_replay
    return settings.model_copy(update={"router_replay": chosen})


def _here(settings: RlSettings) -> list[Path]:
    """Return the folders of the teachers that need not be fetched."""
    bases = [resolve_model(word) for word in dict.fromkeys(settings.teacher.models.values())]
    return [base.folder for base in bases if base.place in {"folder", "shipped"}]


def refuse_unfit(teacher: Path, student: Path | None, length: int) -> None:
    """Refuse a teacher that cannot read what a student writes, in rows of `length` tokens; None: the student is not known yet."""
    if length > (context := model_shape(teacher).context):
        raise UserError(
            f"rl.teacher: {teacher} reads {context} tokens, rows may have {length}; set rl.length = {context}"
        )
    if student and load_tokeniser(teacher).get_vocab() != load_tokeniser(student).get_vocab():
        raise UserError(
            f"rl.teacher: {teacher} has other tokens than the model it is to teach; take one of the same family"
        )
    own, its = (read_config(folder).get_text_config().vocab_size for folder in (student or teacher, teacher))
    if its < own:
        raise UserError(f"rl.teacher: {teacher} knows {its} tokens, the model it is to teach {own}; take another")


def _teachers(settings: RlSettings, job: Job) -> dict[str, Source]:
    """Return the teachers by the words that they are called by."""
    sources = [Source(job.model.folder, job.model.as_parent(), job.model.lineage)]
    words = list(dict.fromkeys(settings.teacher.models.values()))
    for word in words:
        sources.append(source_of(word, job, "teacher", sources))
    return dict(zip(words, sources[1:], strict=True))


def _with_folders(settings: RlSettings, teachers: dict[str, Source], student: Path) -> RlSettings:
    """Return settings that call each teacher by its folder, as the trainer wants them; refuse those that do not fit."""
    for source in teachers.values():
        refuse_unfit(source.folder, student, settings.length or model_shape(student).context)
    folders = {prefix: str(teachers[word].folder.absolute()) for prefix, word in settings.teacher.models.items()}
    return settings.model_copy(update={"teacher": settings.teacher.model_copy(update={"models": folders})})


async def _tasks_work(tasks: TaskSet) -> None:
    """Refuse a set whose checks are broken here: every reward would be 0, and nothing would be learnt from it."""
    spread = tasks.tasks[:: max(1, len(tasks.tasks) // CHECKED)][:CHECKED]
    for task, wrong in zip(spread, await asyncio.gather(*(check(t, tasks.codebase(t)) for t in spread)), strict=True):
        if wrong:
            raise UserError(f"task {task.id}: its check is broken: {wrong}; look at the set with `etude tasks check`")


def _summary(folder: Path) -> dict[str, float | int | None]:
    """Return what the record tells: rewards and tasks solved at the beginning and at the end, and how much was done."""
    rows = steps_of(folder)
    rewards = {
        f"{name}_{end}": None if value is None else round(value, 4)
        for name in ("reward", "solved")
        for end, value in zip(("first", "last"), ends(rows, name) or (None, None), strict=True)
    }
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("episodes", "sampled_tokens")}
    return {"steps": len(rows), **sums, **rewards}


def _data_uses(settings: RlSettings, tasks: int) -> list[DataUse]:
    path = Path(settings.tasks).expanduser()
    if settings.arena == CODE:
        return [_data_use(path, tasks)]
    licence = read_set(path).about.licence if settings.arena == QUESTIONS else ""
    named = f"{path.name} ({tasks} questions)" if settings.arena == QUESTIONS else path.name
    return [file_used(path, named, {licence: path.stat().st_size} if licence else None)] if path.is_file() else []


def _data_use(path: Path, tasks: int) -> DataUse:
    _, codebases, rows = read_rows(path)
    licence = {row["codebase"]: row["licence"] for row in codebases}
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[licence[row["codebase"]]] += len(json.dumps(row))
    return file_used(path, f"{path.name} ({tasks} tasks)", dict(sizes))
