"""The table `[cluster]` of a recipe: which parts of a run want how much of a cluster. Without `--cluster` it has no effect."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from etude.training.settings import Settings


class Places(Settings):
    """GPUs, or CPUs where there is none."""

    gpus: int = Field(default=0, ge=0, description="GPUs")
    cpus: int = Field(default=0, ge=0, description="CPU cores, where there is no GPU")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.gpus) == bool(self.cpus):
            raise ValueError("say how many `gpus`, or how many `cpus` where there is no GPU, and not both")
        return self

    @property
    def bundle(self) -> dict[str, float]:
        """Return what Ray is asked for."""
        return {"GPU": self.gpus, "CPU": 1} if self.gpus else {"CPU": self.cpus}


class TrainerPlaces(Places):
    """The trainer: one rank a GPU, or a core."""


class EnginePlaces(Places):
    """Engines of one kind; `gpus` or `cpus` are of each."""

    count: int = Field(default=1, ge=1, description="engines")
    kind: Literal["etude", "vllm"] = Field(default="etude", description="engine: etude (our own) or vllm")
    python: str = Field(default="", description="vllm: the Python of its environment, on every node")

    @model_validator(mode="after")
    def _has_a_python(self) -> Self:
        if self.kind == "vllm" and not self.python:
            raise ValueError('kind = "vllm" needs `python`, that of the environment vLLM is in (not Etude\'s own)')
        if self.kind == "etude" and self.gpus > 1:
            raise ValueError('gpus = 1 is all that an engine of kind "etude" uses; raise `count` instead')
        self.refuse_idle({"python"} if self.kind == "etude" else set(), 'kind = "etude"')
        return self


class SandboxPlaces(Settings):
    """Sandboxes, in pools on nodes without a GPU where there are any."""

    cpus: int = Field(ge=1, description="CPU cores of all sandboxes together")
    pool: int = Field(default=16, ge=1, description="CPU cores of one pool, at most; a pool is on one node")

    @property
    def pools(self) -> list[int]:
        """Return the cores of each pool."""
        count = -(-self.cpus // self.pool)
        return [self.cpus // count + (number < self.cpus % count) for number in range(count)]


class ClusterSettings(Settings):
    """What a run takes of a cluster."""

    trainer: TrainerPlaces = Field(description="trainer: its GPUs, one rank each")
    engines: list[EnginePlaces] = Field(default=[], description="engines, a table or a list of tables; `rl` needs one")
    sandboxes: SandboxPlaces | None = Field(default=None, description="sandboxes; none: on the machine of the command")

    @field_validator("engines", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, dict) else given

    @property
    def ranks(self) -> int:
        return self.trainer.gpus or self.trainer.cpus
