"""What the stages that train have in common: their checks and their order. What they do is in `run/train.py`, with torch.

Under torchrun every rank comes here: rank 0 from the runner, the others from `join_trainings`, which waits to be told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

from etude.data.manifest import MANIFEST, check_shards
from etude.errors import Interrupted, UserError, nearest
from etude.files import read_json
from etude.lineage.record import DataUse, Parent, load_record
from etude.models.load import weight_files
from etude.report.training import RESULTS, shown
from etude.run.folder import MODEL
from etude.run.stage import Ahead, Job, Outcome, Stage
from etude.training.settings import ExpertSettings

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.work import Work

NO_CORPUS = "trains on a corpus, and this recipe has none; describe one in [data]"
NO_HEADS = "the model to start from has no MTP heads; put an `mtp` stage before this one"
WITHOUT_EFFECT = {
    "micro",
    "checkpoint_every",
    "checkpoint_seconds",
    "keep",
    "loader_workers",
    "context_ranks",
}  # on the result
LATER = {"masters", "states"}


class TrainingStage(Stage):
    """One training stage; each kind says what it starts from, what it learns from and how it is measured."""

    needs_model = True
    makes_model = True
    reads_corpus = True
    learns_corpus = True  # not only measured on it
    kind: str

    def check_order(self, settings: Any, ahead: Ahead) -> None:
        """Refuse rows that will not fit the model or the corpus, and what needs a corpus or heads that will not be there."""
        if self.learns_corpus:
            if ahead.corpus is None:
                raise UserError(f"{self.kind} {NO_CORPUS}")
            rows_a_step(settings, ahead.corpus.length, 1)
            if settings.context_ranks > 1:
                from etude.training.context_parallel import Context

                Context(settings.context_ranks).chunks(settings.length or ahead.corpus.length)
            domains = {source.domain for source in ahead.corpus.source} | {"replay"}
            if unknown := sorted(set(settings.shares) - domains):
                raise UserError(
                    f"{self.kind}.shares: no source has the domain {unknown[0]!r}{nearest(unknown[0], domains)}"
                )
        length = settings.length or (ahead.corpus.length if self.learns_corpus else 0)
        if settings.tokens and settings.tokens < settings.batch * length:
            step = f"one step of {settings.batch} rows × {length} = {settings.batch * length} tokens"
            raise UserError(f"{self.kind}.tokens = {settings.tokens} is less than {step}; raise it, or lower batch")
        if self.kind != "extend":
            refuse_long(length, ahead.context)
        if getattr(settings, "mtp", None) and ahead.heads is False:
            raise UserError(f"{self.kind}.mtp: {NO_HEADS}")

    def inputs(self, settings: Any, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the settings that decide the result; the runner adds the corpus."""
        chosen = settings.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        if chosen.get("mtp", ...) is None:
            del chosen["mtp"]  # a setting that came later: what was finished before it is still what it was
        return {"settings": without_later(chosen), "seed": seed}

    def run(self, settings: Any, job: Job) -> Outcome:
        """Call the other ranks, if there are any, and train."""
        from etude.run.train import Training
        from etude.training.distributed import join
        from etude.training.run import CHECKPOINTS

        world, folder = join(), job.work.folder.absolute()
        corpus = job.corpus.absolute() if job.corpus else None
        parent = job.parent.folder.absolute() if job.parent else (corpus or folder) / "tokeniser"
        if not is_trained(folder):  # else it was interrupted after its end, and is not done again
            if corpus is not None:
                check_shards(corpus, load_record(corpus).outputs[MANIFEST].sha256, job.work.reporter)
            training = world.tell(Training(self.kind, settings, folder, parent, corpus, job.seed))
            self.train(training, world, job.work)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        results, trained = read_json(folder / RESULTS), list(job.work.metrics.rows("train/"))
        return Outcome(
            parents=_parents(job, taught=self.learns_corpus),
            lineages=[job.parent.lineage] if job.parent else [],
            data=self.data_uses(settings, job, results["seen"]),
            corpus=load_record(corpus) if corpus and self.learns_corpus else None,
            device=results["device"],
            summary={"steps": len(trained), "tokens": sum(row["tokens"] for row in trained)},
        )

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank."""
        raise NotImplementedError

    def data_uses(self, settings: Any, job: Job, seen: dict[str, float]) -> list[DataUse]:  # noqa: ARG002 - for those that do
        """Return the sources of the corpus that were trained on, with the tokens that went through the model of each."""
        assert job.corpus is not None
        total = sum(row["tokens"] for row in job.work.metrics.rows("train/"))
        uses = {use.name: use for use in load_record(job.corpus).data}
        tokens = {name: round(share * total) for name, share in seen.items() if share > 0}
        return [uses[name].model_copy(update={"tokens": count}) for name, count in tokens.items()]

    def show(self, folder: Path) -> list[RenderableType]:
        return shown(folder)


def without_later(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that came later and are at their defaults: earlier stages have none of them."""
    kept = {name: value for name, value in chosen["optimiser"].items() if name not in LATER or value != "auto"}
    plain = {"experts": ExpertSettings().model_dump(mode="json")}
    return {name: value for name, value in chosen.items() if value != plain.get(name, ...)} | {"optimiser": kept}


def is_trained(folder: Path) -> bool:
    """Return whether a training came to its end here: its results are written last, and its model is whole."""
    with contextlib.suppress(UserError):
        return (folder / RESULTS).exists() and bool(weight_files(folder / MODEL))
    return False


def _parents(job: Job, *, taught: bool) -> list[Parent]:
    """Return the model that was trained, and those that wrote a part of the corpus it was trained on."""
    if job.parent is None:
        return []
    wrote = load_record(job.corpus).parents if taught and job.corpus else []
    teachers = [edge for edge in wrote if edge.role == "teacher"]
    known = job.parent.lineage.records
    taught_by = [each if each.record in known else each.model_copy(update={"record": None}) for each in teachers]
    return [job.parent.as_parent(), *taught_by]


def join_trainings() -> None:
    """Take part in the trainings that rank 0 announces, until it says that there are no more, or the user that we stop."""
    from etude.run.stages import STAGES
    from etude.training.distributed import join

    world = join()
    with contextlib.suppress(Interrupted):
        while (training := world.tell(None)) is not None:
            stage = STAGES[training.kind]
            assert isinstance(stage, TrainingStage)
            stage.train(training, world, None)


def dismiss_ranks() -> None:
    """Tell the other ranks, if there are any, that there is nothing more to train."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from etude.training.distributed import join

        join().tell(None)


def rows_a_step(settings: Any, corpus_length: int, ranks: int) -> int:
    """Return the rows of the corpus that a step takes; each rank must get whole ones."""
    tokens = settings.batch * (settings.length or corpus_length)
    if tokens % (corpus_length * ranks):
        rows = f"the corpus's rows of {corpus_length} tokens" + (f" times {ranks} ranks" if ranks > 1 else "")
        raise UserError(f"batch × length must be a multiple of {rows}; it is {tokens}")
    return int(tokens // corpus_length)


def refuse_long(length: int, context: int | None) -> None:
    if context and length > context:
        advice = f"set length = {context}, or extend it first"
        raise UserError(f"rows of {length} tokens are longer than the model's context of {context}; {advice}")
