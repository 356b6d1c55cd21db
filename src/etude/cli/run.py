"""Commands around a recipe: run it, build its corpus, compare bases; and commands that only look, or export.

`etude compare` is a recipe made from its options, so that all of them resume, reuse and record alike.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from etude.cli import options
from etude.errors import UserError, nearest, storage_error
from etude.progress import Console, Reporter
from etude.report.page import Table, human, print_parts, terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from etude.models.bases import KnownBase
    from etude.recipe.recipe import Recipe
    from etude.run.plan import Planned
    from etude.run.runner import Runner, Step
    from etude.run.stage import Stage


def run(
    recipes: options.RecipeFiles, change: options.Changes = None, out: options.OutFolder = None,
    until: Annotated[str | None, typer.Option(metavar="STAGE", help="Last stage to run.")] = None,
    dry_run: options.DryRun = False, cache: options.CacheFolder = None, as_json: options.AsJson = False,
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="Ray cluster to run on: local, or its address.")] = "",
) -> None:  # fmt: skip
    """Run a recipe. Finished stages are kept; an interrupted one resumes where it stopped."""
    recipe = load(recipes, change)
    if recipe.cluster and not cluster and not dry_run:
        options.echo("the table [cluster] is not used: this runs on one machine; --cluster ADDRESS places it", err=True)
    if not cluster or dry_run:
        _run_recipe(recipe, out, cache, until=until, dry_run=dry_run, as_json=as_json)
        return
    if recipe.cluster is None:
        raise UserError(
            f"--cluster {cluster}: {recipes[-1]} has no [cluster], which says who takes what (docs/cluster.md)"
        )
    from etude.cluster import require_ray

    require_ray()
    from etude.cluster.connect import joined
    from etude.cluster.stages import ClusterRun, cluster_stages

    with joined(cluster, lambda line: options.echo(line, err=True)):
        on = ClusterRun(recipe.cluster)
        on.check(out or Path("runs") / recipe.name)
        stages = cluster_stages(on)
        _run_recipe(recipe, out, cache, until=until, dry_run=False, as_json=as_json, stages=stages)


def plan(
    recipes: options.RecipeFiles, change: options.Changes = None,
    on: Annotated[str, typer.Option("--on", metavar="[N]x[GPU]", help="Machine to plan for, such as h200 or 8xh200.")] = "h200",
    runs: Annotated[list[Path] | None, typer.Option("--from", metavar="RUN", help="Run to predict gains from. Repeatable.")] = None,
    cache: options.CacheFolder = None, as_json: options.AsJson = False,
) -> None:  # fmt: skip
    """Say what a recipe will take: memory by part, rows at once, hours, and what would make it fit. Needs no GPU and no weights."""
    recipe = load(recipes, change)
    from etude.run.plan import described, machine, outlooks, plan_recipe, read_curves

    where, curves = machine(on), [read_curves(each) for each in runs or []]
    planned = plan_recipe(recipe, where, options.cache_folder(cache))
    if recipe.cluster and recipe.cluster.trainer.gpus and not where.counted:
        on += ", placed by [cluster]"
    told = outlooks(recipe, planned, curves) if curves else {}
    if as_json:
        options.print_json({"on": on, "stages": [described(each) for each in planned], **told})
    elif not planned:
        options.echo("no stage of this recipe trains a model")
    else:
        for each in planned:
            _print_planned(each, on)
        if told:
            _print_forecasts(told, [each.name for each in planned])
    if tight := [each for each in planned if not each.micro]:
        raise UserError(f"{tight[0].name} does not fit on {on}: {_advice(tight[0])}")


def _print_forecasts(told: dict[str, Any], stages: list[str]) -> None:
    """Print what more of each stage would give, and what cannot be told."""
    rows, lines = list[tuple[str, ...]](), list[str]()
    for row in told["forecasts"]:
        stage, measure, cells = row["stage"], row["measure"], [f"{row['last']:.3f} ({row['best']:.3f})"]
        for times, known in ((1, row["at_budget"]), (2, row["at_twice"])):
            cells.append("–" if isinstance(known, str) else "{:.3f} [{:.3f}, {:.3f}]".format(*known))
            if isinstance(known, str) and (times == 1 or known != row["at_budget"]):
                lines.append(f"{stage}, {measure}: no forecast for {human(times * row['budget'])}: {known}")
        cells.append(f"{row['hours']:.3g}" if row["hours"] else "–")
        cells.append("{:.2g} [{:.2g}, {:.2g}]".format(*row["gain_an_hour"]) if row["gain_an_hour"] else "–")
        rows.append((stage, f"{measure}, {row['unit']}", *cells))
    lines += [f"{name}: no curve of it in these runs" for name in stages if name not in {row[0] for row in rows}]
    heads = ("stage", "measure", ">last (best)", ">at its budget", ">at twice that", ">hours", ">gain an hour")
    print_parts(Console(), [*[terminal(Table(heads, rows))][: len(rows)], *lines, told["verdict"]])


def _advice(each: Planned) -> str:
    return f"{each.remedy} would do" if each.remedy else "nothing that was tried would do: take a smaller base"


def _print_planned(each: Planned, on: str) -> None:
    from etude.run.plan import described
    from etude.training.memory import SHARE, gigabytes

    way, rows = each.plan.way, max(1, each.micro)
    many = f"{rows} row{'s' * (rows > 1)}"
    ranks = f", each of {way.ranks} ranks" if way.ranks > 1 else ""
    title = f"{each.name} on {on}{ranks}: rows of {each.length:,} tokens, masters {way.masters}, states {way.states}"
    parts = {**described(each)["parts"], "in all": each.plan.needed(rows)}
    options.echo(title)
    Console().print(terminal(Table(("part", ">GB"), [(name, f"{size / 1e9:.1f}") for name, size in parts.items()])))
    may = gigabytes(SHARE * each.plan.available)
    if each.cache:
        engine = "each engine" if each.apart else "beside it the engine"
        options.echo(f"{engine}: {gigabytes(each.engine)} of weights, {gigabytes(each.cache)} of KV cache")
    if not each.micro:
        options.echo(f"it does not fit: {may} may be used; {_advice(each)}\n")
        return
    span = f"{each.hours:,.1f} hours" if (each.hours or 0) >= 1 else f"{60 * (each.hours or 0):.1f} minutes"
    hours = f", {span} for {human(each.tokens)} tokens" if each.hours and each.tokens else ""
    speed = f"; about {human(round(each.rate))} tokens/s{hours} ({each.source})" if each.rate else ""
    beside = f", with {gigabytes(each.plan.main_memory)} of main memory for each rank" if each.plan.main_memory else ""
    options.echo(f"it fits: {may} may be used, {many} at once{beside}{speed}\n")


def build_corpus(
    recipes: options.RecipeFiles, change: options.Changes = None, out: options.OutFolder = None,
    dry_run: options.DryRun = False, cache: options.CacheFolder = None, as_json: options.AsJson = False,
) -> None:  # fmt: skip
    """Build the corpus of a recipe, and nothing after it."""
    recipe = load(recipes, change)
    if recipe.data is None:
        raise UserError(f"{recipes[-1]} describes no corpus; give it [data] with at least one [[data.source]]")
    _run_recipe(recipe, out, cache, until="data", dry_run=dry_run, as_json=as_json)


def load(recipes: list[Path], change: list[str] | None) -> Recipe:
    gc.disable()  # imports leave no garbage, and looking for it takes a sixth of their time
    from etude.recipe.recipe import load_recipe
    from etude.run.runner import stage_settings

    gc.freeze()
    gc.enable()
    return load_recipe(recipes, change or [], stage_settings())


def _run_recipe(
    recipe: Recipe, out: Path | None, cache: Path | None, *, until: str | None, dry_run: bool, as_json: bool,
    stages: Mapping[str, Stage] | None = None,
) -> None:  # fmt: skip
    """Run a checked recipe, or print the plan."""
    from etude.run.runner import Runner, command_line
    from etude.run.stages import STAGES
    from etude.run.stages.training import dismiss_ranks, join_trainings

    reporter, folder = Reporter(), out or Path("runs") / recipe.name
    runner = Runner(folder, options.cache_folder(cache), reporter, stages or STAGES)
    if dry_run:
        _print_plan(runner, recipe, until, as_json=as_json)
        return
    with options.interruptible(reporter, f"all finished steps are kept in {folder}; resume with: {command_line()}"):
        if int(os.environ.get("RANK", "0")) > 0:  # torchrun started several of us, and this is not the one that leads
            join_trainings()
            return
        try:
            steps = runner.execute(recipe, until)
            dismiss_ranks()
        except OSError as error:
            raise storage_error(error, f"in {folder}") or error from None
    _print_outcome(steps, folder, as_json=as_json)


def _print_plan(runner: Runner, recipe: Recipe, until: str | None, *, as_json: bool) -> None:
    """Print what would be done; then refuse, if a stage lacks something, as the run itself would."""
    from etude.recipe.recipe import as_toml

    steps, folder = runner.plan(recipe, until), str(runner.folder)
    if as_json:
        listed = [{"stage": step.entry.name, "action": step.action, "from": str(step.source) if step.source else None,
                   "lacks": step.lacks} for step in steps]  # fmt: skip
        options.print_json({"recipe": recipe.resolved(), "hash": recipe.hash, "folder": folder, "steps": listed})
    else:
        options.echo(f"# resolved recipe {recipe.hash[:12]}, to run in {folder}\n{as_toml(recipe)}")
        for step in steps:
            words = {"kept": "is finished, would be kept", "finish": "is finished, would be published",
                     "reuse": f"would be reused from {step.source}", "run": "would run"}  # fmt: skip
            state = words[step.action]
            if step.lacks:
                state = f"cannot run yet: {step.lacks.removeprefix(f'{step.entry.name}: ')}"
            options.echo(f"{step.entry.name}: {state}")
    if lacking := [step.lacks for step in steps if step.lacks]:
        more = f" ({len(lacking) - 1} more above)" if len(lacking) > 1 else ""
        raise UserError(f"{lacking[0]}{more}")


def _print_outcome(steps: list[Step], folder: Path, *, as_json: bool) -> None:
    from etude.lineage.record import load_record
    from etude.recipe.recipe import DATA
    from etude.run.stages import BASE, STAGES

    names = [step.entry.name for step in steps]
    if as_json:
        records = {name: load_record(folder / name).model_dump(mode="json") for name in names}
        actions = {step.entry.name: step.action for step in steps}
        options.print_json({"folder": str(folder), "steps": actions, "records": records})
        return
    console = Console()
    if console.options.ascii_only and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without → must not spoil the end of a long run
    for step in steps:
        print_parts(console, STAGES[step.entry.kind].show(folder / step.entry.name))
    trained = [step for step in steps if step.entry.kind not in {BASE, DATA}]
    if len(trained) > 1 and any(STAGES[step.entry.kind].makes_model for step in steps):
        _print_ending(names, folder, console)
    print_parts(console, [f"done: {folder}; record: {folder / names[-1] / 'record.json'}"])


def summary(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]) -> None:
    """Show the results of a run again: what each stage changed, RL's reward, the family tree, what to try next."""
    from etude.report.status import headline, run_status

    status, console = run_status(run_folder), Console()
    done = [stage.name for stage in status.stages if stage.state == "done"]
    if not done:
        raise UserError(f"{run_folder}: no stage is finished; etude status {run_folder} shows how it stands")
    _print_ending(done, run_folder, console)
    print_parts(console, [headline(status)] * (len(done) < len(status.stages)))


