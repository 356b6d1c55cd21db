"""`etude release` and `etude verify`: a model with its whole family tree, signed; and how a stranger checks one."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from etude.cli.options import AsJson, CacheFolder, print_json
from etude.errors import UserError
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.lineage.audit.sketch import Sketch
    from etude.lineage.release_facts import Measured
    from etude.lineage.verify import Verification


def release(  # noqa: PLR0913, PLR0917 - an argument for every option
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, its stage's, or a run's.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    name: Annotated[str, typer.Option(help="What the model is called; default: as product.toml says, else as OUT.")] = "",
    product: Annotated[Path | None, typer.Option(help="product.toml, which licences are held against; goes in.")] = None,
    licence: Annotated[Path | None, typer.Option(help="Your own licence for what you added; goes in as LICENSE.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Folder of `etude bench` with trials of this model.")] = None,
    base: Annotated[list[Path] | None, typer.Option(help="Folder of a claimed base that is not in the run.")] = None,
    acknowledge: Annotated[list[str] | None, typer.Option(help="unknown-data: you know that its licence is unknown.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key (PEM, P-256); default: your own, made if needed.")] = None,
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Make a signed release folder, or say what speaks against it. Exit code 1 if it is refused."""
    from etude.lineage.gate import UNKNOWN_DATA
    from etude.lineage.product import load_product
    from etude.lineage.release import Order, RefusedError, make_release
    from etude.lineage.signing import default_key, fingerprint, public_pem
    from etude.lineage.tree import find_model
    from etude.models.bases import ancestors

    if unknown := set(acknowledge or ()) - {UNKNOWN_DATA}:
        raise UserError(f"--acknowledge {min(unknown)}: only {UNKNOWN_DATA} can be acknowledged")
    measured = _measured(evaluation, find_model(model)) if evaluation else ()
    called = name or (load_product(product).model_name if product else None) or out.absolute().name
    order = Order(called, key or default_key(), product, licence, measured, base or (), acknowledge or ())
    try:
        make_release(model, out, order, _library(cache), ancestors(), Reporter())
    except RefusedError as refused:
        for refusal in refused.refusals:
            typer.echo(f"refused ({refusal.reason}): {refusal}", err=True)
        typer.echo(f"{out} was not made: {len(refused.refusals)} reason(s)", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{order.name} is released in {out}, signed with key {fingerprint(public_pem(order.key))}")
    typer.echo(f"publish the key's fingerprint where buyers trust it; they run: etude verify {out}")


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `etude release` made.")],
    key: Annotated[Path | None, typer.Option(help="The owner's public key, from a source you trust.")] = None,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Check a release offline: signature, files, records, licences, card, base. Exit code 1 if anything is wrong."""
    from etude.lineage import verify as verifying

    found = verifying.verify_release(folder, key, _library(cache), Reporter())
    if as_json:
        print_json(verifying.as_json(found))
    else:
        _show(found)
    raise typer.Exit(1 if found.failed else 0)


def _library(cache: Path | None) -> list[Sketch]:
    from etude.cli.audit import sketch_folder
    from etude.lineage.audit.library import known_sketches

    return known_sketches(sketch_folder(cache))


def _show(found: Verification) -> None:
    console = Console(highlight=False, soft_wrap=True)
    styles = {"ok": "green", "failed": "bold red", "open": "yellow"}
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        for line in check.lines:
            console.print(f"[{styles[check.outcome]}]{check.outcome:6}[/]  {check.name:{width}}  ", end="")
            console.print(line, markup=False)
    failed, left = len(found.failed), sum(check.outcome == "open" for check in found.checks)
    rest = f"; {left} could not be made here" if left else ""
    verdict = f"NOT verified: {failed} of {len(found.checks)} checks failed" if failed else f"verified: {found.folder}"
    console.print(f"{verdict}{rest}", markup=False, style="bold")


def _measured(folder: Path, model: Path) -> Sequence[Measured]:
    """Return the scores of this model, and of no other, from a benchmark's folder; a stage calls it by the stage that made it."""
    from etude.bench.agent.entrants import weights_mark
    from etude.bench.agent.report import Scored
    from etude.bench.agent.results import read_results
    from etude.lineage.record import load_lineage
    from etude.lineage.release_facts import Measured
    from etude.run.folder import readable_record

    results = read_results(folder)
    scored = Scored(results, 0)
    stage, lineage = readable_record(folder), load_lineage(model)
    digest = lineage.records[lineage.head].model_digest
    stages = [each.name for each in stage.parents if each.model_digest == digest] if stage else []
    mine = [name for name in scored.valid if name.endswith(f"@{weights_mark(model)}") or name in stages]
    found = [(name, scored.scores[name]) for name in mine]
    if not any(score for _, score in found):
        raise UserError(
            f"{folder} has no valid trial of {model}, only of {', '.join(results.models)}; measure this model first"
        )
    rules = f"harness {results.header.harness}, task set {results.header.tasks[:12]}"
    return [
        Measured(f"etude bench {folder.absolute().name}", f"avg@{results.attempts}", score.value, (score.low, score.high),
                 f"{score.tasks} tasks, {rules}")
        for _, score in found if score
    ]  # fmt: skip
