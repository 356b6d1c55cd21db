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

from tokenizers import Tokenizer

from etude.data.loader import Corpus, Loader
from etude.data.manifest import MANIFEST, check_shards
from etude.errors import Interrupted, UserError, nearest
from etude.files import fsync_tree, link_or_copy, read_json
from etude.lineage import environment
from etude.lineage.record import DataUse, Parent, load_record
from etude.lineage.weight_files import INDEX
from etude.models.load import saved_dtype, weight_files
from etude.models.mtp_heads import FILE, keep_apart, load_heads
from etude.models.shape import shape_of
from etude.report.training import RESULTS, shown, write_report
from etude.run.folder import MODEL
from etude.run.stage import Ahead, Job, Outcome, Stage
from etude.training.distributed import World, join
from etude.training.measure import Bits, acceptance_by_domain, bits_by_domain, table
from etude.training.objectives.mtp import MultiToken
from etude.training.objectives.next_token import NextToken
from etude.training.run import CHECKPOINTS, TrainingRun, corpus_session
from etude.training.session import load_to_train
from etude.training.settings import ExpertSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from rich.console import RenderableType

    from etude.training.objectives import Objective
    from etude.training.run import Evaluate
    from etude.training.session import Session
    from etude.training.settings import JointMtpSettings
    from etude.work import Work

NO_CORPUS = "trains on a corpus, and this recipe has none; describe one in [data]"
NO_HEADS = "the model to start from has no MTP heads; put an `mtp` stage before this one"
UNTRAINED_HEADS = "the parent's MTP heads came along untrained: they know the parent; train them again"
WITHOUT_EFFECT = {"micro", "checkpoint_every", "checkpoint_seconds", "keep", "loader_workers"}  # on the result
LATER = {"masters", "states"}
SIDE_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
              "chat_template*", "generation_config.json")  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What a rank must know to take part."""

    kind: str
    settings: Any
    folder: Path  # of the work
    parent: Path  # the model to start from; of a model from nothing, the tokeniser
    corpus: Path | None
    seed: int

    def parent_model(self, *, config: Any = None, frozen: bool = False) -> Any:
        """Return the model to start from; `frozen`: none of its weights will be trained."""
        frozen = frozen or bool(getattr(self.settings, "lora", None))
        return load_to_train(self.parent, self.settings, join(), config=config, frozen=frozen)


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
            domains = {source.domain for source in ahead.corpus.source} | {"replay"}
            if unknown := sorted(set(settings.shares) - domains):
                raise UserError(
                    f"{self.kind}.shares: no source has the domain {unknown[0]!r}{nearest(unknown[0], domains)}"
                )
        length = settings.length or (ahead.corpus.length if self.learns_corpus else 0)
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

    world = join()
    with contextlib.suppress(Interrupted):
        while (training := world.tell(None)) is not None:
            stage = STAGES[training.kind]
            assert isinstance(stage, TrainingStage)
            stage.train(training, world, None)


def dismiss_ranks() -> None:
    """Tell the other ranks, if there are any, that there is nothing more to train."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join().tell(None)


def open_corpus(training: Training, model: Path) -> Corpus:
    """Open the run's corpus for a model, or for the tokeniser of one."""
    if training.corpus is None:
        raise UserError(f"{training.kind} {NO_CORPUS}")
    corpus = Corpus.open(training.corpus)
    if not same_tokens(training.corpus / "tokeniser", model):
        made = f"was made with another vocabulary than the model's ({corpus.vocabulary} tokens)"
        raise UserError(f'the corpus in {corpus.folder} {made}; set data.tokeniser.source = "base"')
    if not corpus.splits.get("train"):
        raise UserError(f"the corpus in {corpus.folder} has nothing to train on: every shard is empty; see its report")
    return corpus


def same_tokens(corpus: Path, model: Path) -> bool:
    """Return whether every token of a corpus's tokeniser has the same number in a model's, which may know more."""
    if not (model / "tokenizer.json").is_file():
        return False
    mine, theirs = (Tokenizer.from_file(str(each / "tokenizer.json")).get_vocab() for each in (corpus, model))
    return mine.items() <= theirs.items()


def shares_by_source(corpus: Corpus, wanted: dict[str, float]) -> dict[str, float] | None:
    """Return shares of tokens by source from shares by domain: inside a domain as the corpus was built. None: all as built."""
    if not wanted:
        return None
    domains = {corpus.domains[source] for source in corpus.splits["train"]}
    if unknown := sorted(set(wanted) - domains):
        what = f"shares names the domain {unknown[0]!r}, which the corpus has nothing of to train on"
        raise UserError(f"{what}{nearest(unknown[0], domains)}")
    shares = {}
    for domain, share in wanted.items():
        sources = [source for source in corpus.splits["train"] if corpus.domains[source] == domain]
        built = sum(corpus.shares.get(source, 0) for source in sources)
        for source in sources if share > 0 else []:
            shares[source] = share * (corpus.shares.get(source, 0) / built if built else 1 / len(sources))
    return shares


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


