"""From recipe files and `--set` to a checked recipe; or one line that says what is wrong, where, and what is right.

Files layer left to right: a later one changes single keys of tables, and replaces lists and values. `--set` comes last.

Where in a TOML text a key stands, so that an error can name its line.

tomllib says what a file means, not where. This finds the line of a key by walking the table headers and assignments; for
a key inside an inline table or an array it gives the line of the assignment that holds it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from etude.errors import UserError, nearest
from etude.recipe.recipe import DATA, Header, Recipe, StageEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_BARE = r"[A-Za-z0-9_-]+"
_QUOTED = r'"(?:[^"\\]|\\.)*"|\'[^\']*\''
_KEY = rf"(?:{_BARE}|{_QUOTED})"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=(.*)")


def key_line(text: str, path: Sequence[str | int]) -> int | None:
    """Return the line (from 1) of the key at `path`, or of the closest key around it; None if there is none."""
    wanted = [str(part) for part in path]
    best: tuple[int, int] | None = None  # how much of the path is matched, line
    table: list[str] = []
    counts: dict[tuple[str, ...], int] = {}
    for number, line, in_value in _lines(text):
        if in_value:
            continue
        header = HEADER.match(line)
        assignment = ASSIGNMENT.match(line)
        if header:
            table = _header_path(header, counts)
            here = table[:-1] if table[:-1] == wanted else table  # the array itself is meant, not an entry of it
        elif assignment:
            here = table + _parts(assignment[1])
        else:
            continue
        shared = len(here) if here == wanted[: len(here)] else 0
        if shared and (best is None or shared > best[0]):
            best = (shared, number)
    return best[1] if best else None


def _header_path(header: re.Match[str], counts: dict[tuple[str, ...], int]) -> list[str]:
    """Return the path of a table header; the entries of an array of tables are counted from 0."""
    names: list[str] = []
    parts = _parts(header[2])
    for index, part in enumerate(parts):
        names.append(part)
        if header[1] == "[[" and index == len(parts) - 1:
            counts[tuple(names)] = counts.get(tuple(names), -1) + 1
        if tuple(names) in counts:
            names.append(str(counts[tuple(names)]))
    return names


def _parts(dotted: str) -> list[str]:
    return [part[1:-1] if part[0] in "\"'" else part for part in re.findall(_KEY, dotted)]


def _lines(text: str) -> list[tuple[int, str, bool]]:
    """Return (number, line, whether it is inside a value that began on an earlier line)."""
    lines = []
    depth, fence = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        lines.append((number, line, bool(depth or fence)))
        header = not (depth or fence) and HEADER.match(line)
        if not header:
            depth, fence = _open_after(line, depth, fence)
    return lines


def _open_after(line: str, depth: int, fence: str) -> tuple[int, str]:
    """Return the bracket depth and the multi-line quote still open after a line."""
    position = 0
    while position < len(line):
        rest = line[position:]
        if fence:
            end = rest.find(fence)
            if end < 0:
                return depth, fence
            position, fence = position + end + 3, ""
        elif rest.startswith(('"""', "'''")):
            fence, position = rest[:3], position + 3
        elif (quoted := re.match(_QUOTED, rest)) is not None:
            position += quoted.end()
        elif rest[0] == "#":
            return depth, fence
        else:
            depth += (rest[0] in "[{") - (rest[0] in "]}")
            position += 1
    return depth, fence


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
    """Read one recipe file."""
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
    """Return the recipe the layers make together, or raise with the place of the first mistake."""
    merged: Table = {}
    for layer in layers:
        merged = merge(merged, layer.table)
    _refuse_stages_that_are_no_tables(merged, layers)
    head = {key: value for key, value in merged.items() if not isinstance(value, dict) or key in Header.model_fields}
    header = _validated(Header, head, [], layers)
    tables = {key: value for key, value in merged.items() if key not in head}
    corpus = tables.pop(DATA, None)
    if corpus is None and not header.stages:
        raise UserError(
            f'{_where(layers, ["stages"])}nothing to do: list stages = ["…"], or describe a corpus in [data]'
        )
    for name in tables:
        if name not in header.stages:
            raise UserError(
                f"{_where(layers, [name])}section [{name}] is not in stages = {header.stages}{nearest(name, header.stages)}"
            )
    entries = tuple(_entry(name, tables.get(name, {}), layers, kinds) for name in header.stages)
    data = StageEntry(DATA, DATA, _validated(kinds[DATA], corpus, [DATA], layers)) if corpus is not None else None
    return Recipe(header.name, header.base, header.seed, entries, data)


def _refuse_stages_that_are_no_tables(merged: Table, layers: Sequence[Layer]) -> None:
    """Refuse `data = 3`, `compare = 3` and `[[compare]]`, which would otherwise be called unknown keys."""
    listed = merged.get("stages")
    for name in [DATA, *(listed if isinstance(listed, list) else [])]:
        if isinstance(name, str) and not isinstance(merged.get(name, {}), dict) and name not in Header.model_fields:
            raise UserError(
                f"{_where(layers, [name])}{name!r} is a stage: its settings stand in a table, written [{name}]"
            )


def _entry(name: str, table: Table, layers: Sequence[Layer], kinds: Mapping[str, type[BaseModel]]) -> StageEntry:
    kind = table.get("kind", name)
    known = [each for each in kinds if each != DATA]
    if kind not in known:
        where = _where(layers, [name, "kind"] if "kind" in table else ["stages"])
        raise UserError(f"{where}unknown stage {kind!r}{nearest(str(kind), known)}")
    settings = {key: value for key, value in table.items() if key != "kind"}
    return StageEntry(name, kind, _validated(kinds[kind], settings, [name], layers))


def _validated(model: type[BaseModel], table: Table, path: list[str], layers: Sequence[Layer]) -> Any:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise UserError(_explain(error.errors()[0], model, path, layers)) from None


def _explain(error: ErrorDetails, model: type[BaseModel], path: list[str], layers: Sequence[Layer]) -> str:
    place = [*path, *(str(part) for part in error["loc"])]
    name = ".".join(place)
    where = _where(layers, place)
    if error["type"] == "extra_forbidden":
        return f"{where}unknown key {name!r}{nearest(place[-1], _fields(model, error['loc'][:-1]))}"
    field = _fields(model, error["loc"][:-1]).get(place[-1])
    if error["type"] == "missing" and field:
        about = field.description or ""
        in_list = any(isinstance(part, int) for part in error["loc"])  # which --set cannot reach
        return (
            f"{where}{name!r} is missing: {about}; set it in the recipe{'' if in_list else f' or with --set {name}=…'}"
        )
    ours = error["type"] == "value_error"  # our own checks say what they were given
    given = "" if ours or isinstance(error["input"], dict) else f", not {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}{name + ': ' if name else ''}{message[0].lower() + message[1:]}{given}"


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


def _where(layers: Sequence[Layer], place: Sequence[str]) -> str:
    """Return `file:line: ` of the last layer that sets a key, or of the last file."""
    for layer in reversed(layers):
        found: Any = layer.table
        for part in place:
            if isinstance(found, list):
                found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
            else:
                found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return _title(layer, place)
    for layer in reversed(layers):
        if layer.text is not None:
            return _title(layer, place)
    return ""


def _title(layer: Layer, place: Sequence[str]) -> str:
    line = key_line(layer.text, place) if layer.text is not None else None
    return f"{layer.title}:{line}: " if line else f"{layer.title}: "
