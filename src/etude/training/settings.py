"""What every training stage can be told; each stage adds its own. Free of torch, so that a recipe is read at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.training.loop import GuardSettings
from etude.training.optimiser import ScheduleSettings

ROUNDING = 1e-6  # shares come from decimal fractions
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimiserSettings(BaseModel):
    """How weights change."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw; or muon for matrices, adamw for the rest"
    )
    lr: float = Field(
        default=3e-4, gt=0, description="peak learning rate (muon: of the matrices; their update has AdamW's size)"
    )
    other_lr: float | None = Field(
        default=None, gt=0, description="muon: peak rate of embeddings and vectors; default lr"
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW's memory of gradients and squares"
    )
    momentum: float = Field(default=0.95, ge=0, lt=1, description="muon: its memory of gradients")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's guard against division by zero")
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; embeddings and vectors have none")
    clip: float = Field(default=1.0, gt=0, description="longest gradient; a longer one is scaled down")

    @model_validator(mode="after")
    def _each_number_has_its_use(self) -> OptimiserSettings:
        fields = type(self).model_fields  # a resolved recipe writes all of them out
        idle = [name for name in ("momentum", "other_lr") if getattr(self, name) != fields[name].default]
        if self.name == "adamw" and idle:
            raise ValueError(f"`{idle[0]}` means nothing for the optimiser 'adamw'")
        return self


class LoraSettings(BaseModel):
    """Train small matrices beside the large ones (peft), and add them in at the end."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    rank: int = Field(default=16, ge=1, description="width of the small matrices")
    alpha: float = Field(default=32.0, gt=0, description="their product is scaled by alpha / rank")
    targets: str | list[str] = Field(
        default="all-linear", description="which layers: all-linear (not the head), or a list of names"
    )


class JointMtpSettings(BaseModel):
    """Train the parent's MTP heads along with it, by self-distillation."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    weight: float = Field(default=0.1, gt=0, description="of the heads' loss beside that of the next token")
    beta: float = Field(default=0.6, gt=0, le=1, description="weight of each depth relative to the one before it")
    detach: bool = Field(default=True, description="the heads' loss does not change the trunk; false: it does")


def with_own_defaults(stage: type[BaseModel], given: dict[str, Any], tables: dict[str, str]) -> dict[str, Any]:
    """Fill tables of which a recipe sets a part with the stage's own defaults, unless one takes another kind (by the key of it)."""
    for name, kind in tables.items():
        own, table = stage.model_fields[name].default, given.get(name)
        if isinstance(table, dict) and table.get(kind, getattr(own, kind)) == getattr(own, kind):
            given = {**given, name: {**own.model_dump(exclude_unset=True), **table}}
    return given


class TrainSettings(BaseModel):
    """What all training stages have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    tokens: int = Field(ge=1, description="budget: tokens that go through the model, in whole steps, rounded up")
    length: int | None = Field(
        default=None, ge=16, description="tokens in a row; a divisor of data.length, which is the default"
    )
    batch: int = Field(default=64, ge=1, description="rows a step, on all devices together")
    micro: int = Field(default=0, ge=0, description="rows a device works on at once; 0: as many as fit by estimate")
    shares: dict[str, float] = Field(
        default={}, description="share of tokens by domain, for this stage; default data.shares"
    )
    optimiser: OptimiserSettings = OptimiserSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    guard: GuardSettings = GuardSettings()
    attention: Literal["auto", "documents", "sdpa"] = Field(
        default="auto", description="documents: fast; sdpa: transformers' own; both keep documents apart"
    )
    recompute: bool = Field(
        default=False, description="compute layers again in the backward pass: a third slower, far less memory"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile of the layers; auto: on a GPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of the saved weights; auto: as the base's"
    )
    evaluations: int = Field(
        default=12, ge=0, description="how often to measure between before and after, mostly early on"
    )
    evaluation_rows: int = Field(default=64, ge=1, description="held-out rows measured each time, of each domain")
    checkpoint_every: int = Field(
        default=200, ge=1, description="steps between checkpoints; an interrupted run has one more"
    )
    keep: int = Field(default=2, ge=1, description="checkpoints kept while training; none remains after it")
    loader_workers: int = Field(default=1, ge=0, description="threads that read batches ahead; the result is the same")

    @model_validator(mode="before")
    @classmethod
    def _keep_own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A table that sets one number of the optimiser leaves the others as this stage has them, unless it takes another kind."""
        return with_own_defaults(cls, given, {"optimiser": "name", "schedule": "kind"})

    @model_validator(mode="after")
    def _shares_are_a_whole(self) -> Self:
        total = sum(self.shares.values())
        if self.shares and (abs(total - 1) > ROUNDING or min(self.shares.values()) < 0):
            told = f"shares must add up to 1 and not be negative; they add up to {total:g}"
            raise ValueError(f"{told}; name every domain, one that is not named has none")
        return self

    def steps(self, length: int) -> int:
        """Return the number of steps that the budget makes."""
        return -(-self.tokens // (self.batch * length))
