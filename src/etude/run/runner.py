"""Run a recipe: each stage is kept, taken over from elsewhere, continued or run; then published with its record.

A stage's fingerprint is the digest of everything that decides its result: kind and version, settings, seed, the parent's
model and the data it reads. Equal fingerprints mean equal work, so finished work is used again: in the same run, after a
change that does not concern it, and across runs on this machine. The parent counts by the files of its model, not by how
they were made.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import UserError
from etude.files import digest_of, files_below, fsync_tree, remove_parts, write_json, write_text
from etude.jsonl import MetricsLog
from etude.lineage import environment
from etude.lineage.facts import without_places
from etude.lineage.licences import carry, held, refuse_losses
from etude.lineage.record import (
    LINEAGE_FILE,
    RECORD_FILE,
    CarriedLicence,
    Compute,
    Lineage,
    RecipeUse,
    Record,
    load_lineage,
)
from etude.models.load import choose_device, digest_files
from etude.recipe.recipe import BENCH, DATA, Recipe, StageEntry, as_toml
from etude.report.ending import read_all, write_overview
from etude.report.sinks import refuse_missing
from etude.run import folder as layout
from etude.run.folder import METRICS, MODEL, PROGRESS, finished, readable_record
from etude.run.log import following
from etude.run.stage import Ahead, Job, Model, Outcome, Stage
from etude.run.stages import BASE, STAGES, base_entry
from etude.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from etude.progress import Reporter

SESSION = "etude/session/"  # keys of the rows that say when somebody worked on a stage
Action = Literal["kept", "finish", "reuse", "run"]


@dataclass(frozen=True)
class Step:
    """One stage of a run and what is to be done about it."""

    entry: StageEntry
    fingerprint: str = ""  # empty while its parent has not been made
    action: Action = "run"
    source: Path | None = None  # where finished work is taken from
    record: Record | None = None  # of the finished work
    lacks: str | None = None  # what is seen to be wrong or missing before it runs; in a plan only


@dataclass(frozen=True)
class Runner:
    """Runs recipes in one folder."""

    folder: Path
    cache: Path
    reporter: Reporter
    stages: Mapping[str, Stage]

    def plan(self, recipe: Recipe, until: str | None = None) -> list[Step]:
        """Return what would be done, without doing it, and what each stage lacks.

        After a stage that must run, fingerprints are not known.
        """
        steps: list[Step] = []
        model: Record | None = None
        corpus: Record | None = None
        benchmarks: list[Record | None] = []
        model_known = corpus_known = True
        wanted = _wanted(recipe, until)
        self._refuse_foreign_folder()
        refuse_missing(recipe.log.to if recipe.log else [])
        for entry, lacks in zip(wanted, self._lacks(recipe, wanted), strict=True):
            stage = self.stages[entry.kind]
            step = Step(entry, lacks=lacks)
            known = model_known and (corpus_known or not stage.reads_corpus)
            if step.lacks is None and known and (all(benchmarks) or not stage.reads_benchmarks):
                step = self._step(entry, recipe.seed, model, corpus, benchmarks)
            steps.append(step)
            if stage.makes_model:
                model, model_known = step.record, step.record is not None
            elif entry.kind == DATA:
                corpus, corpus_known = step.record, step.record is not None
            elif entry.kind == BENCH:
                benchmarks.append(step.record)
        return steps

    def execute(self, recipe: Recipe, until: str | None = None) -> list[Step]:
        """Run the recipe and return what was done with each stage."""
        wanted, sinks = _wanted(recipe, until), recipe.log.to if recipe.log else []
        refuse_missing(sinks)
        for lacks in self._lacks(recipe, wanted):  # all of them before the first runs
            if lacks:
                raise UserError(lacks)
        self._refuse_foreign_folder()
        with layout.lock_run(self.folder, self.reporter.say), contextlib.ExitStack() as watched:
            remove_parts(self.folder)
            self._write_head(recipe)
            watched.enter_context(following(sinks, self.folder, self.reporter.say))
            steps: list[Step] = []
            model: Model | None = None
            corpus: Record | None = None
            benchmarks: list[Record | None] = []
            for entry in wanted:
                step = self._step(entry, recipe.seed, model.record if model else None, corpus, benchmarks)
                steps.append(self._do(step, recipe, model))
                ended = read_all(self.folder, [each.entry.name for each in steps])
                write_overview(self.folder, recipe.name, ended)
                if self.stages[entry.kind].makes_model:
                    model = self._model(entry)
                elif entry.kind == DATA:
                    corpus = readable_record(self.folder / entry.name)
                elif entry.kind == BENCH:
                    benchmarks.append(readable_record(self.folder / entry.name))
            return steps

    def _lacks(self, recipe: Recipe, wanted: list[StageEntry]) -> Iterator[str | None]:
        """Yield what is wrong with each stage, as far as it can be known: a plan lists it all, so that all is fixed at once."""
        ahead = Ahead(recipe.data.settings if recipe.data else None)
        for number, entry in enumerate(wanted, 1):
            stage = self.stages[entry.kind]
            later = tuple(each.name for each in wanted[number:] if self.stages[each.kind].makes_model)
            ahead = replace(ahead, changed_by=later)
            try:
                stage.check(entry.settings)
                if getattr(entry.settings, "device", "auto") == "cuda":  # else torch need not be asked
                    choose_device("cuda")
                if stage.needs_model and not ahead.made_by:
                    advice = "set `base` in the recipe, or put a stage before it that makes one"
                    raise UserError(f"{entry.name} needs a model to start from; {advice}")
                stage.check_order(entry.settings, ahead)
                ahead = stage.leaves(entry.settings, ahead)
            except UserError as error:
                yield str(error) if entry.name in str(error) else f"{entry.name}: {error}"
                ahead = replace(ahead, context=None, heads=None)
            else:
                yield None
            if stage.makes_model:
                ahead = replace(ahead, made_by=(*ahead.made_by, entry.name))

    def _refuse_foreign_folder(self) -> None:
        """Refuse a folder with somebody's files in it."""
        path = self.folder
        ours = (path / "run.json").exists() or (path / layout.LOCK_FILE).exists()
        if path.is_dir() and any(path.iterdir()) and not ours:
            raise UserError(f"{path} is not empty and not a run; choose another folder with --out")

    def _write_head(self, recipe: Recipe) -> None:
        write_text(self.folder / "recipe.toml", as_toml(recipe))
        listed = [{"name": entry.name, "kind": entry.kind} for entry in entries(recipe)]
        head = {"name": recipe.name, "stages": listed, "command": command_line(), "in": str(Path.cwd())}
        write_json(self.folder / "run.json", head)

    def _model(self, entry: StageEntry) -> Model:
        folder = self.folder / entry.name / MODEL
        lineage = load_lineage(folder)
        return Model(folder, lineage.records[lineage.head], lineage)

    def _step(
        self, entry: StageEntry, seed: int, model: Record | None, corpus: Record | None, benchmarks: list[Record | None]
    ) -> Step:  # fmt: skip
        """Return what is to be done about a stage whose parent, corpus and benchmarks are known."""
        stage = self.stages[entry.kind]
        parent = model.content_digest if model else None
        inputs = stage.inputs(entry.settings, parent, seed)
        if stage.reads_corpus and corpus:
            inputs = {**inputs, "corpus": corpus.outputs["manifest.json"].sha256}
        if stage.reads_benchmarks and benchmarks:
            inputs = {**inputs, "benchmarks": [record.id for record in benchmarks if record]}
        fingerprint = digest_of({"kind": entry.kind, "version": stage.version, "parent": parent, "inputs": inputs})
        places: list[tuple[Action, Path | None]] = [
            ("kept", self.folder / entry.name),
            ("finish", layout.work_of(self.folder, entry.name, fingerprint)),
            ("reuse", layout.replaced(self.folder, entry.name, fingerprint)),
            ("reuse", layout.recall(self.cache, fingerprint)),
        ]
        for action, place in places:
            if place and (record := finished(place, fingerprint)):
                return Step(entry, fingerprint, action, place, record)
        return Step(entry, fingerprint)

    def _do(self, step: Step, recipe: Recipe, parent: Model | None) -> Step:
        """Bring one stage to its finished state."""
        name, final = step.entry.name, self.folder / step.entry.name
        work = layout.work_of(self.folder, name, step.fingerprint)
        if step.action == "reuse":
            assert step.source is not None
            adopted = work.with_name(f"{work.name}.adopting")
            if layout.adopt(step.source, adopted, self.reporter):
                work = adopted
            else:
                step = Step(step.entry, step.fingerprint)
        if step.action == "run":
            self._mention_other_work(name, step.fingerprint)
            self._run(step, recipe, parent, work)
        if step.action == "kept":
            layout.remember(self.cache, step.fingerprint, final)
        else:
            layout.publish_stage(final, work, self.cache)
        os.utime(final)  # newer than any work on it: `status` tells abandoned work by that
        words = {"kept": "unchanged, kept", "finish": "finished earlier, published", "run": "done"}
        self.reporter.say(f"{name}: {words.get(step.action, f'reused from {step.source}')}")
        return step

    def _mention_other_work(self, name: str, fingerprint: str) -> None:
        for _, other in layout.all_work(self.folder, name):
            if other != layout.work_of(self.folder, name, fingerprint):
                self.reporter.say(f"{name}: unfinished work under other settings is kept in {other}")
        before = self.folder / name
        if before.exists():
            record = readable_record(before)
            why = "its inputs changed" if record and record.fingerprint != fingerprint else "it is damaged"
            self.reporter.say(f"{name}: {why}; the result so far will be kept in {self.folder / '.replaced'}")

    def _run(self, step: Step, recipe: Recipe, parent: Model | None, folder: Path) -> None:
        name, say = step.entry.name, self.reporter.say
        for place in [folder, *folder.rglob("*/")]:
            remove_parts(place)
        (folder / RECORD_FILE).unlink(missing_ok=True)  # of work that was not whole
        with MetricsLog(folder / METRICS) as metrics:
            if metrics.torn_bytes:
                say(f"{name}: dropped {metrics.torn_bytes} bytes after the last whole line of {METRICS}")
            if sessions := len(list(metrics.rows(SESSION))):
                say(f"{name}: continuing ({sessions} earlier session(s))")
            metrics.put(f"{SESSION}{sessions + 1:04d}", command=command_line())
            self.reporter.listener = lambda state: write_json(folder / PROGRESS, state)
            corpus = self.folder / DATA if recipe.data else None
            before = itertools.takewhile(lambda entry: entry.name != name, entries(recipe))
            benchmarks = tuple(self.folder / entry.name for entry in before if entry.kind == BENCH)
            work = Work(folder, metrics, self.reporter, self.cache)
            job = Job(name, work, parent, recipe.seed, corpus, benchmarks)
            try:
                outcome = self.stages[step.entry.kind].run(step.entry.settings, job)
            finally:
                self.reporter.listener = None
            (folder / PROGRESS).unlink(missing_ok=True)
            metrics.close()
            self._write_record(step, recipe, job, outcome)

    def _write_record(self, step: Step, recipe: Recipe, job: Job, outcome: Outcome) -> None:
        stage, folder = self.stages[step.entry.kind], job.work.folder
        model = folder / MODEL
        licences = _carried(outcome, job.parent, model) if stage.makes_model else []
        written_here = {folder / RECORD_FILE, model / LINEAGE_FILE}
        files = [file for file in files_below(folder) if file not in written_here]
        weights = [file for file in files if file.suffix == ".safetensors" and file.parent == model]
        others = [file for file in files if file not in weights]
        sessions = list(job.work.metrics.rows(SESSION))
        made = Record(
            stage=job.name,
            kind=step.entry.kind,
            kind_version=stage.version,
            fingerprint=step.fingerprint,
            parents=outcome.parents,
            origin=outcome.origin,
            data=outcome.data,
            corpus=outcome.corpus.id if outcome.corpus else None,
            code=environment.code(),
            recipe=RecipeUse(hash=recipe.hash, stage=step.entry.settings.model_dump(mode="json")),
            seeds={"recipe": recipe.seed},
            packages=environment.packages(),
            hardware=environment.hardware(),
            compute=_spent(job.work.metrics, outcome.device),
            weights=digest_files(weights, model, self.reporter, f"{job.name}: hashing weights"),
            outputs=digest_files(others, folder, self.reporter, f"{job.name}: hashing outputs"),
            licences=licences,
            summary=outcome.summary,
            started=_iso(sessions[0]["time"]),
            finished=_iso(datetime.datetime.now(datetime.UTC).timestamp()),
            sessions=len(sessions),
        )
        record = Record.model_validate(without_places(made.model_dump(mode="json")))
        if stage.makes_model:
            Lineage.of(record, outcome.lineages, outcome.corpus).save(model)
        fsync_tree(folder)  # the record says that all else is there: it must reach the disk last
        record.save(folder)


