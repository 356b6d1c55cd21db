"""The `mtp` stage: heads that predict several tokens ahead, for speculative decoding; the model beneath them stays as it is."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from etude.errors import UserError
from etude.models.load import choose_device, load_model
from etude.models.shape import heads_shape, model_shape
from etude.run.stages.training import TrainingStage
from etude.training.settings import OptimiserSettings, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from etude.run.stage import Ahead
    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.work import Work


class MtpSettings(TrainSettings):
    """Multi-token prediction, learnt from the model itself."""

    depth: int = Field(default=3, ge=1, le=8, description="number of tokens predicted beyond the next one")
    shared: bool = Field(default=True, description="one MTP layer for all depths; false: one each")
    beta: float = Field(default=0.6, gt=0, le=1, description="weight of each depth relative to the one before it")
    optimiser: OptimiserSettings = OptimiserSettings(lr=1e-3)
    speed_texts: int = Field(default=4, ge=0, description="held-out texts to measure the speed-up on (0 = none)")
    speed_tokens: int = Field(default=96, ge=8, description="tokens to decode after each of them")

    @model_validator(mode="after")
    def _dtype_is_the_parents(self) -> MtpSettings:
        if self.dtype != "auto":
            raise ValueError("`dtype` has no effect here: heads are saved as the model's weights are")
        if self.context_ranks > 1:
            raise ValueError("MTP heads look at the tokens ahead, which another rank may have; set context_ranks = 1")
        return self


class MtpStage(TrainingStage):
    """Trains heads on the corpus; goes on from those the model has, if they are of the same shape."""

    kind = "mtp"
    settings = MtpSettings

    def check_order(self, settings: MtpSettings, ahead: Ahead) -> None:
        """Refuse to throw away what a stage before it was to train."""
        super().check_order(settings, ahead)
        if isinstance(ahead.heads, tuple) and ahead.heads != (settings.depth, settings.shared):
            before = "depth = {}, shared = {}".format(*ahead.heads).lower()
            raise UserError(
                f"a stage before it makes heads ({before}), which other heads would replace; leave one of the two out"
            )

    def leaves(self, settings: MtpSettings, ahead: Ahead) -> Ahead:
        return replace(ahead, heads=(settings.depth, settings.shared))

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank; all ranks draw the same fresh weights."""
        import torch

        from etude.models.mtp_heads import MtpHeads, load_heads
        from etude.run.train import train_on_corpus
        from etude.training.objectives.mtp import MultiToken

        settings: MtpSettings = training.settings
        model = training.parent_model(frozen=True).requires_grad_(requires_grad=False)
        known = heads_shape(training.parent) == (settings.depth, settings.shared)
        torch.manual_seed(training.seed)
        fresh = MtpHeads.for_model(model, depth=settings.depth, shared=settings.shared)
        model.mtp = load_heads(training.parent, model) if known else fresh
        begin = "those of the parent" if known else "fresh weights"
        layers = "one layer for all" if settings.shared else "a layer each"
        train_on_corpus(
            training, world, work, model, partial(MultiToken, beta=settings.beta),
            notes=[f"{settings.depth} depths, {layers}, from {begin}"], more=partial(_worth, training),
        )  # fmt: skip


def _worth(training: Training, saved: Path) -> dict[str, Any]:
    """Decode held-out texts with the saved heads and without; return the figures and what to say of them."""
    from etude.inference.local import measure_speculation
    from etude.models.mtp_heads import load_heads
    from etude.run.train import open_corpus
    from etude.training.measure import heldout_domains

    settings: MtpSettings = training.settings
    corpus = open_corpus(training, saved)
    domains = heldout_domains(corpus)
    if not settings.speed_texts or not domains:
        return {}
    model = load_model(saved, choose_device(settings.device))
    most = min(corpus.length // 2, model_shape(saved).context - settings.speed_tokens)
    if most < 1:
        return {}
    batches = (batch for domain in domains for batch in corpus.heldout(domain, rows=settings.speed_texts))
    prompts = [row[:most].tolist() for batch in batches for row in batch.tokens][: settings.speed_texts]
    speed = measure_speculation(model, load_heads(saved, model), prompts, settings.speed_tokens)
    return {"speed": asdict(speed), "lines": speed.lines}
