"""The `extend` stage: a longer context. Positions are stretched, the model is trained to it, and asked what that was worth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from etude.errors import UserError
from etude.files import read_json, write_json
from etude.models.context import RopeSettings, stretch
from etude.models.load import choose_device, load_model, load_tokeniser
from etude.progress import Reporter, Task
from etude.run.stage import free_gpu_memory
from etude.run.stages.training import TrainingStage
from etude.training.settings import JointMtpSettings, LoraSettings, OptimiserSettings, TrainSettings, mtp_or_lora

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from etude.data.loader import Corpus
    from etude.run.stage import Ahead
    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.training.long_context import Retrieval
    from etude.work import Work

BASE = "base.json"  # what was measured of the parent


class ExtendSettings(TrainSettings):
    """Longer context."""

    length: int = Field(ge=16, description="new context in tokens; a divisor of data.length")
    rope: RopeSettings = RopeSettings()
    optimiser: OptimiserSettings = OptimiserSettings(lr=1e-4)
    lora: LoraSettings | None = Field(default=None, description="LoRA: train low-rank adapters only")
    mtp: JointMtpSettings | None = Field(default=None, description="train the parent's MTP heads jointly")
    retrieval_items: int = Field(default=50, ge=0, description="retrieval items at each length (0 = none)")
    retrieval_keys: int = Field(default=4, ge=1, le=512, description="constants planted in each retrieval item")
    retrieval_lengths: list[int] = Field(default=[], description="context lengths of it; default: half, all, twice")
    position_rows: int = Field(default=16, ge=0, description="held-out rows of a domain, for bits per byte by position")

    _one_of_both = model_validator(mode="after")(mtp_or_lora)


class ExtendStage(TrainingStage):
    """Trains a model to a longer context."""

    kind = "extend"
    settings = ExtendSettings

    def check_order(self, settings: ExtendSettings, ahead: Ahead) -> None:
        super().check_order(settings, ahead)
        if settings.length > ahead.corpus.length:
            short = f"the corpus has rows of {ahead.corpus.length} tokens: too short for {settings.length}"
            raise UserError(f"{short}; raise data.length")
        if ahead.context and settings.length <= ahead.context:
            already = f"the model already has a context of {ahead.context} tokens"
            raise UserError(f"{already}; {settings.length} is no extension of it")

    def leaves(self, settings: ExtendSettings, ahead: Ahead) -> Ahead:
        return replace(ahead, context=settings.length)

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank."""
        from transformers import AutoConfig

        from etude.run.train import joint_objective, open_corpus, train_on_corpus

        settings: ExtendSettings = training.settings
        corpus = open_corpus(training, training.parent)
        longer = stretch(AutoConfig.from_pretrained(training.parent), settings.length, settings.rope)
        # A place to stop, so only where no other rank would wait for this one.
        reporter = work.reporter if work and world.size == 1 else Reporter(quiet=True)
        if world.leads and not (training.folder / BASE).exists():
            write_json(training.folder / BASE, measured(training.parent, corpus, settings, training.seed, reporter))
        model = training.parent_model(config=longer)  # after the parent, which was on the device

        def more(saved: Path) -> dict[str, Any]:
            child = measured(saved, corpus, settings, training.seed, reporter)
            long = {"parent": read_json(training.folder / BASE), "child": child}
            return {"long": long, "lines": long_lines(long)}

        train_on_corpus(training, world, work, model, joint_objective(training, model), more=more)


def measured(saved: Path, corpus: Corpus, settings: ExtendSettings, seed: int, reporter: Reporter) -> dict[str, Any]:
    """Ask a saved model: loss by position in rows as long as the corpus has them, and retrieval at several lengths."""
    from etude.training.long_context import make_retrieval, score_retrieval
    from etude.training.session import refuse_damaged

    device = choose_device(settings.device)
    model, tokeniser = load_model(saved, device), load_tokeniser(saved)
    refuse_damaged(model)
    retrieval, positions = {}, dict(_positions(model, corpus, settings, device))
    model.set_attn_implementation("sdpa")
    lengths = settings.retrieval_lengths or [settings.length // 2, settings.length, 2 * settings.length]
    texts = _texts(corpus, tokeniser)

    def encode(text: str) -> list[int]:
        return list(tokeniser.encode(text, add_special_tokens=False, verbose=False))

    with reporter.task("asking at long contexts", settings.retrieval_items * sum(lengths), "tokens") as task:
        for length in lengths if settings.retrieval_items else []:
            items = make_retrieval(encode, texts, length, settings.retrieval_keys, settings.retrieval_items, seed)
            retrieval[str(length)] = score_retrieval(model, _counted(items, task))
    del model
    free_gpu_memory()
    return {"positions": positions, "retrieval": retrieval}


def _counted(items: Iterable[Retrieval], task: Task) -> Iterator[Retrieval]:
    for item in items:
        yield item
        task.advance(len(item.tokens))


def _positions(model: Any, corpus: Corpus, settings: ExtendSettings, device: Any) -> Iterator[tuple[str, Any]]:
    from etude.training.attention import isolate
    from etude.training.batch import rows_of
    from etude.training.long_context import bucket_bounds, by_position
    from etude.training.measure import bytes_per_token, heldout_domains
    from etude.training.objectives.next_token import NextToken

    isolate(model, settings.attention)
    objective, ratio = NextToken(model), bytes_per_token(corpus)
    for domain in heldout_domains(corpus) if settings.position_rows else []:
        batches = list(corpus.heldout(domain, batch=1, rows=settings.position_rows))
        nats = np.concatenate(
            [objective.nats(model, rows_of(batch).to(device)).float().cpu().numpy() for batch in batches]
        )
        documents, positions = (
            np.concatenate([getattr(batch, name) for batch in batches]) for name in ("documents", "positions")
        )
        yield domain, by_position(nats, ratio[domain], documents, positions, bucket_bounds(corpus.length))


def _texts(corpus: Corpus, tokeniser: Any) -> list[str]:
    """Return the held-out documents of all domains as text, pieces of one document in their own right."""
    from etude.training.measure import heldout_domains

    texts = []
    for domain in heldout_domains(corpus):
        for batch in corpus.heldout(domain):
            for tokens, documents in zip(batch.tokens, batch.documents, strict=True):
                kept = tokens[(documents >= 0) & (tokens != corpus.separator)]
                texts.append(tokeniser.decode(kept.tolist()))
    return texts


def long_lines(long: dict[str, Any]) -> list[str]:
    """Return what was measured, parent against child, one line a bucket and a length."""
    lines = []
    for domain, before in long["parent"]["positions"].items():
        for one, two in zip(before, long["child"]["positions"][domain], strict=True):
            if "bits_per_byte" in one:
                place = f"{one['first']:,}–{one['last']:,}"
                lines.append(f"{domain}, positions {place}: {one['bits_per_byte']:.4f} → {two['bits_per_byte']:.4f} bits per byte"
                             f" ({one['tokens']:,} tokens)")  # fmt: skip
    for length, one in long["parent"]["retrieval"].items():
        two = long["child"]["retrieval"][length]
        spans = [f"{each['exact']:.0%} [{each['interval'][0]:.0%}, {each['interval'][1]:.0%}]" for each in (one, two)]
        change = f"{spans[0]} → {spans[1]} exact, {one['nats']:.2f} → {two['nats']:.2f} nats"
        lines.append(f"retrieval at {int(length):,} tokens: {change}")
    return lines
