"""The stages that pretrain on the corpus: `pretrain` from random weights, `cpt` from a model.

A model from random weights has the tokeniser of the corpus. `shares` mixes the domain in early, at a small share, or goes on with the
domain mix and replays the rest against forgetting; both are measured.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from etude.errors import UserError
from etude.files import sha256_file
from etude.run.folder import MODEL
from etude.run.stages.training import TrainingStage
from etude.training.settings import LoraSettings, OptimiserSettings, ScheduleSettings, Settings, TrainSettings

if TYPE_CHECKING:
    from etude.run.stage import Ahead, Job, Outcome
    from etude.run.train import Training
    from etude.training.distributed import World
    from etude.work import Work


class ShapeSettings(Settings):
    """The shape of a Llama."""

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
            shared = f"heads = {self.heads} cannot be shared by kv_heads = {self.kv_heads}"
            raise ValueError(f"{shared}; one must divide the other")
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
    needs_model = False
    settings = PretrainSettings

    def check(self, settings: PretrainSettings) -> None:
        """Refuse a licence file that is not there."""
        if settings.licence and not Path(settings.licence).expanduser().is_file():
            raise UserError(f"pretrain.licence {settings.licence!r} is not a file (looked in {Path.cwd()})")

    def check_order(self, settings: PretrainSettings, ahead: Ahead) -> None:
        """Refuse a model before it: it would not be used."""
        if ahead.made_by:
            what = "this recipe has a base" if ahead.made_by == ("base",) else f"{ahead.made_by[-1]} comes before it"
            raise UserError(f"pretrain starts from random weights, but {what}; leave that out, or use `cpt`")
        super().check_order(settings, replace(ahead, context=settings.model.context))

    def leaves(self, settings: PretrainSettings, ahead: Ahead) -> Ahead:
        return replace(ahead, context=settings.model.context, heads=False, tokens=None)

    def inputs(self, settings: PretrainSettings, parent_digest: str | None, seed: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the settings; a model from nothing has no parent."""
        inputs = super().inputs(settings, None, seed)
        licence = sha256_file(Path(settings.licence).expanduser()) if settings.licence else None
        return {**inputs, "settings": {**inputs["settings"], "licence": licence}}

    def run(self, settings: PretrainSettings, job: Job) -> Outcome:
        """Train, and give the model its licence."""
        outcome = super().run(settings, job)
        if settings.licence:
            shutil.copyfile(Path(settings.licence).expanduser(), job.work.folder / MODEL / "LICENSE")
        return outcome

    def train(self, training: Training, world: World, work: Work | None) -> None:
        """Train on this rank; the first draws the weights."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from etude.run.train import open_corpus, train_on_corpus

        corpus = open_corpus(training, training.parent)
        torch.manual_seed(training.seed)
        with torch.device("cpu" if world.leads else "meta"):
            shape = llama_config(training.settings.model, corpus.vocabulary, corpus.separator)
            model = LlamaForCausalLM(LlamaConfig(**shape))
        train_on_corpus(training, world, work, model, dtype=torch.bfloat16)


def llama_config(shape: ShapeSettings, vocabulary: int, separator: int) -> dict[str, Any]:
    """Return the config of a shape, as config.json has it."""
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": shape.width, "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width, "max_position_embeddings": shape.context, "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "bos_token_id": separator, "eos_token_id": separator, "pad_token_id": separator,
    }  # fmt: skip


class CptSettings(TrainSettings):
    """Continued pretraining."""

    optimiser: OptimiserSettings = OptimiserSettings(lr=3e-4)
    lora: LoraSettings | None = Field(default=None, description="LoRA: train low-rank adapters only")


class CptStage(TrainingStage):
    """Trains on the corpus."""

    kind = "cpt"
    settings = CptSettings

    def train(self, training: Training, world: World, work: Work | None) -> None:
        from etude.run.train import train_on_corpus

        train_on_corpus(training, world, work, training.parent_model())