def _carried(outcome: Outcome, parent: Model | None, model: Path) -> list[CarriedLicence]:
    """Carry the licence files of all ancestors; a model that would lose one is not finished."""
    for ancestor, folder in outcome.licence_folders.items():
        carry(folder, model, ancestor)
    if parent is not None:
        carry(parent.folder, model, parent.record.origin.name if parent.record.origin else parent.record.stage)
    refuse_losses(model, outcome.lineages)
    return held(model)


def _spent(metrics: MetricsLog, device: str | None) -> Compute:
    """Return the compute of a stage: the sums of its rows; sampling and sandboxes only where rows have them."""
    apart = {field for row in metrics.rows() for field in ("sampling_flops", "sandbox_seconds") if field in row}
    return Compute(
        tokens=round(metrics.total("tokens")),
        model_flops=metrics.total("flops"),
        method="operations",
        device=device,
        device_seconds=round(metrics.total("device_seconds"), 3),
        **{field: round(metrics.total(field), 3) for field in apart},
    )


def _wanted(recipe: Recipe, until: str | None) -> list[StageEntry]:
    listed = entries(recipe)
    names = [entry.name for entry in listed]
    if until is not None and until not in names:
        raise UserError(f"--until {until!r} is not a stage of this recipe: {names}")
    return listed if until is None else listed[: names.index(until) + 1]


def entries(recipe: Recipe) -> list[StageEntry]:
    """Return the stages of a recipe in order: first its base, then its corpus, if it has them."""
    base = [base_entry(recipe.base)] if recipe.base is not None else []
    return [*base, *([recipe.data] if recipe.data else []), *recipe.stages]


def command_line() -> str:
    """Return the command that continues this run: the one that is running."""
    program = [sys.executable, "-m", "etude"] if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def stage_settings() -> dict[str, Any]:
    """Return the stage kinds a recipe may name, with the model of their settings."""
    return {kind: stage.settings for kind, stage in STAGES.items() if kind != BASE}
