"""What the stages that train have in common: load, train on all ranks, report, save with the parent's tokeniser and licence.

Under torchrun every rank comes here: rank 0 from the runner, the others from `join_trainings`, which waits to be told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from etude.errors import Interrupted, UserError
from etude.files import fsync_tree, link_or_copy, read_json
from etude.lineage import environment
from etude.lineage.record import Parent, load_record
from etude.lineage.weight_files import INDEX
from etude.models.load import weight_files
from etude.run.folder import MODEL
from etude.run.stage import Job, Outcome, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from etude.data.loader import Corpus, Loader
    from etude.lineage.record import DataUse
    from etude.training.distributed import World
    from etude.training.measure import Bits
    from etude.training.objectives import Objective
    from etude.training.run import Evaluate, TrainingRun
    from etude.training.session import Session
    from etude.training.settings import JointMtpSettings, LoraSettings, TrainSettings
    from etude.work import Work

UNTRAINED_HEADS = "the parent's MTP heads came along untrained: they know the parent; train them again"
WITHOUT_EFFECT = {"micro", "checkpoint_every", "keep", "loader_workers"}  # on the result
SIDE_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
              "chat_template*", "generation_config.json")  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a rank must know to take part."""

    kind: str
    settings: Any
    folder: Path  # of the work
    parent: Path | None  # the model to start from
    corpus: Path | None
    seed: int


