"""A recipe: its base, its corpus and its stages, with every setting checked.

    name = "mine"              # names the run's folder
    base = "smollm2-135m"      # the model the stages start from; may be left out if no stage needs one
    seed = 0
    stages = ["compare"]       # in order

    [compare]                  # settings of a stage, under its name
    on = "src"

    [data]                     # the corpus that stages train on, if any; built after the base and before the stages
    [[data.source]]
    name = "mine"
    git = "~/my-project"

A stage's name is also its kind, unless its table says `kind = "…"`: so a recipe can have two stages of one kind.

Several files layer left to right, and `--set` comes last.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, field_validator
from pydantic.json_schema import models_json_schema

from etude.errors import UserError, nearest
from etude.files import digest_of
from etude.recipe.cluster import ClusterSettings
from etude.toml import Layer, Table, merge, read_layer, validated, wrong
from etude.training.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]*")
DATA = "data"  # the table of the corpus
BENCH = "bench"  # the kind of stages whose results a release carries
WITHOUT_EFFECT = ("cluster", "log")  # tables that decide nothing of the result
RESERVED = {"base", DATA, "record", "recipe", "lock", "cluster", "log"}  # names a run's folder uses itself


class LogSettings(Settings):
    """Where metrics go besides the run's own files; of no effect on what a run makes."""

    to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(description="sinks of metrics, one or more")


class Header(BaseModel, extra="forbid", strict=True):
    """The part of a recipe outside its stages."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="name of the run: letters, digits, dot, dash, underscore")
    base: str | None = Field(default=None, description="known name, folder, or hub id (owner/name@revision)")
    seed: int = Field(default=0, ge=0, description="random seed of all stages")
    stages: list[str] = Field(default=[], description="stages to run, in order")
    cluster: ClusterSettings | None = Field(default=None, description="places on a cluster, for `etude run --cluster`")
    log: LogSettings | None = Field(default=None, description="sinks that a run's metrics are sent to")

    @field_validator("stages")
    @classmethod
    def _stage_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not STAGE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a stage: use lower-case letters, digits, dash and underscore")
            if name in RESERVED:
                raise ValueError(f"{name!r} cannot name a stage: the run's folder uses that name itself")
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
    cluster: ClusterSettings | None = None
    log: LogSettings | None = None

    def resolved(self) -> dict[str, Any]:
        head: dict[str, Any] = {"name": self.name, "seed": self.seed, "stages": [stage.name for stage in self.stages]}
        if self.base is not None:
            head["base"] = self.base
        head |= {name: table.model_dump() for name in WITHOUT_EFFECT if (table := getattr(self, name)) is not None}
        corpus = {DATA: self.data.settings.model_dump()} if self.data else {}
        stages = {stage.name: {"kind": stage.kind, **stage.settings.model_dump()} for stage in self.stages}
        return head | corpus | stages

    @property
    def hash(self) -> str:
        """Return the digest of what decides the result: where it is computed, and who watches, does not."""
        return digest_of({key: value for key, value in self.resolved().items() if key not in WITHOUT_EFFECT})


def recipe_schema(kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the JSON schema of a recipe: a table for every kind of stage, and for other names those that say their `kind`."""
    models: list[type[BaseModel]] = [Header, *kinds.values()]
    _, listed = models_json_schema([(model, "validation") for model in models], title="Etude recipe")
    tables: dict[str, Any] = listed["$defs"]
    head = tables.pop(Header.__name__)
    stages = {kind: {"$ref": f"#/$defs/{model.__name__}"} for kind, model in kinds.items()}
    for kind, model in kinds.items():
        if kind != DATA:
            tables[model.__name__]["properties"]["kind"] = {"const": kind, "description": "kind of the stage"}
    named = [{**table, "required": ["kind"]} for kind, table in stages.items() if kind != DATA]
    return {**listed, **head, "properties": head["properties"] | stages, "additionalProperties": {"anyOf": named}}


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
    """Write a value in TOML, whose strings, whole numbers and truth values are JSON's, but for one control character."""
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in given.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _value(key)


def load_recipe(files: Sequence[Path], changes: Sequence[str], kinds: Mapping[str, type[BaseModel]]) -> Recipe:
    """Read and check a recipe. `kinds` are the known stage kinds with the model of their settings."""
    layers = [read_layer(file) for file in files] + [parse_change(change) for change in changes]
    return check(layers, kinds)


def parse_change(change: str) -> Layer:
    """Read one `--set a.b=c`. The value is TOML; a word that is not is taken as text, so quotes are rarely needed."""
    path, equals, value = change.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise UserError(f"--set {change!r} is not of the form stage.key=value")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    table: Table = {names[-1]: parsed}
    for name in reversed(names[:-1]):
        table = {name: table}
    return Layer(f"--set {change}", table)


def check(layers: Sequence[Layer], kinds: Mapping[str, type[BaseModel]]) -> Recipe:
    merged: Table = {}
    for layer in layers:
        merged = merge(merged, layer.table)
    _refuse_stages_that_are_no_tables(merged, layers)
    head = {key: value for key, value in merged.items() if not isinstance(value, dict) or key in Header.model_fields}
    header = validated(Header, head, [], layers)
    tables = {key: value for key, value in merged.items() if key not in head}
    corpus = tables.pop(DATA, None)
    if corpus is None and not header.stages:
        raise wrong(layers, ["stages"], 'nothing to do: list stages = ["…"], or describe a corpus in [data]')
    unlisted = [name for name in tables if name not in header.stages]
    entries = tuple(_entry(name, tables.get(name, {}), layers, kinds, unlisted) for name in header.stages)
    for name in unlisted:
        advice = f"{nearest(name, header.stages)} (or add it to stages, or leave the section out)"
        raise wrong(layers, [name], f"section [{name}] is not in stages = {header.stages}{advice}")
    data = StageEntry(DATA, DATA, validated(kinds[DATA], corpus, [DATA], layers)) if corpus is not None else None
    return Recipe(header.name, header.base, header.seed, entries, data, header.cluster, header.log)


def _refuse_stages_that_are_no_tables(merged: Table, layers: Sequence[Layer]) -> None:
    """Refuse `data = 3`, `compare = 3` and `[[compare]]`, which would otherwise be called unknown keys."""
    listed = merged.get("stages")
    for name in [DATA, *(listed if isinstance(listed, list) else [])]:
        if isinstance(name, str) and not isinstance(merged.get(name, {}), dict) and name not in Header.model_fields:
            raise wrong(layers, [name], f"{name!r} is a stage: its settings stand in a table, written [{name}]")


def _entry(
    name: str, table: Table, layers: Sequence[Layer], kinds: Mapping[str, type[BaseModel]], unlisted: Sequence[str]
) -> StageEntry:
    kind = table.get("kind", name)
    known = [each for each in kinds if each != DATA]
    if kind not in known:
        place = [name, "kind"] if "kind" in table else ["stages"]
        raise wrong(layers, place, f"unknown stage {kind!r}{nearest(str(kind), [*known, *unlisted])}")
    settings = {key: value for key, value in table.items() if key != "kind"}
    return StageEntry(name, kind, validated(kinds[kind], settings, [name], layers))
