"""`etude data build` and `etude data report`: the corpus of a recipe, by itself."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import Annotated

import typer
from rich.console import Console

from etude.cli.options import AsJson, CacheFolder, Changes, DryRun, OutFolder, RecipeFiles, print_json
from etude.cli.run import run_recipe
from etude.errors import UserError


def build(
    recipes: RecipeFiles,
    change: Changes = None,
    out: OutFolder = None,
    dry_run: DryRun = False,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Build the corpus of a recipe, and nothing after it. What is finished is kept."""
    from etude.recipe.load import load_recipe
    from etude.run.runner import stage_settings

    recipe = load_recipe(recipes, change or [], stage_settings())
    if recipe.data is None:
        raise UserError(f"{recipes[-1]} describes no corpus; give it [data] with at least one [[data.source]]")
    run_recipe(recipe, out, cache, until="data", dry_run=dry_run, as_json=as_json)


def report(
    corpus: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a corpus inside one.")],
    out: Annotated[Path | None, typer.Option(help="Write the page (HTML, Markdown, PNG) into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a corpus, where it is from and what was left out; the whole page lies in the corpus as report.html."""
    from etude.data.manifest import MANIFEST, load_manifest
    from etude.data.report import show_report, write_report

    folder = corpus if (corpus / MANIFEST).exists() else corpus / "data"
    manifest = load_manifest(folder if (folder / MANIFEST).exists() else corpus)
    if as_json:
        print_json(manifest.model_dump(mode="json") | {"digest": manifest.digest})
        return
    if out is not None:
        write_report(folder, out)
    show_report(folder, Console(), out or folder)
