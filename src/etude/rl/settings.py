"""The settings of the `rl` stage. Free of torch, so that a recipe is read at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.agent.harness import HarnessSettings
from etude.agent.tools import ToolSettings
from etude.errors import UserError, nearest
from etude.questions.settings import QuestionSettings, check_arena, idle_in
from etude.rewards.reward import RewardSettings
from etude.rl.algorithm import ALGORITHMS
from etude.sandbox.images import WHERE, Backend
from etude.tasks.task import Style  # noqa: TC001 - pydantic reads it
from etude.training.settings import LoraSettings, OptimiserSettings, Settings, TrainerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

CHOICES = ("correction", "normaliser", "window", "tau")  # what some algorithms use and others do not
Bound = Annotated[float, Field(ge=0)]


class CorrectionSettings(Settings):
    """What is done about tokens that the policy would now sample with another probability: ratio = new / old."""

    level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="level of the importance ratio: token, sequence, or its geometric mean"
    )
    mode: Literal["mask", "truncate", "off"] = Field(
        default="mask", description="beyond the bounds: mask the token, truncate the ratio, or off"
    )
    low: float = Field(default=0.125, ge=0, description="lower bound of the ratio; mask only")
    high: float = Field(default=8.0, gt=1, description="upper bound of the ratio")


class KlSettings(Settings):
    """How far the policy may go from a reference: a penalty in the reward."""

    coefficient: float = Field(default=0.0, ge=0, description="KL penalty per nat (0 = none, and no reference model)")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k1", description="estimator of the KL; k1 as Composer 2")
    reference: Literal["start", "average"] = Field(
        default="start", description="reference model: the one at the start, or a moving average"
    )
    decay: float = Field(default=0.99, gt=0, lt=1, description="average: decay a step")


class TeacherSettings(Settings):
    """Models whose log-probs are the reward, token by token: on-policy distillation."""

    models: dict[str, str] = Field(
        default={}, description='teachers by prefix of the task\'s id, "" for all others: base, model folder or run'
    )
    bound: float = Field(default=5.0, gt=0, description="bound of the log-ratio of a token, in nats")
    outcome: float = Field(default=0.0, ge=0, description="weight of the usual advantage beside it; 0: none")

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        if not self.models:
            self.refuse_idle({"bound", "outcome"}, "no `models`")
        return self

    def prefix(self, task: str) -> str:
        """Return the prefix that decides who teaches a task: the longest that its id begins with."""
        fits = [prefix for prefix in self.models if task.startswith(prefix)]
        if not fits:
            whose = f"the id of the task {task!r} begins with none of the prefixes that have a teacher"
            raise UserError(f'rl.teacher.models: {whose}; add one for it, or "" for all others')
        return max(fits, key=len)

    def refuse_gaps(self, tasks: Iterable[str]) -> None:
        """Refuse tasks without a teacher, and teachers without a task: they would take memory for nothing."""
        if unused := sorted(self.models.keys() - {self.prefix(task) for task in tasks}):
            raise UserError(f"rl.teacher.models: no task is left for {unused[0]!r}; leave that teacher out")


class CurriculumSettings(Settings):
    """Which tasks come earlier: at first all alike, later the harder ones."""

    hard: float = Field(default=1.0, ge=0, description="preference for long tasks (turns, thinking); 0: none")
    solved: float = Field(default=0.8, ge=0, lt=1, description="how much rarer families always or never solved become")
    begin: float = Field(default=0.25, ge=0, le=1, description="share of the steps before it; in full at twice that")


class RlSettings(TrainerSettings):
    """Reinforcement learning on tasks."""

    arena: str = Field(default="code", description="arena of the episodes: code, questions, or python:module.Class")
    tasks: str = Field(description="task manifest, as `etude tasks make` writes it; questions: a JSONL of them")
    only: str = Field(default="", description="prefixes of the ids of tasks to use, separated by spaces; empty: all")
    style: Style = Field(default="terse", description="style of the requests, where a task has it")
    steps: int = Field(default=100, ge=1, description="updates of the weights")
    groups: int = Field(default=8, ge=1, description="groups of rollouts a step")
    group_size: int = Field(default=8, ge=2, description="rollouts of one task in a group")
    epochs: int = Field(default=1, ge=1, description="passes over the tasks, at most")
    mode: Literal["async", "sync"] = Field(default="async", description="sync: training waits for rollouts")
    staleness: int = Field(default=4, ge=0, description="weight versions that a group's oldest token may be behind")
    late: Literal["drop", "wait"] = Field(
        default="drop", description="stale groups: drop and requeue the task; wait: start none that could become stale"
    )
    sandbox: Backend = Field(default="auto", description=WHERE)
    concurrency: int = Field(default=0, ge=0, description="concurrent rollouts (0 = those of one step)")
    seconds: float = Field(default=900.0, gt=0, description="time limit of a rollout with its scoring, in seconds")

    rewards: RewardSettings = RewardSettings()
    algorithm: str = Field(default="composer2", description=f"algorithm: {', '.join(ALGORITHMS)}")
    window: tuple[Bound, Bound] | None = Field(
        default=None, strict=False, description="grpo, gspo, icepop, kimi: clip window of the ratio; default: its own"
    )
    tau: float = Field(default=0.001, ge=0, description="kimi: coefficient of the penalty on (log ratio)²")
    train_summaries: bool = Field(default=True, description="train on the tokens of summaries")
    kl: KlSettings = KlSettings()
    teacher: TeacherSettings = TeacherSettings()
    correction: CorrectionSettings = CorrectionSettings()
    curriculum: CurriculumSettings = CurriculumSettings()

    harness: HarnessSettings = HarnessSettings()
    tools: ToolSettings = ToolSettings()
    questions: QuestionSettings = QuestionSettings()

    optimiser: OptimiserSettings = OptimiserSettings(lr=2e-6, weight_decay=0.0)
    warmup: int = Field(default=0, ge=0, description="warm-up steps of the learning rate; constant after them")
    normaliser: int = Field(default=1024, ge=1, description="tokens that the loss of every rollout is divided by")
    length: int = Field(default=0, ge=0, description="tokens of a training row; 0: the model's context")
    router_replay: bool | None = Field(
        default=None, description="train on the experts that were sampled with; default: for a mixture of experts"
    )
    lora: LoraSettings | None = Field(default=None, description="LoRA: train low-rank adapters only")
    ranks: int = Field(default=1, ge=1, description="ranks of the trainer, each on a GPU of its own")
    processes: bool = Field(default=True, description="engine and trainer in separate processes; false: all in one")
    engine: str = Field(default="", description="address of a running vLLM server that samples; empty: our own engine")
    engine_memory: float = Field(default=0.0, ge=0, description="KV cache in GB; 0: by the plan")
    anchor_every: int = Field(default=20, ge=1, description="weight versions between full copies, not deltas")
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints of the trainer, at most")
    keep_traces: bool = Field(default=False, description="keep all traces after the run")

    @field_validator("algorithm")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)}")
        return name

    @field_validator("arena")
    @classmethod
    def _is_an_arena(cls, name: str) -> str:
        return check_arena(name)

    @model_validator(mode="after")
    def _can_learn(self) -> Self:
        self.refuse_idle(idle_in(self.arena), f"the arena {self.arena!r}")
        self.refuse_idle(set(CHOICES) - ALGORITHMS[self.algorithm].uses, f"the algorithm {self.algorithm!r}")
        if self.window and self.window[0] >= self.window[1]:
            raise ValueError(f"window = {list(self.window)}: the first bound must be below the second")
        if self.teacher.models and not self.teacher.outcome and self.kl.coefficient:
            raise ValueError("kl is a part of the reward, which teacher.outcome = 0 leaves out; change one of them")
        if self.harness.top_p < 1 or self.harness.temperature == 0:
            cut = (
                "top_p below 1 draws from a part of the tokens"
                if self.harness.top_p < 1
                else "temperature 0 draws nothing"
            )
            raise ValueError(
                f"harness: {cut}, and what is learnt from must have been drawn from all; use another temperature"
            )
        if self.ranks > 1 and not self.processes:
            raise ValueError("ranks = 1 is all that one process can be; leave out `processes = false`")
        if self.mode == "async" and self.staleness == 0:
            raise ValueError('staleness = 0 allows nothing but mode = "sync"; set that, or a staleness of 1 or more')
        if self.engine and not self.engine.startswith(("http://", "https://", "unix:")):
            raise ValueError(f"engine = {self.engine!r} is no address; write one such as http://127.0.0.1:8000")
        if self.engine and not self.processes:
            both = "engine names a running server, and processes = false keeps all in one process"
            raise ValueError(f"{both}; leave one out")
        return self

    @property
    def at_once(self) -> int:
        """Concurrent rollouts."""
        return self.concurrency or self.groups * self.group_size
