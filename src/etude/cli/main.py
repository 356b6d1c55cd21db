"""The command `etude`: parses words, calls the layers below, prints results.

Nothing here imports torch: `etude --help` must answer at once. Results go to standard output, news to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live

import etude
from etude.errors import Interrupted, UserError, nearest, storage_error
from etude.progress import Reporter

if TYPE_CHECKING:
    from rich.table import Table

    from etude.recipe.recipe import Recipe
    from etude.run.runner import Runner, Step

app = typer.Typer(
    help="From an open base model to your own coding agent: one recipe, all measured, the family tree included.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lineage_app = typer.Typer(help="What a model was made from.", no_args_is_help=True)
app.add_typer(lineage_app, name="lineage")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of a table.")]
CacheFolder = Annotated[Path | None, typer.Option("--cache", help="Folder for fetched bases; default ~/.cache/etude.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")]


def main() -> NoReturn:
    """Run the command line; what a user can put right ends as one line and exit code 2."""
    try:
        left = app(standalone_mode=False)  # a command that leaves early hands its exit code back
        code = left if isinstance(left, int) else 0
    except typer.Abort:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        code = 141
    except OSError as error:
        told = storage_error(error)
        if told is None:
            raise
        code = _complain(told)
    except UserError as error:
        code = _complain(error)
    except UnicodeEncodeError as error:
        code = _complain(UserError(f"a name is not valid UTF-8: {error.object[:80]!r}; rename it"))
    except Exception as error:  # noqa: BLE001 - only click's own usage errors are handled; all others are raised again
        code = _usage_error(error)
    sys.exit(code)


def _complain(error: Exception) -> int:
    Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    return 2


def _usage_error(error: Exception) -> int:
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return int(getattr(error, "exit_code", 2))


def _version(wanted: bool) -> None:  # noqa: FBT001 - called by typer
    if wanted:
        typer.echo(f"etude {etude.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    assert not version  # its callback has answered and left


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _cache(folder: Path | None) -> Path:
    from etude.models.fetch import default_cache

    return folder if folder is not None else default_cache()


@app.command(epilog="Example: etude run recipes/quickstart.toml --set compare.max_bytes=200000")
def run(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones change single settings of earlier ones.")
    ],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="stage.key=value; may be given several times.")
    ] = None,
    out: OutFolder = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and what would run.")] = False,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe. What is finished is kept; what was interrupted goes on where it stopped."""
    from etude.recipe.load import load_recipe
    from etude.run.runner import stage_settings

    recipe = load_recipe(recipes, change or [], stage_settings())
    _run(recipe, out, cache, until=until, dry_run=dry_run, as_json=as_json)


def _run(
    recipe: Recipe, out: Path | None, cache: Path | None, *, until: str | None, dry_run: bool, as_json: bool
) -> None:
    from etude.run.folder import RunFolder
    from etude.run.interrupt import StopRequest
    from etude.run.runner import Runner, command_line
    from etude.run.stages import STAGES

    reporter = Reporter()
    folder = out if out is not None else Path("runs") / recipe.name
    with StopRequest(reporter.say) as stop:
        reporter.check_stop = stop.check
        runner = Runner(RunFolder(folder), _cache(cache), reporter, stop.check, STAGES)
        if dry_run:
            _print_plan(runner, recipe, until, as_json=as_json)
            return
        try:
            steps = runner.execute(recipe, until)
        except Interrupted as interruption:
            reporter.say(f"stopped; all finished steps are kept in {folder}. Go on with:\n  {command_line()}")
            raise typer.Exit(128 + interruption.signal_number) from None
        except OSError as error:
            raise storage_error(error, f"in {folder}") or error from error
    _print_outcome(steps, folder, as_json=as_json)


def _print_plan(runner: Runner, recipe: Recipe, until: str | None, *, as_json: bool) -> None:
    from etude.recipe.recipe import as_toml

    steps = runner.plan(recipe, until)
    words = {
        "kept": "is finished, would be kept",
        "finish": "is finished, would be published",
        "reuse": "would be reused",
        "run": "would run",
    }
    if as_json:
        listed = [
            {
                "stage": step.entry.name,
                "action": step.action,
                "from": str(step.source) if step.source else None,
            }
            for step in steps
        ]
        _print_json(
            {
                "recipe": recipe.resolved(),
                "hash": recipe.hash,
                "folder": str(runner.folder.path),
                "steps": listed,
            }
        )
        return
    typer.echo(f"# resolved recipe {recipe.hash[:12]}, to run in {runner.folder.path}\n{as_toml(recipe)}")
    for step in steps:
        typer.echo(f"{step.entry.name}: {words[step.action]}{f' from {step.source}' if step.action == 'reuse' else ''}")


