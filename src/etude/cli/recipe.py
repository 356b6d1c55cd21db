"""`etude init`, which writes a first recipe for a repository, and `etude schema`, by which editors check and complete recipes."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude.cli import options
from etude.errors import UserError
from etude.rooted import Rooted

LATER = "# What follows needs tasks"  # how the part of the template begins that cannot run before there are tasks
TASKS = """# Tasks from your repository: broken trees, terse requests, hidden tests. etude tasks make {file}
name = "{name}"
mutation = 8                   # wanted of every package; docs/tasks.md lists all settings
deletion = 4

[[package]]
git = "{repository}"
licence = "{licence}"
"""


def schema(
    of: Annotated[Literal["recipe", "tasks"], typer.Argument(help="recipe (etude run) or tasks (etude tasks make).")] = "recipe",
) -> None:  # fmt: skip
    """Print the JSON schema of a recipe, for editors: of TOML files, Taplo and Even Better TOML read it."""
    from etude.recipe.recipe import recipe_schema
    from etude.run.runner import stage_settings
    from etude.tasks.make import SetSettings

    options.print_json(recipe_schema(stage_settings()) if of == "recipe" else SetSettings.model_json_schema())


def init(
    repository: Annotated[Path, typer.Argument(help="Your repository: a git checkout of a Python package with tests.")],
    out: Annotated[Path, typer.Option(help="Recipe to write; that of its tasks is written beside it.")] = Path("mine.toml"),
    licence: Annotated[str, typer.Option(help="Its licence (SPDX); default: as pyproject.toml says, else proprietary.")] = "",
) -> None:  # fmt: skip
    """Write a commented recipe for a repository, to run as it is and to change."""
    folder, tasks = repository.expanduser().resolve(), out.with_name(f"{out.stem}-tasks.toml")
    if not (folder / ".git").exists():
        raise UserError(f"{str(repository)!r} is not the top of a git checkout; name one, or run `git init` and commit")
    if set('"\\') & set(str(folder)) or not str(folder).isprintable():
        raise UserError(f"{str(folder)!r} cannot be written in a recipe; rename it")
    for file in (out, tasks):
        if os.path.lexists(file):
            raise UserError(f"{file} exists already; choose another name with --out, or move it away")
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "mine"
    known = {
        "NAME": name,
        "REPOSITORY": str(folder),
        "LICENCE": licence or _stated(folder),
        "TASKS": str(tasks.with_suffix("")),
    }
    text = recipe_for(known)
    first, later = text[: text.index(LATER)], text[text.index(LATER) :]
    commented = re.sub(r"^(?=[^#\n])", "# ", later, flags=re.MULTILINE)
    runnable = first.replace(_stages(first), 'stages = ["cpt"]')
    out.write_text(runnable + commented, encoding="utf-8")
    filled = {"file": tasks, "name": f"{name}-tasks", "repository": folder, "licence": known["LICENCE"]}
    tasks.write_text(TASKS.format(**filled), encoding="utf-8")
    options.echo(f"{out} and {tasks} are written. Next:\n  etude run {out} --dry-run\n  etude run {out}\n  etude tasks make {tasks}\n"
               f"then uncomment the rest of {out}, with {_stages(first)}")  # fmt: skip


def recipe_for(words: dict[str, str]) -> str:
    """Return the template, filled in."""
    text = resources.files("etude.recipe").joinpath("mine.toml").read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _stages(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("stages = "))


def _stated(folder: Path) -> str:
    """Return the licence that a package's metadata state as an SPDX expression."""
    from etude.data.filters.licence import canonical

    try:
        with Rooted(folder) as rooted:
            stated = tomllib.loads(rooted.read("pyproject.toml", 1 << 20).decode())["project"]["license"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "proprietary"
    return (canonical(stated) if isinstance(stated, str) else None) or "proprietary"
