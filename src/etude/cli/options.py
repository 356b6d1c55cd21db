"""What several commands share: options, and how JSON is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table.")]
CacheFolder = Annotated[Path | None, typer.Option("--cache", help="Folder for fetched bases; default ~/.cache/etude.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")]
_recipes = typer.Argument(metavar="RECIPE...", help="Recipe files; later ones change single settings of earlier ones.")
RecipeFiles = Annotated[list[Path], _recipes]
Changes = Annotated[list[str] | None, typer.Option("--set", help="stage.key=value; may be given several times.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and what would run.")]


def print_json(value: Any) -> None:
    """Print a value on standard output, for a script."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