def _print_outcome(steps: list[Step], folder: Path, *, as_json: bool) -> None:
    from etude.lineage.record import load_record
    from etude.run.stages import STAGES

    if as_json:
        records = {step.entry.name: load_record(folder / step.entry.name).model_dump(mode="json") for step in steps}
        _print_json(
            {
                "folder": str(folder),
                "steps": {step.entry.name: step.action for step in steps},
                "records": records,
            }
        )
        return
    console = Console()
    for step in steps:
        STAGES[step.entry.kind].show(folder / step.entry.name, console)
    last = folder / steps[-1].entry.name
    console.print(f"done: {folder}; its record: {last / 'record.json'}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: etude compare smollm2-135m sprout --on ~/my-project")
def compare(
    bases: Annotated[list[str], typer.Argument(help="Known names, folders or hub ids.")],
    on: Annotated[str, typer.Option(help="Folder with your code.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the comparison: window=2048, max_bytes=0, …"),
    ] = None,
    out: OutFolder = None,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Choose a base: bits per byte, state tracking, speed, memory and licence of each candidate on your code."""
    from etude.recipe.load import Layer, check, parse_change
    from etude.run.runner import stage_settings

    name = f"compare-{Path(on).expanduser().resolve().name or 'code'}"
    table = {"name": "".join(c if c.isalnum() or c in "._-" else "-" for c in name), "stages": ["compare"],
             "compare": {"on": str(Path(on).expanduser()), "bases": bases}}  # fmt: skip
    recipe = check(
        [
            Layer("etude compare", table),
            *(parse_change(f"compare.{each.removeprefix('compare.')}") for each in change or []),
        ],
        stage_settings(),
    )
    _run(recipe, out, cache, until=None, dry_run=False, as_json=as_json)


@app.command(epilog="Example: etude status runs/quickstart --watch")
def status(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands: stages, progress, rate, time left, best metrics."""
    from etude.run.status import headline, run_status, status_table

    if as_json:
        _print_json(run_status(run_folder).as_json())
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


@app.command(epilog="Example: etude bases smollm2-135m")
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
        _print_json({key: base.model_dump(mode="json", exclude_none=True) for key, base in chosen.items()})
    elif name is not None:
        _print_base(name)
    else:
        Console().print(_bases_table())


def _bases_table() -> Table:
    from rich.table import Table

    from etude.bench.report import human
    from etude.models.bases import known_bases

    caption = "tokens: of pretraining; +: on top of its parent; ?: not known. etude bases NAME shows the sources."
    table = Table(
        title="Known bases", title_justify="left", box=None, pad_edge=False, caption=caption, caption_justify="left"
    )
    for column in ("name", "params", "active", "tokens", "context", "licence"):
        left = column in {"name", "licence"}
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "licence", overflow="fold")
    for key, base in known_bases().items():
        tokens = human(base.pretraining_tokens) if base.pretraining_tokens else "?"
        spent = f"{'+' if base.continues else ''}{tokens}"
        table.add_row(
            key, human(base.parameters), human(base.active_parameters), spent, f"{base.context:,}", base.licence
        )
    return table


def _print_base(name: str) -> None:
    from etude.lineage.licences import headline_duties
    from etude.models.bases import known_bases

    base = known_bases()[name]
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
    console.print(
        f"  duties: {'; '.join(headline_duties(base.licence))} (facts, not legal advice)",
        markup=False,
        soft_wrap=True,
    )


@lineage_app.command("show", epilog="Example: etude lineage show runs/quickstart/base/model --verify")
def lineage_show(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, its stage's, or a run's.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash the weights again and compare with the record.")
    ] = False,
    as_json: AsJson = False,
) -> None:
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
        _print_json(lineage.model_dump(mode="json"))
        return
    typer.echo("\n".join(render(lineage, str(folder))))
    if verify:
        typer.echo("the weights agree with the record")


if __name__ == "__main__":
    main()
