"""`etude status`, `etude bases` and `etude data report`: looking, without changing anything."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from etude.cli.options import AsJson, print_json
from etude.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from etude.models.bases import KnownBase


def status(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands: stages, progress, rate, time left, best metrics."""
    from etude.run.status import headline, run_status, status_table

    if as_json:
        print_json(asdict(run_status(run_folder)))
        return
    console = Console(highlight=False)
    now = run_status(run_folder)
    if watch and now.owner is not None:
        with Live(status_table(now), console=console, refresh_per_second=4) as live:
            while now.owner is not None:
                time.sleep(0.5)
                now = run_status(run_folder)
                live.update(status_table(now))
    else:
        console.print(status_table(now))
    console.print(headline(now), soft_wrap=True, markup=False)


def bases(
    name: Annotated[str | None, typer.Argument(help="One base, with the source of each fact.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the known bases; any Hugging Face folder or hub id works as well."""
    from etude.models.bases import known_bases

    known = known_bases()
    if name is not None and name not in known:
        raise UserError(f"unknown base {name!r}{nearest(name, known)}")
    chosen = {name: known[name]} if name is not None else known
    if as_json:
        print_json({key: base.model_dump(mode="json", exclude_none=True) for key, base in chosen.items()})
    elif name is not None:
        _print_base(name, known[name])
    else:
        Console().print(_bases_table(known))


def _bases_table(known: dict[str, KnownBase]) -> Table:
    from rich.table import Table

    from etude.bench.report import human

    caption = "tokens: of pretraining; +: on top of its parent; ?: not known. etude bases NAME shows the sources."
    table = Table(title="Known bases", caption=caption, box=None, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for column in ("name", "params", "active", "tokens", "context", "licence"):
        left = column in {"name", "licence"}
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "licence", overflow="fold")
    for key, base in known.items():
        tokens = human(base.pretraining_tokens) if base.pretraining_tokens else "?"
        sizes = (human(base.parameters), human(base.active_parameters))
        table.add_row(key, *sizes, f"{'+' if base.continues else ''}{tokens}", f"{base.context:,}", base.licence)
    return table


def _print_base(name: str, base: KnownBase) -> None:
    from etude.lineage.licences import headline_duties

    console = Console(highlight=False)
    console.print(f"{name}: {base.title}", style="bold", markup=False)
    for fact in ("licence", "parameters", "active_parameters", "context", "pretraining_tokens", "continues"):
        value = getattr(base, fact)
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) else value
            console.print(f"  {fact}: {shown}", markup=False, soft_wrap=True)
            if fact in base.sources:
                console.print(f"    from: {base.sources[fact]}", style="dim", markup=False, soft_wrap=True)
    if base.caveat:
        console.print(f"  note: {base.caveat}", markup=False, soft_wrap=True)
    duties = "; ".join(headline_duties(base.licence))
    console.print(f"  duties: {duties} (facts, not legal advice)", markup=False, soft_wrap=True)


def corpus_report(
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
