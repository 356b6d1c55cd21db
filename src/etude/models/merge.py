"""One model made of several of the same shape: tensor by tensor from safetensors, without loading any of them.

θ₀ is a common ancestor, θᵢ are the models, wᵢ their weights, τᵢ = θᵢ − θ₀ what each has learnt since:

    linear            Σ wᵢθᵢ / Σ wᵢ                                                    arXiv 2203.05482
    slerp             (sin((1−s)Ω) θ₁ + sin(sΩ) θ₂) / sin Ω, Ω: the angle between them, for each tensor
    task_arithmetic   θ₀ + λ Σ wᵢτᵢ                                                    arXiv 2212.04089
    ties              θ₀ + λ Σ_A wᵢτ̂ᵢ / Σ_A wᵢ, for each number over those A that         arXiv 2306.01708
                      have the sign of Σ wᵢτ̂ᵢ there; τ̂ᵢ: the largest of τᵢ, else 0

All is computed in float32 and written in the dtype of the first model. Memory holds one tensor of each model. TIES keeps the
largest numbers of the whole model, as its authors do, not of each tensor: what hardly changed is trimmed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.errors import UserError, one_line
from etude.files import whole_file
from etude.lineage.weight_files import read_header
from etude.models.load import load_tokeniser, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

NEARLY_PARALLEL = 0.9995  # cosine from which sin Ω is too small to divide by, and a straight line is as good
PIECE = 1 << 22  # numbers worked on at a time
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NO_MATTER = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "architectures",
             "bos_token_id", "eos_token_id", "pad_token_id"}  # fmt: skip


def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean."""
    return _weighted_sum(tensors, weights) / sum(weights)


