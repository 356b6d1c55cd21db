"""The `pretrain` stage: a model from random weights, with the tokeniser of the corpus.

Early mixing, the domain seen from the start at a small share, is `shares`.

The `cpt` stage: go on pretraining on the domain mix, with replay against forgetting, and measure both.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.errors import UserError
from etude.files import sha256_file
from etude.run.folder import MODEL
from etude.run.stages.training import Training, TrainingStage, trained_on_corpus
from etude.training.settings import LoraSettings, OptimiserSettings, ScheduleSettings, TrainSettings

if TYPE_CHECKING:
    from etude.run.stage import Job, Outcome
    from etude.training.distributed import World
    from etude.work import Work


class ShapeSettings(BaseModel):
    """The shape of a Llama."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    width: int = Field(default=256, ge=16, description="hidden size")
    layers: int = Field(default=6, ge=1, description="number of layers")
    heads: int = Field(default=4, ge=1, description="number of attention heads")
    kv_heads: int = Field(default=2, ge=1, description="number of key-value heads; divides heads")
    head_width: int = Field(default=64, ge=8, multiple_of=2, description="width of one head")
    feed_forward: int = Field(default=576, ge=16, description="width of the feed-forward layer")
    context: int = Field(default=2048, ge=16, description="context in tokens")
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary position embedding")
    tied: bool = Field(default=True, description="embedding and output head share one matrix")

    @model_validator(mode="after")
    def _fits(self) -> ShapeSettings:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} cannot be shared by kv_heads = {self.kv_heads}; one must divide the other"
            )
        return self


class PretrainSettings(TrainSettings):
    """Pretraining."""

    model: ShapeSettings = ShapeSettings()
    optimiser: OptimiserSettings = OptimiserSettings(name="muon", lr=8e-3, other_lr=4e-3)
    schedule: ScheduleSettings = ScheduleSettings(kind="wsd", warmup=0.01, decay=0.6)
    licence: str | None = Field(default=None, description="licence file to give the model; leave out to give it none")


class PretrainStage(TrainingStage):
    """Makes a model of the corpus alone."""

    kind = "pretrain"
    settings = PretrainSettings

    def check(self, settings: PretrainSettings) -> None:
        """Refuse a licence file that is not there."""
        if settings.licence and not Path(settings.licence).expanduser().is_file():
            raise UserError(f"pretrain.licence {settings.licence!r} is not a file (looked in {Path.cwd()})")

    def inputs(self, settings: PretrainSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:
        """Return the settings; a model from nothing has no parent."""
        if parent_digest is not None:
            raise UserError(
                "pretrain starts from random weights, but this recipe has a base; leave `base` out, or use `cpt`"
            )
        inputs = super().inputs(settings, "none", seed)
        licence = sha256_file(Path(settings.licence).expanduser()) if settings.licence else None
        return {**inputs, "settings": {**inputs["settings"], "licence": licence}}

    def run(self, settings: PretrainSettings, job: Job) -> Outcome:
        """Train, and give the model its licence."""
        outcome = super().run(settings, job)
        if settings.licence:
            shutil.copyfile(Path(settings.licence).expanduser(), job.work.folder / MODEL / "LICENSE")
        return outcome

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank; all ranks draw the same weights."""
        import torch
        from transformers import LlamaForCausalLM

        from etude.run.stages.training import open_corpus

        settings: PretrainSettings = training.settings
        tokeniser = (training.corpus or Path()) / "tokeniser"
        corpus = open_corpus(training, tokeniser)
        torch.manual_seed(training.seed)
        model = LlamaForCausalLM(_config(settings.model, corpus.vocabulary, corpus.separator))
        training = replace(training, parent=tokeniser)
        trained_on_corpus(training, world, work, model, context=settings.model.context, dtype=torch.bfloat16)


def _config(shape: ShapeSettings, vocabulary: int, separator: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=separator,
        eos_token_id=separator,
        pad_token_id=separator,
    )


class CptSettings(TrainSettings):
    """Continued pretraining."""

    optimiser: OptimiserSettings = OptimiserSettings(lr=3e-4)
    lora: LoraSettings | None = Field(default=None, description="LoRA: train low-rank adapters only")


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
