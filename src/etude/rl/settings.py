"""What the `rl` stage can be told. Free of torch, so that a recipe is read at once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.agent.harness import HarnessSettings
from etude.agent.tools import ToolSettings
from etude.rewards.reward import RewardSettings
from etude.tasks.task import Style
from etude.training.settings import OptimiserSettings, with_own_defaults


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CorrectionSettings(_Settings):
    """What is done about tokens that the policy being trained would now sample with another probability: ratio = new / old."""

    level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="ratio of each token; product over a branch; or its geometric mean, a token"
    )
    mode: Literal["mask", "truncate", "off"] = Field(
        default="mask", description="outside the bounds: no gradient; bounded above; off: no ratio at all"
    )
    low: float = Field(default=0.125, ge=0, description="smallest ratio that is used; mask only")
    high: float = Field(default=8.0, gt=1, description="largest ratio that is used")


class KlSettings(_Settings):
    """How far the policy may go from a reference: a penalty in the reward."""

    coefficient: float = Field(default=0.0, ge=0, description="of the penalty, a nat; 0: no reference is kept")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="k1 as Composer 2; the others to compare with"
    )
    reference: Literal["start", "average"] = Field(
        default="start", description="the stage's start, or an exponential average of the policy"
    )
    decay: float = Field(default=0.99, gt=0, lt=1, description="average: what stays of it, a step")


class CurriculumSettings(_Settings):
    """Which tasks come earlier: at first all alike, later the harder ones."""

    hard: float = Field(default=1.0, ge=0, description="pull of many turns and much thinking; 0: all alike")
    solved: float = Field(
        default=0.8, ge=0, lt=1, description="how much rarer tasks become whose family is always or never solved"
    )
    begin: float = Field(
        default=0.25, ge=0, le=1, description="share of the steps after which it begins; it is full at twice that"
    )


class RlSettings(_Settings):
    """Reinforcement learning on tasks."""

    tasks: str = Field(description="a manifest of tasks, as `etude tasks make` writes it")
    only: str = Field(default="", description="only tasks whose ids begin with one of these words")
    style: Style = Field(default="terse", description="of the requests, where a task has one of this style")
    steps: int = Field(default=100, ge=1, description="updates of the weights")
    groups: int = Field(default=8, ge=1, description="groups a step")
    group_size: int = Field(default=8, ge=2, description="episodes of one task, compared with each other")
    epochs: int = Field(default=1, ge=1, description="how often a task may be used in a run")
    mode: Literal["async", "sync"] = Field(
        default="async", description="async: sample while training; sync: one after the other, the baseline"
    )
    staleness: int = Field(
        default=4, ge=0, description="versions that the oldest token of a group may be behind when it is trained on"
    )
    late: Literal["drop", "wait"] = Field(
        default="drop", description="a group too old: its task goes back; or no new group begins that might become so"
    )
    concurrency: int = Field(default=0, ge=0, description="episodes at once; 0: those of one step")
    seconds: float = Field(
        default=900.0, gt=0, description="of an episode and its scoring; then it is invalid, as a hung sandbox is"
    )

    rewards: RewardSettings = RewardSettings()
    train_summaries: bool = Field(
        default=True, description="false: no gradient on the tokens of summaries, for ablation"
    )
    kl: KlSettings = KlSettings()
    correction: CorrectionSettings = CorrectionSettings()
    curriculum: CurriculumSettings = CurriculumSettings()

    harness: HarnessSettings = HarnessSettings()
    tools: ToolSettings = ToolSettings()

    optimiser: OptimiserSettings = OptimiserSettings(lr=2e-6, weight_decay=0.0)
    warmup: int = Field(
        default=0, ge=0, description="steps in which the learning rate rises to its peak; then it is constant"
    )
    normaliser: int = Field(
        default=1024, ge=1, description="tokens the loss of an episode is divided by, whatever its length"
    )
    length: int = Field(
        default=0, ge=0, description="tokens of a training row; longer branches fail; 0: the model's context"
    )
    micro: int = Field(default=0, ge=0, description="rows at once; 0: as many as fit by estimate")
    recompute: bool = Field(
        default=False, description="compute layers again in the backward pass: slower, far less memory"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile of the layers; auto: on a GPU"
    )

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of the saved weights; auto: as the parent's"
    )
    processes: bool = Field(default=True, description="engine and trainer in processes of their own; false: all in one")
    engine: str = Field(
        default="",
        description="address of a running vLLM server that samples, such as http://127.0.0.1:8000; empty: our own engine",
    )
    engine_memory: float = Field(default=0.0, ge=0, description="GB for the engine's cache; 0: a share of what is free")
    anchor_every: int = Field(
        default=20, ge=1, description="versions between whole copies of the weights; deltas between"
    )
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints of the trainer")
    keep_traces: bool = Field(
        default=False, description="keep all traces of a finished run, not only the samples of each step"
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_own_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A table that sets one number of the optimiser leaves the others as this stage has them."""
        return with_own_defaults(cls, given, {"optimiser": "name"})

    @model_validator(mode="after")
    def _can_learn(self) -> RlSettings:
        if self.mode == "async" and self.staleness == 0:
            raise ValueError('staleness = 0 allows nothing but mode = "sync"; set that, or a staleness of 1 or more')
        if self.engine and not self.processes:
            raise ValueError(
                "engine names a running server, and processes = false keeps all in one process; leave one out"
            )
        return self

    @property
    def at_once(self) -> int:
        """Return how many episodes are played at once."""
        return self.concurrency or self.groups * self.group_size
