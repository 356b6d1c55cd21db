"""Run a recipe: each stage is kept, taken over from elsewhere, continued or run; then published with its record.

A stage's fingerprint is the digest of all that decides its result: kind and version, settings, seed, the parent's model
and the data it reads. Equal fingerprints mean equal work, so finished work is used again: in the same run, after a change
that does not concern it, and across runs on this machine. The parent counts by the files of its model, not by how they
came about.
"""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import UserError
from etude.files import digest_of, files_below, fsync_tree, remove_parts, write_json, write_text
from etude.jsonl import MetricsLog
from etude.lineage import environment
from etude.lineage.licences import carry, held, refuse_losses
from etude.lineage.record import (
    LINEAGE_FILE,
    RECORD_FILE,
    Compute,
    Lineage,
    RecipeUse,
    Record,
    load_lineage,
    load_record,
)
from etude.models.load import digest_files
from etude.recipe.recipe import DATA, Recipe, StageEntry, as_toml
from etude.run.folder import (
    LOCK_FILE,
    METRICS,
    MODEL,
    PROGRESS,
    RunFolder,
    RunLock,
    StageIndex,
    adopt,
    finished,
    publish_stage,
    readable_record,
)
from etude.run.stage import Job, Model, Outcome, Stage
from etude.run.stages import BASE, STAGES, base_entry
from etude.work import Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.lineage.record import CarriedLicence
    from etude.progress import Reporter

Action = Literal["kept", "finish", "reuse", "run"]


@dataclass(frozen=True)
class Step:
    """One stage of a run and what is to be done about it."""

    entry: StageEntry
    fingerprint: str | None  # None while its parent has not been made
    action: Action
    source: Path | None = None  # where finished work is taken from
    lacks: str | None = None  # what is seen to be wrong or missing before it runs; in a plan only


