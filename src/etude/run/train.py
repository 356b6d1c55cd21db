"""What the stages that train do, on every rank: open the corpus, train, measure, report, save beside the parent's tokeniser."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from etude.data.loader import Corpus, Loader
from etude.errors import UserError, nearest
from etude.files import fsync_tree, link_or_copy
from etude.lineage import environment
from etude.lineage.weight_files import INDEX
from etude.models.load import saved_dtype, weight_files
from etude.models.mtp_heads import keep_apart, load_heads
from etude.models.shape import HEADS_FILE
from etude.report.training import write_report
from etude.run.folder import MODEL
from etude.run.stages.training import NO_CORPUS, NO_HEADS, refuse_long, rows_a_step
from etude.training.distributed import join
from etude.training.measure import Bits, acceptance_by_domain, bits_by_domain, table
from etude.training.objectives.mtp import MultiToken
from etude.training.objectives.next_token import NextToken
from etude.training.run import TrainingRun, corpus_session
from etude.training.session import load_to_train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from etude.training.distributed import World
    from etude.training.objectives import Objective
    from etude.training.run import Evaluate
    from etude.training.session import Session
    from etude.training.settings import JointMtpSettings
    from etude.work import Work

UNTRAINED_HEADS = "the parent's MTP heads came along untrained: they know the parent; train them again"
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


def train_on_corpus(
    training: Training, world: World, work: Work | None, model: Any,
    objective: Callable[[Any], Objective] | None = None, **more: Any,
) -> None:  # fmt: skip
    """Train a model on the corpus, measured on what is held out of it; save it and the report."""
    settings = training.settings
    corpus = open_corpus(training, training.parent)
    together, apart = settings.context_ranks, max(1, world.size // settings.context_ranks)
    length, rows = settings.length or corpus.length, rows_a_step(settings, corpus.length, apart)
    if corpus.vocabulary > (known := model.get_input_embeddings().weight.shape[0]):
        advice = "take a base whose files belong together"
        raise UserError(f"the base knows {known} tokens, its tokeniser {corpus.vocabulary}; {advice}")
    loader = Loader(
        corpus, seed=training.seed, batch=rows, rank=world.rank // together, world=apart,
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
    refuse_long(length, int(model.config.get_text_config().max_position_embeddings))
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
    carried = (source / HEADS_FILE).is_file() and not (target / HEADS_FILE).exists()
    if carried:
        shutil.copyfile(source / HEADS_FILE, target / HEADS_FILE)
    keep_apart(target)
    fsync_tree(target)  # before the results, which say that it is there
    return carried
