"""What a recipe says, checked.

    name = "mine"              # names the run's folder
    base = "smollm2-135m"      # the model the stages start from; may be left out if no stage needs one
    seed = 0
    stages = ["compare"]       # in order

    [compare]                  # the settings of a stage stand under its name
    on = "src"

    [data]                     # the corpus the stages learn from, if any; made after the base and before the stages
    [[data.source]]
    name = "mine"
    git = "~/my-project"

A stage's name is also its kind, unless its table says `kind = "…"`: so a recipe can have two stages of one kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]*")
DATA = "data"  # the table of the corpus
RESERVED = {"base", DATA, "record", "recipe", "lock"}  # names a run's folder uses itself


class Header(BaseModel):
    """The part of a recipe outside its stages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^\w[\w.-]*$", description="names the run; letters, digits, dot, dash and underscore")
    base: str | None = Field(default=None, description="known name, folder, or hub id (owner/name@revision)")
    seed: int = Field(default=0, ge=0, description="where all random choices start")
    stages: list[str] = Field(default=[], description="the stages to run, in order")

    @field_validator("stages")
    @classmethod
    def _stage_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not STAGE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a stage: use lower-case letters, digits, dash and underscore")
            if name in RESERVED:
                raise ValueError(f"{name!r} cannot name a stage: a run's folder uses that name itself")
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is listed twice; give each stage its own name and set its `kind`")
        return names


@dataclass(frozen=True)
class StageEntry:
    """One stage of a recipe."""

    name: str
    kind: str
    settings: BaseModel


@dataclass(frozen=True)
class Recipe:
    """A whole recipe, checked and with all defaults filled in."""

    name: str
    base: str | None
    seed: int
    stages: tuple[StageEntry, ...]
    data: StageEntry | None = None

    def resolved(self) -> dict[str, Any]:
        """Return the recipe with every setting written out."""
        head: dict[str, Any] = {"name": self.name, "seed": self.seed, "stages": [stage.name for stage in self.stages]}
        if self.base is not None:
            head["base"] = self.base
        corpus = {DATA: self.data.settings.model_dump()} if self.data else {}
        stages = {stage.name: {"kind": stage.kind, **stage.settings.model_dump()} for stage in self.stages}
        return head | corpus | stages

    @property
    def hash(self) -> str:
        """The digest of the resolved recipe."""
        return digest_of(self.resolved())


def as_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML, to read or to run again."""
    resolved = recipe.resolved()
    tables = [name for name, value in resolved.items() if isinstance(value, dict)]
    lines = [f"{name} = {_value(value)}" for name, value in resolved.items() if name not in tables]
    for name in tables:
        settings = {key: value for key, value in resolved[name].items() if value is not None}
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return _list(value)
    assert isinstance(value, dict), value
    return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None) + " }"


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _string(key)


def _string(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


def _list(values: Sequence[Any]) -> str:
    return "[" + ", ".join(_value(value) for value in values) + "]"
