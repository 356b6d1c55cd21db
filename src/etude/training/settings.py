"""The settings of training; each stage adds its own. Free of torch, so that a recipe is read at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ROUNDING = 1e-6  # shares come from decimal fractions
Beta = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """A table of a recipe: unknown keys, wrong types and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def refuse_idle(self, names: set[str], why: str) -> None:
        """Refuse settings that would have no effect; those at their defaults are let pass: a resolved recipe writes all out."""
        fields = type(self).model_fields
        if idle := sorted(name for name in names if getattr(self, name) != fields[name].default):
            default = fields[idle[0]].default
            known = "" if isinstance(default, BaseModel) else f", {default}"
            raise ValueError(f"`{idle[0]}` has no effect with {why}; leave it out, or at its default{known}")


class OptimiserSettings(Settings):
    """How weights change."""

    name: Literal["adamw", "muon"] = Field(default="adamw", description="adamw, or muon (AdamW beside matrices)")
    lr: float = Field(default=3e-4, gt=0, description="peak learning rate (muon: of the matrices)")
    other_lr: float | None = Field(default=None, gt=0, description="muon: peak learning rate of the rest; default lr")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False, description="AdamW's decay rates")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="muon: momentum")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(default=0.1, ge=0, description="weight decay (matrices; not embeddings, vectors)")
    clip: float = Field(default=1.0, gt=0, description="gradient norm to clip at")
    masters: Literal["auto", "float32", "none"] = Field(
        default="auto",
        description="copy of bf16 weights to update; none: they are rounded at random; auto: float32 if it fits",
    )
    states: Literal["auto", "float32", "8bit", "cpu"] = Field(
        default="auto", description="AdamW's moments: float32, 8bit, or in main memory (cpu); auto: the first that fits"
    )

    @model_validator(mode="after")
    def _each_number_has_its_use(self) -> Self:
        if self.name == "adamw":
            self.refuse_idle({"momentum", "other_lr"}, "the optimiser 'adamw'")
        elif self.masters == "none" or self.states in {"8bit", "cpu"}:
            raise ValueError(
                "muon keeps float32 masters and states; use 'adamw', or leave `masters` and `states` at \"auto\""
            )
        return self


class ScheduleSettings(Settings):
    """How the learning rate goes."""

    kind: Literal["linear", "cosine", "wsd", "infinite"] = Field(default="cosine", description="learning-rate schedule")
    warmup: float = Field(default=0.01, ge=0, lt=1, description="warm-up: share of the steps")
    decay: float = Field(default=0.2, gt=0, le=1, description="wsd, infinite: share of the steps in the final decay")
    cool: float = Field(default=0.1, gt=0, lt=1, description="infinite: share of the steps in the first decay")
    constant: float = Field(default=0.5, gt=0, le=1, description="infinite: factor of the peak between the two decays")
    floor: float = Field(default=0.0, ge=0, le=1, description="factor of the peak at the end")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        own = {"wsd": {"decay"}, "infinite": {"decay", "cool", "constant"}}.get(self.kind, set())
        self.refuse_idle({"decay", "cool", "constant"} - own, f"the schedule {self.kind!r}")
        used = self.warmup + sum(getattr(self, name) for name in own & {"decay", "cool"})
        if used > 1 + 1e-9:
            raise ValueError(f"the parts of the schedule {self.kind!r} take {used:.2f} of the run, more than all of it")
        if self.kind == "infinite" and self.floor > self.constant:
            raise ValueError(
                f"`floor` {self.floor:g} is above `constant` {self.constant:g}, so the last fall would rise"
            )
        return self


class GuardSettings(Settings):
    """When a step is skipped."""

    sigmas: float = Field(default=6.0, gt=0, description="outlier: a loss this many standard deviations above the mean")
    window: int = Field(default=128, ge=8, description="accepted steps in the mean; before that many, no outliers")
    patience: int = Field(default=50, ge=1, description="consecutive skipped steps that end training")


class LoraSettings(Settings):
    """Train small matrices beside the large ones (peft), and add them in at the end."""

    rank: int = Field(default=16, ge=1, description="rank of the adapters")
    alpha: float = Field(default=32.0, gt=0, description="scaling: alpha / rank")
    targets: str | list[str] = Field(default="all-linear", description="modules: all-linear (not the head), or names")