def _print_ending(names: list[str], folder: Path, console: Console) -> None:
    """Print the results of a chain of stages on one screen."""
    from etude.lineage.record import load_lineage
    from etude.report.ending import next_steps, read_ended, screen

    stages = [read_ended(folder / name) for name in names]
    models = [stage.record.stage for stage in stages if stage.record.weights]
    if not models:
        raise UserError(f"{folder} has made no model; etude status {folder} shows its results")
    plain = console.options.ascii_only
    console.rule(f"results of {folder.absolute().name}", characters="-" if plain else "─")
    console.print(screen(stages, load_lineage(folder / models[-1] / "model"), wide=console.width, plain=plain))
    listed = enumerate(next_steps(folder, stages), 1)
    steps = [f"{number}. {what}\n   {command}" for number, (what, command) in listed]
    print_parts(console, [Text("\nnext steps", "bold"), *steps])


def compare(
    bases: Annotated[list[str], typer.Argument(metavar="BASE...", help="Bases: known names, model folders or hub ids.")],
    on: Annotated[str, typer.Option(metavar="FOLDER", help="Folder of your code, to measure on.")],
    change: options.Changes = None,
    out: options.OutFolder = None, cache: options.CacheFolder = None, as_json: options.AsJson = False,
) -> None:  # fmt: skip
    """Compare bases on your code: bits per byte, state tracking, speed, memory and licence."""
    from etude.recipe.recipe import check, parse_change
    from etude.run.runner import stage_settings
    from etude.toml import Layer

    name = f"compare-{Path(on).expanduser().resolve().name or 'code'}"
    table = {"name": "".join(c if c.isalnum() or c in "._-" else "-" for c in name), "stages": ["compare"],
             "compare": {"on": str(Path(on).expanduser()), "bases": bases}}  # fmt: skip
    changes = [parse_change(f"compare.{each.removeprefix('compare.')}") for each in change or []]
    recipe = check([Layer("etude compare", table), *changes], stage_settings())
    _run_recipe(recipe, out, cache, until=None, dry_run=False, as_json=as_json)