class TrainingStage(Stage):
    """One training stage; each kind says what it starts from, what it learns from and how it is measured."""

    version = 1
    makes_model = True
    reads_corpus = True
    learns_corpus = True  # not only measured on it
    kind: str
    settings: type[Any]

    def check(self, settings: Any) -> None:
        """Refuse what can be seen to be wrong before anything is done."""

    def inputs(self, settings: Any, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return the settings that decide the result; the runner adds the corpus."""
        if parent_digest is None:
            raise UserError(
                f"{self.kind} needs a model to start from; set `base` in the recipe, or put a stage before it that makes one"
            )
        chosen = settings.model_dump(mode="json", exclude=WITHOUT_EFFECT)
        if chosen.get("mtp", ...) is None:
            del chosen["mtp"]  # a setting that came later: what was finished before it is still what it was
        return {"settings": chosen, "seed": seed}

    def run(self, settings: Any, job: Job) -> Outcome:
        """Call the other ranks, if there are any, and train."""
        from etude.data.manifest import check_shards
        from etude.report.training import RESULTS
        from etude.training.distributed import join
        from etude.training.run import CHECKPOINTS

        world, folder = join(), job.work.folder.absolute()
        parent = job.parent.folder.absolute() if job.parent else None
        corpus = job.corpus.absolute() if job.corpus else None
        training = Training(self.kind, settings, folder, parent, corpus, job.seed)
        if not is_trained(folder):  # else it was interrupted after its end, and is not done again
            if corpus is not None:
                check_shards(corpus, job.work.reporter)
            world.tell(training)
            self.train(training, world, job.work)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        results, trained = read_json(folder / RESULTS), list(job.work.metrics.rows("train/"))
        return Outcome(
            parents=_parents(job, taught=self.learns_corpus),
            lineages=[job.parent.lineage] if job.parent else [],
            data=self.data_uses(settings, job, results["seen"]),
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
        return [
            uses[name].model_copy(update={"tokens": round(share * total)}) for name, share in seen.items() if share > 0
        ]

    def show(self, folder: Path, console: Console) -> None:
        """Print the table of before and after."""
        from etude.report.training import show_report

        show_report(folder, console)


def is_trained(folder: Path) -> bool:
    """Return whether a training came to its end here: its results are written last, and its model is whole."""
    from etude.report.training import RESULTS

    with contextlib.suppress(UserError):
        return (folder / RESULTS).exists() and bool(weight_files(folder / MODEL))
    return False


def _parents(job: Job, *, taught: bool) -> list[Parent]:
    """Return the model that was trained, and those that wrote a part of the corpus it was trained on."""
    if job.parent is None:
        return []
    record, known = job.parent.record, job.parent.lineage.records
    edges = [Parent(name=record.stage, role="weights", record=record.id, model_digest=record.model_digest)]
    wrote = load_record(job.corpus).parents if taught and job.corpus else []
    teachers = [edge for edge in wrote if edge.role == "teacher"]
    return edges + [edge if edge.record in known else edge.model_copy(update={"record": None}) for edge in teachers]


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


def open_corpus(training: Training, model: Path) -> Corpus:
    """Open the run's corpus for a model, or for the tokeniser of one."""
    from etude.data.loader import Corpus

    if training.corpus is None:
        raise UserError(f"{training.kind} learns from a corpus, and this recipe has none; describe one in [data]")
    corpus = Corpus.open(training.corpus)
    if not same_tokens(training.corpus / "tokeniser", model):
        raise UserError(
            f"the corpus in {corpus.folder} was made with another vocabulary than the model's ({corpus.vocabulary} tokens);"
            ' set data.tokeniser.source = "base"'
        )
    if not corpus.splits.get("train"):
        raise UserError(f"the corpus in {corpus.folder} has nothing to train on: every shard is empty; see its report")
    return corpus


def same_tokens(corpus: Path, model: Path) -> bool:
    """Return whether every token of a corpus's tokeniser has the same number in a model's, which may know more."""
    mine, theirs = ((folder / "tokenizer.json") for folder in (corpus, model))
    if not theirs.is_file() or mine.read_bytes() == theirs.read_bytes():
        return theirs.is_file()
    known = _vocabulary(theirs)
    return all(known.get(token) == number for token, number in _vocabulary(mine).items())


def _vocabulary(path: Path) -> dict[str, int]:
    content = read_json(path)
    listed = content["model"]["vocab"]
    words = listed if isinstance(listed, dict) else {entry[0]: number for number, entry in enumerate(listed)}
    return words | {entry["content"]: entry["id"] for entry in content["added_tokens"]}


def row_length(settings: TrainSettings, corpus: Corpus, context: int) -> int:
    """Return the length of the rows to train on, after refusing one the model cannot take."""
    length = settings.length or corpus.length
    if length > context:
        raise UserError(
            f"rows of {length} tokens are longer than the model's context of {context}; set length = {context}, or extend it first"
        )
    return length


def shares_by_source(corpus: Corpus, wanted: dict[str, float]) -> dict[str, float] | None:
    """Return shares of tokens by source from shares by domain: inside a domain as the corpus was built. None: all as built."""
    if not wanted:
        return None
    from etude.errors import nearest

    domains = {corpus.domains[source] for source in corpus.splits["train"]}
    if unknown := sorted(set(wanted) - domains):
        raise UserError(
            f"shares names the domain {unknown[0]!r}, which the corpus has nothing of to train on{nearest(unknown[0], domains)}"
        )
    inside = {
        domain: [source for source in corpus.splits["train"] if corpus.domains[source] == domain] for domain in wanted
    }
    built = {domain: sum(corpus.shares.get(source, 0) for source in sources) for domain, sources in inside.items()}
    return {
        source: share * (corpus.shares.get(source, 0) / built[domain] if built[domain] else 1 / len(inside[domain]))
        for domain, share in wanted.items()
        for source in inside[domain]
        if share > 0
    }


def trained_on_corpus(  # noqa: PLR0913 - each kind of stage gives some of them
    training: Training, world: World, work: Work | None, model: Any, *, context: int, lora: LoraSettings | None = None,
    dtype: Any = None, more: Callable[[Path], dict[str, Any]] | None = None, objective: Callable[[Any], Objective] | None = None,
    notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Train a model on the corpus, measured on what is held out of it; save it and the report."""
    import torch

    from etude.data.loader import Loader
    from etude.training.measure import acceptance_by_domain, bits_by_domain

    settings: TrainSettings = training.settings
    assert training.parent is not None
    corpus = open_corpus(training, training.parent)
    length = row_length(settings, corpus, context)
    if (settings.batch * length) % (corpus.length * world.size):
        ranks = f" times {world.size} ranks" if world.size > 1 else ""
        raise UserError(
            f"batch × length must be a multiple of the corpus's rows of {corpus.length} tokens{ranks}; it is {settings.batch * length}"
        )
    if corpus.vocabulary > (known := model.get_input_embeddings().weight.shape[0]):
        raise UserError(
            f"the base knows {known} tokens, its tokeniser {corpus.vocabulary}; take a base whose files belong together"
        )
    loader = Loader(
        corpus, seed=training.seed, batch=settings.batch * length // corpus.length, rank=world.rank, world=world.size,
        shares=shares_by_source(corpus, settings.shares), workers=settings.loader_workers,
    )  # fmt: skip

    def measured_on(session: Session) -> dict[str, Any]:
        return {"length": length, "rows": settings.evaluation_rows, "micro": session.micro, "device": session.device}

    def bits(session: Session) -> dict[str, Bits]:  # not of a trunk that stays what it is
        return {} if session.heads_only else bits_by_domain(session.nats, corpus, **measured_on(session))

    def acceptance(session: Session) -> dict[str, Any]:
        return {"acceptance": acceptance_by_domain(session.accepted, corpus, **measured_on(session))}

    run = training_run(
        training, settings, model, loader, length, world, work, bits, acceptance if objective else None,
        parent_dtype=dtype or torch.float32, lora=lora, objective=objective,
    )  # fmt: skip
    finish(training, run, loader, more, notes)


def training_run(  # noqa: PLR0913, PLR0917 - what a run is made of
    training: Training, settings: TrainSettings, model: Any, loader: Loader, length: int, world: World, work: Work | None,
    evaluate: Evaluate, also: Callable[[Session], dict[str, Any]] | None, *, objective: Callable[[Any], Objective] | None, **more: Any,
) -> TrainingRun:  # fmt: skip
    """Return a run of a stage, ready to begin; `also`: what else is measured."""
    from etude.training.objectives.next_token import NextToken
    from etude.training.run import TrainingRun, corpus_session

    say = work.reporter.say if work else lambda _: None
    session = corpus_session(
        model, settings, loader, length, world, training.folder, say, objective=objective or NextToken, seed=training.seed, **more
    )  # fmt: skip
    return TrainingRun(session, settings, loader, evaluate, work, training.folder, also or (lambda _: {}))


def joint_objective(training: Training, model: Any) -> Callable[[Any], Objective] | None:
    """Return what trains the parent's MTP heads along with a model, now its own, if the settings wish for it."""
    from etude.models.mtp_heads import load_heads
    from etude.training.objectives.mtp import MultiToken

    joint: JointMtpSettings | None = training.settings.mtp
    if joint is None:
        return None
    assert training.parent is not None
    model.mtp = load_heads(training.parent, model)
    if model.mtp is None:
        raise UserError(
            f"{training.kind}.mtp: the model to start from has no MTP heads; put an `mtp` stage before this one"
        )
    return partial(MultiToken, beta=joint.beta, joint=joint)


def finish(
    training: Training,
    run: TrainingRun,
    loader: Loader,
    more: Callable[[Path], dict[str, Any]] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Train to the end; save model, side files and report, with `more` results that the saved model is asked for."""
    try:
        bits = run.run()
    finally:
        loader.close()
    model, session = training.folder / MODEL, run.session
    assert training.parent is not None
    if session.heads_only and session.world.leads:
        place_weights(training.parent, model)
    session.export(model)
    if run.work is None:
        return
    from etude.models.mtp_heads import keep_apart
    from etude.report.training import write_report
    from etude.training.measure import table

    copy_side_files(training.parent, model)
    if carry_heads(training.parent, model):
        notes = [*notes, UNTRAINED_HEADS]
    keep_apart(model)
    fsync_tree(model)  # before the results, which say that it is there
    measured = curve(run)
    if not bits["before"] and not any(point.get("acceptance") for point in measured):
        run.work.reporter.say(f"{training.kind}: nothing is held out, so nothing was measured; raise data.heldout")
    results = {
        "device": environment.device_name(session.device.type),
        "seen": loader.achieved()["sources"],
        "domains": table(bits["before"], bits["after"]),
        "acceptance": acceptance_table(measured),
        "curve": measured,
        "notes": [*notes, *run.notes()],
        **(more(model) if more else {}),
    }
    write_report(training.folder, f"{training.kind}: before and after", results)


def curve(run: TrainingRun) -> list[dict[str, Any]]:
    """Return the measurements in order, each with the tokens trained on so far."""
    assert run.work is not None
    each = run.settings.batch * run.session.length
    rows = sorted(run.work.metrics.rows("eval/"), key=lambda row: (row["step"], row["key"]))
    kinds = ("bits_per_byte", "acceptance")
    return [{"tokens": row["step"] * each, **{kind: row[kind] for kind in kinds if kind in row}} for row in rows]


def acceptance_table(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a domain and depth of MTP heads: acceptance before and after."""
    if not measured or "acceptance" not in measured[0]:
        return []
    first, last = measured[0]["acceptance"], measured[-1]["acceptance"]
    return [{"domain": domain, "depth": depth, "before": before, "after": after}
            for domain, each in first.items()
            for depth, (before, after) in enumerate(zip(each, last[domain], strict=True), 1)]  # fmt: skip


def place_weights(source: Path, target: Path) -> None:
    """Place a model's config and weights as they are: what a run has published is linked, what is the user's pointed at."""
    target.mkdir(parents=True, exist_ok=True)
    for file in [source / "config.json", *weight_files(source), *source.glob(INDEX)]:
        if file.is_symlink():
            (target / file.name).unlink(missing_ok=True)
            (target / file.name).symlink_to(file.readlink())
        else:
            link_or_copy(file, target / file.name)


def carry_heads(source: Path, target: Path) -> bool:
    """Copy MTP heads that a child does not have of its own; return whether there were any."""
    from etude.models.mtp_heads import FILE

    if not (source / FILE).is_file() or (target / FILE).exists():
        return False
    shutil.copyfile(source / FILE, target / FILE)
    return True


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the tokeniser and what belongs to it; what the target has already is its own."""
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            if not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
