"""What several commands share: options, and how JSON is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from etude.errors import UserError, nearest

if TYPE_CHECKING:
    from etude.agent.tools import ToolName, ToolSettings

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table.")]
CacheFolder = Annotated[Path | None, typer.Option("--cache", help="Folder for fetched bases; default ~/.cache/etude.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")]
_recipes = typer.Argument(metavar="RECIPE...", help="Recipe files; later ones change single settings of earlier ones.")
RecipeFiles = Annotated[list[Path], _recipes]
Changes = Annotated[list[str] | None, typer.Option("--set", help="stage.key=value; may be given several times.")]
ToolNames = Annotated[
    str,
    typer.Option(
        "--tools", help="Tools offered, with commas between; default all but bash. `bash`: as mini-swe-agent."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and what would run.")]


def print_json(value: Any) -> None:
    """Print a value on standard output, for a script."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def chosen_tools(words: str) -> ToolSettings:
    """Return the tools that were named, or the usual ones."""
    from etude.agent.tools import SPECS, ToolSettings

    names = [word.strip() for word in words.split(",")] if words else ToolSettings().tools
    for name in names:
        if name not in SPECS:
            raise UserError(f"--tools: there is no tool {name!r}{nearest(name, SPECS)}")
    return ToolSettings(tools=cast("list[ToolName]", names))


def token_in(path: Path | None) -> str:
    """Return the endpoints' token from the file that was given, if one was."""
    if path is None:
        return ""
    from etude.serve.process import read_token

    return read_token(path)
