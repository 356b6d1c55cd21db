"""Settings from TOML files, checked; or one line that says what is wrong, in which file and line, and what is right.

Files layer left to right: a later one changes single keys of tables, and replaces lists and values. Errors name the line of
the key at fault, which tomllib does not tell: see `key_line`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from etude.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

Table = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One source of settings, and its text for naming lines."""

    title: str
    table: Table
    text: str | None = None  # None for --set


def read_layer(file: Path) -> Layer:
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin with a mark of the encoding
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


def merge(lower: Table, upper: Table) -> Table:
    """Return the settings of `lower` with those of `upper` on top, table by table."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def validated(model: type[BaseModel], table: Table, path: list[str], layers: Sequence[Layer]) -> Any:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # A key misspelt is also a key missing: what stands there comes before what does not.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        place = [*path, *(str(part) for part in first["loc"])]
        raise wrong(layers, place, _explain(first, ".".join(place), model)) from None


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
    if error["type"] == "model_type":
        message = "input should be a table of settings"
    elif error["type"] == "too_short":
        message, given = f"list should have at least {error['ctx']['min_length']} item", ""
    elif error["type"] == "string_pattern_mismatch" and key in fields and (wanted := fields[str(key)].description):
        message = f"input should be a {wanted}"
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


def wrong(layers: Sequence[Layer], place: Sequence[str], message: str) -> UserError:
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