def train_on_corpus(
    training: Training, world: World, work: Work | None, model: Any,
    objective: Callable[[Any], Objective] | None = None, **more: Any,
) -> None:  # fmt: skip
    """Train a model on the corpus, measured on what is held out of it; save it and the report."""
    settings = training.settings
    corpus = open_corpus(training, training.parent)
    length, rows = settings.length or corpus.length, rows_a_step(settings, corpus.length, world.size)
    if corpus.vocabulary > (known := model.get_input_embeddings().weight.shape[0]):
        advice = "take a base whose files belong together"
        raise UserError(f"the base knows {known} tokens, its tokeniser {corpus.vocabulary}; {advice}")
    loader = Loader(
        corpus, seed=training.seed, batch=rows, rank=world.rank, world=world.size,
        shares=shares_by_source(corpus, settings.shares), workers=settings.loader_workers,
    )  # fmt: skip

    def measured_on(session: Session) -> dict[str, Any]:
        return {"length": length, "rows": settings.evaluation_rows, "micro": session.micro, "device": session.device}

    def bits(session: Session) -> dict[str, Bits]:  # not of a trunk that stays what it is
        return {} if session.heads_only else bits_by_domain(session.nats, corpus, **measured_on(session))

    def acceptance(session: Session) -> dict[str, Any]:
        if objective is None:
            return {}
        return {"acceptance": acceptance_by_domain(session.accepted, corpus, **measured_on(session))}

    train_and_report(training, world, work, model, loader, length, bits, acceptance, objective=objective, **more)


def train_and_report(  # noqa: PLR0913 - what a training is made of
    training: Training, world: World, work: Work | None, model: Any, loader: Loader, length: int, evaluate: Evaluate,
    also: Callable[[Session], dict[str, Any]], *, objective: Callable[[Any], Objective] | None, dtype: torch.dtype | None = None,
    more: Callable[[Path], dict[str, Any]] | None = None, notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Train to the end; save model, side files and report, with `more` results that the saved model is asked for.

    `evaluate` measures bits per byte and `also` whatever else. `dtype`: of the parent's weights, if it has any.
    """
    settings, parent, saved = training.settings, training.parent, training.folder / MODEL
    refuse_long(length, shape_of(model.config).context)
    session = corpus_session(
        model, settings, loader, length, world, training.folder, work.reporter.say if work else lambda _: None,
        objective=objective or NextToken, parent_dtype=dtype or saved_dtype(parent), lora=getattr(settings, "lora", None),
        seed=training.seed,
    )  # fmt: skip
    run = TrainingRun(session, settings, loader, evaluate, work, training.folder, also)
    try:
        bits = run.run()
    finally:
        loader.close()
    if session.heads_only and world.leads:
        place_weights(parent, saved)
    session.export(saved)
    if work is None:
        return
    carried = complete_model(parent, saved)
    measured = curve(run)
    if not bits["before"] and not any(point.get("acceptance") for point in measured):
        work.reporter.say(f"{training.kind}: nothing is held out, so nothing was measured; raise data.heldout")
    results = {
        "device": environment.device_name(session.device.type),
        "seen": loader.achieved()["sources"],
        "domains": table(bits["before"], bits["after"]),
        "acceptance": acceptance_table(measured),
        "curve": measured,
        "notes": [*notes, *([UNTRAINED_HEADS] if carried else []), *run.notes()],
        **(more(saved) if more else {}),
    }
    write_report(training.folder, f"{training.kind}: before and after", results)


def joint_objective(training: Training, model: Any) -> Callable[[Any], Objective] | None:
    """Return what trains the parent's MTP heads along with a model, now its own, if the settings wish for it."""
    joint: JointMtpSettings | None = training.settings.mtp
    if joint is None:
        return None
    model.mtp = load_heads(training.parent, model)
    if model.mtp is None:
        raise UserError(f"{training.kind}.mtp: {NO_HEADS}")
    return partial(MultiToken, beta=joint.beta, joint=joint)


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


def complete_model(source: Path, target: Path) -> bool:
    """Give a model what it has not of its own: its parent's tokeniser and MTP heads; return whether it got heads."""
    for file in (file for pattern in SIDE_FILES for file in source.glob(pattern)):
        if not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    carried = (source / FILE).is_file() and not (target / FILE).exists()
    if carried:
        shutil.copyfile(source / FILE, target / FILE)
    keep_apart(target)
    fsync_tree(target)  # before the results, which say that it is there
    return carried
