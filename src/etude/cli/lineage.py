"""`etude lineage show`, `compute` and `draw`: what a model was made from, with how much, and a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from etude.cli.options import AsJson, print_json
from etude.errors import UserError
from etude.progress import Reporter

if TYPE_CHECKING:
    from rich.table import Table

    from etude.lineage.shares import Item, Shares

app = typer.Typer(help="What a model was made from.", no_args_is_help=True)
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, its stage's, or a run's.")]
Verify = Annotated[bool, typer.Option("--verify", help="Hash the weights again and compare with the record.")]


@app.command(epilog="Example: etude lineage show runs/quickstart/base/model --verify")
def show(model: ModelFolder, verify: Verify = False, as_json: AsJson = False) -> None:
    """Print a model's family tree back to its base, from the records it carries."""
    from etude.lineage.record import load_lineage
    from etude.lineage.tree import changed_weights, find_model, render

    folder = find_model(model)
    lineage = load_lineage(folder)
    if verify:
        wrong = changed_weights(folder, lineage.records[lineage.head], Reporter())
        if wrong:
            raise UserError(f"{folder} does not agree with its record: {'; '.join(wrong)}")
    if as_json:
        print_json(lineage.model_dump(mode="json"))
        return
    typer.echo("\n".join(render(lineage, str(folder))))
    if verify:
        typer.echo("the weights agree with the record")


@app.command(epilog="Example: etude lineage compute runs/quickstart")
def compute(model: ModelFolder, as_json: AsJson = False) -> None:
    """Say whose compute is in a model: its makers' own against its base's, in three conventions, and the EU's thresholds."""
    from etude.lineage.record import load_lineage
    from etude.lineage.shares import compute_shares
    from etude.lineage.tree import find_model
    from etude.models.bases import ancestors

    found = compute_shares(load_lineage(find_model(model)), ancestors())
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    console.print(_ledger(found))
    for line in found.lines():
        console.print(line, markup=False, soft_wrap=True)


def _ledger(shares: Shares) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("stage", "whose", "tokens", "FLOP", "between", "known by", "hours"):
        table.add_column(column, justify="left" if column in {"stage", "whose", "known by"} else "right")
    for item in shares.items:
        table.add_row(item.name, "base" if item.generation else "own", *_cells(item))
    return table


def _cells(item: Item) -> tuple[str, ...]:
    if item.compute is None:
        return ("not known",)
    seconds, flops = item.compute.device_seconds, item.flops
    hours = "not known" if seconds is None else f"{seconds / 3600:,.3f}"
    return (
        f"{item.compute.tokens:,}",
        f"{flops.value:.2e}",
        f"{flops.low:.1e}–{flops.high:.1e}",
        item.compute.method,
        hours,
    )


@app.command(epilog="Example: etude lineage draw runs/quickstart tree.svg")
def draw(
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The picture to write: a name that ends in .svg or .png.")],
    title: Annotated[str | None, typer.Option(help="What to write above it; default: where the model lies.")] = None,
) -> None:
    """Draw a model's family tree."""
    from etude.files import whole_file
    from etude.lineage.drawing import draw_png, draw_svg
    from etude.lineage.record import load_lineage
    from etude.lineage.tree import find_model

    if out.suffix not in {".svg", ".png"}:
        raise UserError(f"{out}: a picture's name must end in .svg or .png")
    folder = find_model(model)
    lineage, named = load_lineage(folder), title or str(folder)
    with whole_file(out) as beside:
        if out.suffix == ".svg":
            beside.write_text(draw_svg(lineage, named), encoding="utf-8")
        else:
            draw_png(lineage, named, beside)
    typer.echo(f"drawn: {out}")