@dataclass(frozen=True)
class Runner:
    """Runs recipes in one folder."""

    folder: RunFolder
    cache: Path
    reporter: Reporter
    stages: Mapping[str, Stage]

    def plan(self, recipe: Recipe, until: str | None = None) -> list[Step]:
        """Return what would be done, without doing it, and what each stage lacks.

        After a stage that must run, fingerprints are not known.
        """
        wanted = _wanted(recipe, until)
        steps: list[Step] = []
        parent_digest: str | None = None
        corpus: Record | None = None
        known = corpus_known = True
        for entry in wanted:
            stage = self.stages[entry.kind]
            lacks = self._lacks(entry)
            ready = known and lacks is None and (corpus_known or not stage.reads_corpus)
            step = (
                self._step(entry, recipe.seed, parent_digest, corpus)
                if ready
                else Step(entry, None, "run", lacks=lacks)
            )
            steps.append(step)
            done = self._record_of(step)
            if stage.makes_model:
                known = known and done is not None
                parent_digest = done.content_digest if done else None
            elif entry.kind == DATA:
                corpus, corpus_known = done, done is not None
        return steps

    def execute(self, recipe: Recipe, until: str | None = None) -> list[Step]:
        """Run the recipe and return what was done with each stage."""
        wanted = _wanted(recipe, until)
        for entry in wanted:  # all of them before the first runs
            self.stages[entry.kind].check(entry.settings)
        self._refuse_foreign_folder()
        with RunLock(self.folder.path, self.reporter.say):
            remove_parts(self.folder.path)
            self._write_head(recipe)
            done: list[Step] = []
            parent: Model | None = None
            corpus: Record | None = None
            for entry in wanted:
                step = self._step(entry, recipe.seed, parent.record.content_digest if parent else None, corpus)
                step = self._do(step, recipe, parent)
                done.append(step)
                if self.stages[entry.kind].makes_model:
                    parent = self._model(entry)
                elif entry.kind == DATA:
                    corpus = load_record(self.folder.stage(entry.name))
            return done

    def _lacks(self, entry: StageEntry) -> str | None:
        """Return what the stage's check has against it: a plan tells it of every stage, so that all is put right at once."""
        try:
            self.stages[entry.kind].check(entry.settings)
        except UserError as error:
            return str(error)
        return None

    def _refuse_foreign_folder(self) -> None:
        """A folder with somebody's files in it is not ours to sort out."""
        path = self.folder.path
        if path.is_dir() and any(path.iterdir()) and not ((path / "run.json").exists() or (path / LOCK_FILE).exists()):
            raise UserError(f"{path} is not empty and not a run; choose another folder with --out")

    def _write_head(self, recipe: Recipe) -> None:
        write_text(self.folder.path / "recipe.toml", as_toml(recipe))
        listed = [{"name": entry.name, "kind": entry.kind} for entry in entries(recipe)]
        write_json(
            self.folder.path / "run.json",
            {"name": recipe.name, "stages": listed, "command": command_line(), "in": str(Path.cwd())},
        )

    def _model(self, entry: StageEntry) -> Model:
        folder = self.folder.stage(entry.name)
        lineage = load_lineage(folder / MODEL)
        return Model(folder / MODEL, lineage.records[lineage.head], lineage)

    def _record_of(self, step: Step) -> Record | None:
        if step.fingerprint is None or step.source is None:
            return None
        return finished(step.source, step.fingerprint)

    def _step(self, entry: StageEntry, seed: int, parent_digest: str | None, corpus: Record | None) -> Step:
        stage = self.stages[entry.kind]
        inputs = stage.inputs(entry.settings, parent_digest, seed)
        if stage.reads_corpus and corpus:
            inputs = {**inputs, "corpus": corpus.outputs["manifest.json"].sha256}
        fingerprint = digest_of(
            {"kind": entry.kind, "version": stage.version, "parent": parent_digest, "inputs": inputs}
        )
        places: list[tuple[Action, Path | None]] = [
            ("kept", self.folder.stage(entry.name)),
            ("finish", self.folder.work(entry.name, fingerprint)),
            ("reuse", self.folder.replaced(entry.name, fingerprint)),
            ("reuse", StageIndex(self.cache).find(fingerprint)),
        ]
        for action, place in places:
            if place is not None and finished(place, fingerprint):
                return Step(entry, fingerprint, action, place)
        return Step(entry, fingerprint, "run")

    def _do(self, step: Step, recipe: Recipe, parent: Model | None) -> Step:
        """Bring one stage to its finished state."""
        name, fingerprint = step.entry.name, step.fingerprint
        assert fingerprint is not None
        index = StageIndex(self.cache)
        work = self.folder.work(name, fingerprint)
        if step.action == "reuse":
            assert step.source is not None
            adopted = self.folder.adopting(name, fingerprint)
            if adopt(step.source, adopted, self.reporter):
                work = adopted
            else:
                step = Step(step.entry, fingerprint, "run")
        if step.action == "run":
            self._mention_other_work(name, fingerprint)
            self._run(step, recipe, parent, work)
        if step.action == "kept":
            index.add(fingerprint, self.folder.stage(name))
        else:
            publish_stage(self.folder, name, work, index)
        os.utime(self.folder.stage(name))  # newer than any work on it: `status` tells abandoned work by that
        words = {
            "kept": "unchanged, kept",
            "finish": "finished earlier, published",
            "reuse": f"reused from {step.source}",
            "run": "done",
        }
        self.reporter.say(f"{name}: {words[step.action]}")
        return step

    def _mention_other_work(self, name: str, fingerprint: str) -> None:
        for other in self.folder.other_work(name, fingerprint):
            self.reporter.say(f"{name}: unfinished work under other settings is kept in {other}")
        before = self.folder.stage(name)
        if before.exists():
            record = readable_record(before)
            why = "its inputs changed" if record and record.fingerprint != fingerprint else "it is damaged"
            self.reporter.say(f"{name}: {why}; the result so far will be kept in {self.folder.path / '.replaced'}")

    def _run(self, step: Step, recipe: Recipe, parent: Model | None, folder: Path) -> None:
        assert step.fingerprint is not None
        stage = self.stages[step.entry.kind]
        for place in [folder, *folder.rglob("*/")]:
            remove_parts(place)
        (folder / RECORD_FILE).unlink(missing_ok=True)  # of work that was not whole
        with MetricsLog(folder / METRICS) as metrics:
            if metrics.torn_bytes:
                self.reporter.say(
                    f"{step.entry.name}: dropped {metrics.torn_bytes} bytes after the last whole line of {METRICS}"
                )
            sessions = 1 + sum(1 for _ in metrics.rows("etude/session/"))
            if sessions > 1:
                self.reporter.say(f"{step.entry.name}: continuing ({sessions - 1} earlier session(s))")
            metrics.put(f"etude/session/{sessions:04d}", command=command_line())
            self.reporter.listener = lambda state: write_json(folder / PROGRESS, state)
            try:
                work = Work(folder, metrics, self.reporter, self.cache)
                corpus = self.folder.stage(DATA) if recipe.data else None
                outcome = stage.run(step.entry.settings, Job(step.entry.name, work, parent, recipe.seed, corpus))
            finally:
                self.reporter.listener = None
            (folder / PROGRESS).unlink(missing_ok=True)
            metrics.close()
            self._write_record(step, recipe, parent, folder, outcome, metrics)

    def _write_record(
        self, step: Step, recipe: Recipe, parent: Model | None, folder: Path, outcome: Outcome, metrics: MetricsLog
    ) -> None:
        assert step.fingerprint is not None
        stage = self.stages[step.entry.kind]
        model = folder / MODEL
        licences = self._carried(outcome, parent, model) if stage.makes_model else []
        notes = {folder / RECORD_FILE, model / LINEAGE_FILE}  # which this writes
        files = [file for file in files_below(folder) if file not in notes]
        weights = [file for file in files if file.suffix == ".safetensors" and file.parent == model]
        others = [file for file in files if file not in weights]
        sessions = list(metrics.rows("etude/session/"))
        record = Record(
            stage=step.entry.name,
            kind=step.entry.kind,
            kind_version=stage.version,
            fingerprint=step.fingerprint,
            parents=outcome.parents,
            origin=outcome.origin,
            data=outcome.data,
            code=environment.code(),
            recipe=RecipeUse(hash=recipe.hash, stage=step.entry.settings.model_dump(mode="json")),
            seeds={"recipe": recipe.seed},
            packages=environment.packages(),
            hardware=environment.hardware(),
            compute=_spent(metrics, outcome.device),
            weights=digest_files(weights, model, self.reporter, f"{step.entry.name}: hashing weights")
            if weights
            else {},
            outputs=digest_files(others, folder, self.reporter, f"{step.entry.name}: hashing outputs"),
            licences=licences,
            summary=outcome.summary,
            started=_iso(sessions[0]["time"]),
            finished=_iso(datetime.datetime.now(datetime.UTC).timestamp()),
            sessions=len(sessions),
        )
        if stage.makes_model:
            Lineage.of(record, outcome.lineages).save(model)
        fsync_tree(folder)  # the record says that all else is there: it must reach the disk last
        record.save(folder)

    @staticmethod
    def _carried(outcome: Outcome, parent: Model | None, model: Path) -> list[CarriedLicence]:
        """Carry the licence files of all ancestors; a model that would lose one is not finished."""
        for ancestor, folder in outcome.licence_folders.items():
            carry(folder, model, ancestor)
        if parent is not None:
            carry(parent.folder, model, parent.record.origin.name if parent.record.origin else parent.record.stage)
        refuse_losses(model, outcome.lineages)
        return held(model)


def _spent(metrics: MetricsLog, device: str | None) -> Compute:
    """Return the compute of a stage: what its rows add up to; of sampling and sandboxes only where rows tell of them."""
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
    """Return the stages to do."""
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
