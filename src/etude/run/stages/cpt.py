"""The `cpt` stage: go on pretraining on the domain mix, with replay against forgetting, and measure both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.run.stages.training import Training, TrainingStage, trained_on_corpus
from etude.training.settings import LoraSettings, OptimiserSettings, TrainSettings

if TYPE_CHECKING:
    from etude.training.world import World
    from etude.work import Work


class CptSettings(TrainSettings):
    """Continued pretraining."""

    optimiser: OptimiserSettings = OptimiserSettings(lr=3e-4)
    lora: LoraSettings | None = Field(
        default=None, description="train small matrices only; leave out to train all weights"
    )


class CptStage(TrainingStage):
    """Trains on the corpus."""

    kind = "cpt"
    settings = CptSettings

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank."""
        import torch

        from etude.models.load import load_model, saved_dtype
        from etude.models.shape import model_shape

        assert training.parent is not None
        shape = model_shape(training.parent)
        model = load_model(training.parent, torch.device("cpu"), torch.float32)
        trained_on_corpus(
            training, world, work, model,
            context=shape.context, lora=training.settings.lora, dtype=saved_dtype(training.parent),
        )  # fmt: skip