def status(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    watch: Annotated[bool, typer.Option("--watch", help="Live view until the run ends.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the state of a run: stages, progress, rate, time left, metrics."""
    from etude.report.status import headline, run_status, status_table

    if as_json:
        options.print_json(asdict(run_status(run_folder)))
        return

    def look() -> tuple[list[RenderableType], bool]:
        now = run_status(run_folder)
        return [status_table(now), headline(now)], now.owner is not None

    options.watch(look, Console(highlight=False), once=not watch)


def log(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    to: Annotated[list[str], typer.Option(metavar="SINK", help="Sink: tensorboard, trackio, wandb or mlflow. Repeatable.")],
    follow: Annotated[bool, typer.Option("--follow", hidden=True)] = False,
) -> None:  # fmt: skip
    """Send the metrics of a run to other programs: what they have not had of it."""
    from etude.report.sinks import SINKS, refuse_missing
    from etude.run.log import follow as follow_run
    from etude.run.log import send

    if unknown := [name for name in to if name not in SINKS]:
        raise UserError(f"--to: there is no sink {unknown[0]!r}{nearest(unknown[0], SINKS)}")
    refuse_missing(to)
    if follow:
        follow_run(run_folder, to[0])
        return
    for name in to:
        options.echo(f"{name}: {send(run_folder, name)} rows sent")


def bases(
    name: Annotated[str | None, typer.Argument(help="Base to show in detail, with the source of each fact.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the known bases. Any Hugging Face folder or hub id works as well."""
    from etude.models.bases import known_bases

    known = known_bases()
    if name is not None and name not in known:
        raise UserError(f"unknown base {name!r}{nearest(name, known)}")
    if as_json:
        chosen = {name: known[name]} if name is not None else known
        options.print_json({key: base.model_dump(mode="json", exclude_none=True) for key, base in chosen.items()})
    elif name is not None:
        _print_base(name, known[name])
    else:
        Console().print(_bases_table(known))


def _bases_table(known: dict[str, KnownBase]) -> RenderableType:
    caption = "tokens: pretraining tokens; +: on top of its parent's; ?: unknown. etude bases NAME shows the sources."
    rows = []
    for key, base in known.items():
        tokens = human(base.pretraining_tokens) if base.pretraining_tokens else "?"
        sizes = (human(base.parameters), human(base.active_parameters), f"{'+' if base.continues else ''}{tokens}")
        rows.append((key, *sizes, base.context, base.licence))
    heads = ("name", ">params", ">active", ">tokens", ">context", "licence")
    return terminal(Table(heads, rows), title="Known bases", caption=caption, caption_justify="left")


def _print_base(name: str, base: KnownBase) -> None:
    from etude.lineage.licences import headline_duties

    lines = [f"{name}: {base.title}"]
    for fact in ("licence", "parameters", "active_parameters", "context", "pretraining_tokens", "continues"):
        if (value := getattr(base, fact)) is not None:
            lines.append(f"  {fact}: {f'{value:,}' if isinstance(value, int) else value}")
            lines += [f"    from: {base.sources[fact]}"] if fact in base.sources else []
    lines += [f"  note: {base.caveat}"] if base.caveat else []
    lines.append(f"  duties: {'; '.join(headline_duties(base.licence))} (facts, not legal advice)")
    options.echo("\n".join(lines))


def corpus_report(
    corpus: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a corpus inside one.")],
    out: options.PageFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the contents of a corpus: sources, licences, and what was filtered out. The full report is report.html beside it."""
    from etude.data.manifest import MANIFEST, load_manifest
    from etude.report.corpus import shown, write_report

    folder = corpus / "data" if (corpus / "data" / MANIFEST).exists() else corpus
    manifest = load_manifest(folder)
    if as_json:
        options.print_json(manifest.model_dump(mode="json") | {"digest": manifest.digest})
        return
    if out is not None:
        write_report(folder, out)
    print_parts(Console(), shown(folder, out or folder))


def export(
    model: Annotated[Path, typer.Argument(help="Model folder with MTP heads, as the stage `mtp` writes it.")],
    out: Annotated[Path, typer.Argument(help="Output folder; must be new.")],
    layout: Annotated[
        Literal["transformers", "mimo"],
        typer.Option(help="Layout: transformers (model and heads, DeepSeek-V3) or mimo (heads for vLLM, Llama)."),
    ],
) -> None:
    """Write MTP heads in a layout that transformers or vLLM loads."""
    from etude.models.mtp_heads import export_heads

    options.echo(export_heads(model, out, layout))
