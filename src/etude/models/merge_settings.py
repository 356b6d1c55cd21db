"""What can be said of a merge. Apart from merge.py, which needs torch, so that recipes are read at once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MEANT_FOR = {  # which methods each of these has an effect on
    "ancestor": ("task_arithmetic", "ties"), "scale": ("task_arithmetic", "ties"), "density": ("ties",), "share": ("slerp",),
}  # fmt: skip


class MergeSettings(BaseModel):
    """Merging."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    method: Literal["linear", "slerp", "task_arithmetic", "ties"] = Field(description="how tensors are combined")
    others: list[str] = Field(default=[], description="models to merge with the one before this stage")
    weights: list[float] = Field(default=[], description="of each model, the one before this stage first; default 1")
    ancestor: str | None = Field(default=None, description="the model that the others were made of")
    scale: float | None = Field(default=None, description="what the models learnt is multiplied by; default 1")
    density: float | None = Field(default=None, gt=0, le=1, description="share that is kept of it; default 0.2")
    share: float | None = Field(default=None, ge=0, le=1, description="how far to go to the other; default 0.5")

    @property
    def words(self) -> list[str]:
        """The models besides the one before the stage, the ancestor last."""
        return [*self.others, *([self.ancestor] if self.ancestor is not None else [])]

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> MergeSettings:
        for name, methods in MEANT_FOR.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(f"`{name}` means nothing to {self.method}, only to {' and '.join(methods)}")
        if self.method in MEANT_FOR["ancestor"] and self.ancestor is None:
            raise ValueError(f"{self.method} needs `ancestor`, the model that those to merge were made of")
        if self.method == "slerp" and (len(self.others) != 1 or self.weights):
            raise ValueError("slerp goes from one model to another: give one in `others`, and `share` for `weights`")
        if self.method == "linear" and not self.others:
            raise ValueError("nothing to merge with: list models in `others`")
        if self.weights and len(self.weights) != 1 + len(self.others):
            raise ValueError(f"`weights` has {len(self.weights)} numbers for {1 + len(self.others)} models")
        if self.method != "task_arithmetic" and any(weight <= 0 for weight in self.weights):
            raise ValueError(f"weights of {self.method} must be above 0; only task_arithmetic can take away")
        return self
