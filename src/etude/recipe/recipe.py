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

Files layer left to right: a later one changes single keys of tables, and replaces lists and values. `--set` comes last.
Errors name the file and the line of the key at fault, which tomllib does not tell: see `key_line`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator

from etude.errors import UserError, nearest
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
STAGE_NAME = re.compile(r"[a-z][a-z0-9_-]*")
DATA = "data"  # the table of the corpus
RESERVED = {"base", DATA, "record", "recipe", "lock"}  # names a run's folder uses itself


class Header(BaseModel, extra="forbid", strict=True):
    """The part of a recipe outside its stages."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="name of the run: letters, digits, dot, dash, underscore")
    base: str | None = Field(default=None, description="known name, folder, or hub id (owner/name@revision)")
    seed: int = Field(default=0, ge=0, description="random seed of all stages")
    stages: list[str] = Field(default=[], description="stages to run, in order")

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

    def resolved(self) -> dict[str, Any]:
        head: dict[str, Any] = {"name": self.name, "seed": self.seed, "stages": [stage.name for stage in self.stages]}
        if self.base is not None:
            head["base"] = self.base
        corpus = {DATA: self.data.settings.model_dump()} if self.data else {}
        stages = {stage.name: {"kind": stage.kind, **stage.settings.model_dump()} for stage in self.stages}
        return head | corpus | stages

    @property
    def hash(self) -> str:
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


Table = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One source of settings, and its text for naming lines."""

    title: str
    table: Table
    text: str | None = None  # None for --set


def load_recipe(files: Sequence[Path], changes: Sequence[str], kinds: Mapping[str, type[BaseModel]]) -> Recipe:
    """Read and check a recipe. `kinds` are the known stage kinds with the model of their settings."""
    layers = [read_layer(file) for file in files] + [parse_change(change) for change in changes]
    return check(layers, kinds)


def read_layer(file: Path) -> Layer:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"recipe {str(file)!r} does not exist (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"recipe {str(file)!r} is a folder; give a TOML file") from None
    except UnicodeDecodeError:
        raise UserError(f"recipe {str(file)!r} is not UTF-8 text; give a TOML file") from None
    try:
        return Layer(str(file), tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None


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


def merge(lower: Table, upper: Table) -> Table:
    """Return the settings of `lower` with those of `upper` on top, table by table."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def check(layers: Sequence[Layer], kinds: Mapping[str, type[BaseModel]]) -> Recipe:
    merged: Table = {}
    for layer in layers:
        merged = merge(merged, layer.table)
    _refuse_stages_that_are_no_tables(merged, layers)
    head = {key: value for key, value in merged.items() if not isinstance(value, dict) or key in Header.model_fields}
    header = _validated(Header, head, [], layers)
    tables = {key: value for key, value in merged.items() if key not in head}
    corpus = tables.pop(DATA, None)
    if corpus is None and not header.stages:
        raise _wrong(layers, ["stages"], 'nothing to do: list stages = ["…"], or describe a corpus in [data]')
    for name in (name for name in tables if name not in header.stages):
        unlisted = f"section [{name}] is not in stages = {header.stages}{nearest(name, header.stages)}"
        raise _wrong(layers, [name], unlisted)
    entries = tuple(_entry(name, tables.get(name, {}), layers, kinds) for name in header.stages)
    data = StageEntry(DATA, DATA, _validated(kinds[DATA], corpus, [DATA], layers)) if corpus is not None else None
    return Recipe(header.name, header.base, header.seed, entries, data)


def _refuse_stages_that_are_no_tables(merged: Table, layers: Sequence[Layer]) -> None:
    """Refuse `data = 3`, `compare = 3` and `[[compare]]`, which would otherwise be called unknown keys."""
    listed = merged.get("stages")
    for name in [DATA, *(listed if isinstance(listed, list) else [])]:
        if isinstance(name, str) and not isinstance(merged.get(name, {}), dict) and name not in Header.model_fields:
            raise _wrong(layers, [name], f"{name!r} is a stage: its settings stand in a table, written [{name}]")


def _entry(name: str, table: Table, layers: Sequence[Layer], kinds: Mapping[str, type[BaseModel]]) -> StageEntry:
    kind = table.get("kind", name)
    known = [each for each in kinds if each != DATA]
    if kind not in known:
        place = [name, "kind"] if "kind" in table else ["stages"]
        raise _wrong(layers, place, f"unknown stage {kind!r}{nearest(str(kind), known)}")
    settings = {key: value for key, value in table.items() if key != "kind"}
    return StageEntry(name, kind, _validated(kinds[kind], settings, [name], layers))


def _validated(model: type[BaseModel], table: Table, path: list[str], layers: Sequence[Layer]) -> Any:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        place = [*path, *(str(part) for part in first["loc"])]
        raise _wrong(layers, place, _explain(first, ".".join(place), model)) from None


def _explain(error: ErrorDetails, name: str, model: type[BaseModel]) -> str:
    """Return what pydantic has against a setting, with what would be right."""
    *around, key = error["loc"] or [""]
    fields = _fields(model, around)
    if error["type"] == "extra_forbidden":
        return f"unknown key {name!r}{nearest(str(key), fields)}"
    if error["type"] == "missing" and key in fields:
        in_list = any(isinstance(part, int) for part in around)  # which --set cannot reach
        how = "set it in the recipe" + ("" if in_list else f" or with --set {name}=…")
        return f"{name!r} is missing: {fields[str(key)].description or ''}; {how}"
    ours = error["type"] == "value_error"  # our own checks say what they were given
    given = "" if ours or isinstance(error["input"], dict) else f", not {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name + ': ' if name else ''}{message[0].lower() + message[1:]}{given}"


def _fields(model: type[BaseModel], place: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the fields of the table at a place inside a model: through lists, optional tables and tables in tables."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models(model.model_fields[part].annotation), model)
    return model.model_fields


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _wrong(layers: Sequence[Layer], place: Sequence[str], message: str) -> UserError:
    """Return an error with `file:line: ` of the last layer that sets a key, or of the last file."""
    setting = [layer for layer in layers if _depth(layer.table, place) == len(place)]
    for layer in reversed(setting or [layer for layer in layers if layer.text is not None]):
        line = key_line(layer.text, place) if layer.text is not None else None
        return UserError(f"{layer.title}{f':{line}' if line else ''}: {message}")
    return UserError(message)


def key_line(text: str, path: Sequence[str]) -> int | None:
    """Return the line (from 1) of the assignment or header that sets a key, or else the closest key around it.

    The text is parsed one line longer each time. A key is set by the lines between the last part that parses without it
    and the first that parses with it; inside a value of several lines nothing parses. This takes milliseconds, and only
    where there is an error to tell.
    """
    lines, first = text.split("\n"), 1
    deepest: tuple[int, int | None] = (0, None)
    for last in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("\n".join(lines[:last]))
        except tomllib.TOMLDecodeError:
            continue
        if (depth := _depth(table, path)) > deepest[0]:
            deepest = (depth, first)
        first = last + 1
    return deepest[1]


def _depth(table: Any, path: Sequence[str]) -> int:
    """Return how many parts of a path exist in a table; the entries of a list are counted from 0."""
    for depth, part in enumerate(path):
        if isinstance(table, list):
            table = {str(index): entry for index, entry in enumerate(table)}
        if not isinstance(table, dict) or part not in table:
            return depth
        table = table[part]
    return len(path)