class ExpertSettings(Settings):
    """How the load of experts is kept even."""

    balance: Literal["none", "aux_loss", "aux_free", "quantile"] = Field(
        default="none", description="balancing: none, an auxiliary loss, or a bias on the choice (by sign, by quantile)"
    )
    coefficient: float = Field(default=0.01, gt=0, description="aux_loss: weight beside the loss of a token")
    rate: float = Field(default=0.001, gt=0, description="aux_free: change of the bias a step")
    release: float = Field(
        default=0.25, gt=0, le=1, description="share of the steps over which a bias fades that the model cannot keep"
    )

    @model_validator(mode="after")
    def _each_number_has_its_use(self) -> Self:
        own = {"aux_loss": {"coefficient"}, "aux_free": {"rate", "release"}, "quantile": {"release"}}
        idle = {"coefficient", "rate", "release"} - own.get(self.balance, set())
        self.refuse_idle(idle, f'experts.balance = "{self.balance}"')
        return self


class JointMtpSettings(Settings):
    """Train the parent's MTP heads jointly with it, by self-distillation."""

    weight: float = Field(default=0.1, gt=0, description="weight of the MTP loss beside that of the next token")
    beta: float = Field(default=0.6, gt=0, le=1, description="weight of each depth relative to the last")
    detach: bool = Field(default=True, description="no gradient of the MTP loss into the trunk; false: joint")


def mtp_or_lora(settings: Any) -> Any:
    """Refuse MTP heads that are trained with all weights beside adapters."""
    if settings.mtp and settings.lora:
        raise ValueError("`mtp` trains MTP heads with all weights, `lora` adapters only; leave one of the two out")
    return settings


class TrainerSettings(Settings):
    """How a model is trained, whatever it learns."""

    optimiser: OptimiserSettings = OptimiserSettings()
    micro: int = Field(default=0, ge=0, description="micro-batch in rows a device (0 = as many as fit by estimate)")
    attention: Literal["auto", "documents", "sdpa"] = Field(
        default="auto", description="attention kernel; documents: Etude's own, for packed rows"
    )
    experts: ExpertSettings = ExpertSettings()
    recompute: bool = Field(default=False, description="recompute layers in the backward pass: slower, less memory")
    compile: Literal["auto", "on", "off"] = Field(default="auto", description="torch.compile; auto: on a GPU")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="saved dtype; auto: the base's")
    checkpoint_every: int = Field(default=200, ge=1, description="steps between checkpoints, at most")
    checkpoint_seconds: float = Field(default=300.0, gt=0, description="seconds between checkpoints, at most")
    keep: int = Field(default=2, ge=1, description="checkpoints kept during training; none after it")

    @model_validator(mode="before")
    @classmethod
    def _keep_own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A table that sets one number of the optimiser leaves the others as this stage has them, unless it takes another kind."""
        for name, kind in {"optimiser": "name", "schedule": "kind"}.items():
            table, own = given.get(name), cls.model_fields[name].default if name in cls.model_fields else None
            if isinstance(table, dict) and own and table.get(kind, getattr(own, kind)) == getattr(own, kind):
                given = {**given, name: {**own.model_dump(exclude_unset=True), **table}}
        return given


class TrainSettings(TrainerSettings):
    """What the stages that learn from a corpus or from conversations have in common."""

    tokens: int = Field(ge=1, description="budget of training tokens, rounded up to whole steps")
    length: int | None = Field(default=None, ge=16, description="tokens in a row; divides data.length, the default")
    batch: int = Field(default=64, ge=1, description="batch: rows a step, over all devices")
    shares: dict[str, float] = Field(default={}, description="share of tokens by domain; default data.shares")
    schedule: ScheduleSettings = ScheduleSettings()
    guard: GuardSettings = GuardSettings()
    evaluations: int = Field(default=12, ge=0, description="evaluations during training, mostly early")
    evaluation_rows: int = Field(default=64, ge=1, description="held-out rows of each domain in an evaluation")
    loader_workers: int = Field(default=1, ge=0, description="prefetch threads; the result is the same")
    context_ranks: int = Field(
        default=1,
        ge=1,
        description="ranks that share a row, each with a part of its positions; divides the ranks there are",
    )

    @model_validator(mode="after")
    def _heads_have_whole_rows(self) -> Self:
        if self.context_ranks > 1 and getattr(self, "mtp", None):
            raise ValueError(
                "`mtp`: MTP heads look at the tokens ahead, which another rank may have; set context_ranks = 1"
            )
        return self

    @model_validator(mode="after")
    def _shares_are_a_whole(self) -> Self:
        total = sum(self.shares.values())
        if self.shares and (abs(total - 1) > ROUNDING or min(self.shares.values()) < 0):
            message = f"shares must add up to 1 and not be negative; they add up to {total:g}"
            raise ValueError(f"{message}; name every domain, one that is not named has none")
        return self

    def steps(self, length: int) -> int:
        """Return the number of steps that the budget makes."""
        return -(-self.tokens // (self.batch * length))