def slerp(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Return what lies `share` of the way along the arc from one tensor to the other, each taken as one vector."""
    import torch

    cosine = torch.nn.functional.cosine_similarity(first.flatten().double(), second.flatten().double(), dim=0)
    if cosine.abs() >= NEARLY_PARALLEL:
        return torch.lerp(first, second, share)
    angle = torch.arccos(cosine)
    parts = torch.sin(torch.stack([(1 - share) * angle, share * angle])) / torch.sin(angle)
    return first * parts[0].item() + second * parts[1].item()


def task_arithmetic(
    ancestor: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[float], scale: float
) -> torch.Tensor:
    """Return the ancestor with what each model learnt added to it."""
    return ancestor + scale * _weighted_sum([tensor - ancestor for tensor in tensors], weights)


def ties(
    ancestor: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[float], scale: float, least: Sequence[float]
) -> torch.Tensor:  # fmt: skip
    """Return the ancestor with the mean of those changes that are large (`least` and above, for each) and agree in sign."""
    import torch

    learnt = [tensor - ancestor for tensor in tensors]
    trimmed = [each * (each.abs() >= limit) for each, limit in zip(learnt, least, strict=True)]
    elected = _weighted_sum(trimmed, weights).sign()
    agreeing = [(each.sign() == elected) & (elected != 0) for each in trimmed]
    total = _weighted_sum([each * agrees for each, agrees in zip(trimmed, agreeing, strict=True)], weights)
    voices = _weighted_sum([agrees.float() for agrees in agreeing], weights)
    return ancestor + scale * torch.where(voices > 0, total / voices, 0.0)


def _weighted_sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total += tensor * weight
    return total


class Tensors:
    """The tensors of a model's folder, one at a time."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder, self.files = folder, weight_files(folder)
        self.entries = {name: entry for file in self.files for name, entry in read_header(file).tensors.items()}
        opened: list[Any] = [safe_open(file, framework="pt") for file in self.files]
        self._where = {name: tensors for tensors in opened for name in tensors.keys()}  # noqa: SIM118 - no mapping

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        return self._where[name].get_tensor(name).float()


def trim_threshold(model: Tensors, ancestor: Tensors, density: float) -> float:
    """Return the least magnitude that is among the largest `density` of all that a model learnt.

    Exact, though it never holds more than one tensor: of a positive float32, the bits read as an integer keep the order, so
    the first pass counts by the upper 16 bits, and the second by the lower ones of those that share the upper ones.
    """
    import torch

    def counts(upper: int | None) -> torch.Tensor:
        bins = torch.zeros(1 << 16, dtype=torch.int64)
        for name in ancestor.entries:
            both = (each.read(name).flatten().split(PIECE) for each in (model, ancestor))
            for one, other in zip(*both, strict=True):
                bits = (one - other).abs().view(torch.int32)
                part = bits >> 16 if upper is None else bits[bits >> 16 == upper] & 0xFFFF
                bins += torch.bincount(part, minlength=1 << 16)
        return bins

    def place(bins: torch.Tensor, wanted: int) -> tuple[int, int]:
        """Return the bin of the `wanted`-th largest, and how many of that bin are still wanted."""
        from_top = bins.flip(0).cumsum(0)
        index = int(torch.searchsorted(from_top, wanted))
        return len(bins) - 1 - index, wanted - (int(from_top[index - 1]) if index else 0)

    coarse = counts(None)
    upper, rest = place(coarse, max(1, round(density * int(coarse.sum()))))
    lower, _ = place(counts(upper), rest)
    return float(torch.tensor((upper << 16) | lower, dtype=torch.int32).view(torch.float32))


def merging(settings: MergeSettings, opened: Sequence[Tensors]) -> Callable[[str], torch.Tensor]:
    """Return what makes the merged tensor of a name; `opened` are the models to merge and, if there is one, their ancestor."""
    import torch

    count = 1 + len(settings.others)
    weights = settings.weights or [1.0] * count
    scale = 1.0 if settings.scale is None else settings.scale
    trimmed = opened[:count] if settings.method == "ties" else []
    least = [trim_threshold(each, opened[-1], settings.density or 0.2) for each in trimmed]

    def combined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if settings.method == "linear":
            return linear(parts, weights)
        if settings.method == "task_arithmetic":
            return task_arithmetic(parts[-1], parts[:count], weights, scale)
        return ties(parts[-1], parts[:count], weights, scale, least)

    def merged(name: str) -> torch.Tensor:
        values = [each.read(name) for each in opened]
        if settings.method == "slerp":  # the only one that must see a tensor as a whole
            return slerp(values[0], values[1], 0.5 if settings.share is None else settings.share)
        pieces = zip(*(value.flatten().split(PIECE) for value in values), strict=True)
        return torch.cat([combined(piece) for piece in pieces]).view(values[0].shape)

    return merged


def write_merged(file: Path, target: Path, merged: Callable[[str], torch.Tensor]) -> None:
    """Write a file like `file`, with the same header byte for byte, whose tensors are what `merged` returns by name."""
    import torch

    header = read_header(file)
    with whole_file(target) as beside, beside.open("wb") as stream:
        stream.write(header.start)
        for name, entry in header.tensors.items():
            stored = merged(name).to(getattr(torch, FLOATS[entry.dtype])).contiguous()
            if not torch.isfinite(stored).all():
                what = f"merged {name} has numbers that {entry.dtype} cannot hold, or one of the models has"
                raise UserError(f"{what}; lower `scale`, or check their weights")
            stream.write(stored.flatten().view(torch.uint8).numpy().data)


def refuse_unlike(first: Tensors, other: Tensors) -> None:
    """Refuse two models whose numbers do not mean the same: other tensors, other computation, or other tokens."""
    pair = f"{first.folder} and {other.folder} cannot be merged"
    if lacking := sorted(set(first.entries) ^ set(other.entries)):
        owner = first if lacking[0] in first.entries else other
        raise UserError(f"{pair}: only {owner.folder} has the tensor {lacking[0]} ({len(lacking)} such)")
    for name, entry in first.entries.items():
        two = other.entries[name]
        if entry.shape != two.shape:
            raise UserError(f"{pair}: {name} has the shapes {list(entry.shape)} and {list(two.shape)}")
        if quantised := {entry.dtype, two.dtype} - set(FLOATS):
            raise UserError(f"{pair}: {name} is stored as {min(quantised)}; convert it to bf16, f16 or float32 first")
    configs = [_config(folder) for folder in (first.folder, other.folder)]
    for key in sorted(configs[0].keys() | configs[1].keys()):
        values = [config.get(key) for config in configs]
        if values[0] != values[1]:
            raise UserError(f"{pair}: their configs differ in {key}: {values[0]!r} and {values[1]!r}")
    if load_tokeniser(first.folder).get_vocab() != load_tokeniser(other.folder).get_vocab():
        raise UserError(f"{pair}: their tokenisers number the tokens differently")


def _config(folder: Path) -> dict[str, Any]:
    """Return what a model's config says of its computation, with every default filled in."""
    from transformers import AutoConfig

    try:
        said = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    except Exception as error:  # noqa: BLE001 - a damaged config makes transformers raise almost anything
        raise UserError(f"{folder}/config.json cannot be read: {one_line(error)}") from None
    return {key: value for key, value in said.items() if key not in NO_MATTER}


MEANT_FOR = {  # which methods each of these has an effect on
    "ancestor": ("task_arithmetic", "ties"), "scale": ("task_arithmetic", "ties"), "density": ("ties",), "share": ("slerp",),
}  # fmt: skip


class MergeSettings(BaseModel):
    """Merging."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    method: Literal["linear", "slerp", "task_arithmetic", "ties"] = Field(description="method of merging")
    others: list[str] = Field(default=[], description="models to merge with the one before this stage")
    weights: list[float] = Field(default=[], description="weight of each model, the preceding one first; default 1")
    ancestor: str | None = Field(default=None, description="common ancestor, whose weights are subtracted")
    scale: float | None = Field(default=None, description="factor of the task vectors; default 1")
    density: float | None = Field(default=None, gt=0, le=1, description="share kept of each task vector; default 0.2")
    share: float | None = Field(default=None, ge=0, le=1, description="interpolation towards the other; default 0.5")

    @property
    def words(self) -> list[str]:
        """The models besides the one before the stage, the ancestor last."""
        return [*self.others, *([self.ancestor] if self.ancestor is not None else [])]

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> MergeSettings:
        for name, methods in MEANT_FOR.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(f"`{name}` has no effect with {self.method}, only to {' and '.join(methods)}")
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
