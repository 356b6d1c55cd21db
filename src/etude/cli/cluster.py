"""Commands about a cluster: what it has, whether a recipe fits it, and what is wrong with it. Ray is imported only by these."""

from __future__ import annotations

import asyncio
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import options
from etude.errors import UserError
from etude.progress import Console
from etude.report.page import Table, terminal

if TYPE_CHECKING:
    from etude.recipe.cluster import ClusterSettings
    from etude.recipe.recipe import Recipe

PUBLISH = 0.82  # seconds a gigabyte, and the share of it that a delta is: benchmarks/results/rl-h200.json
DELTA = 0.0037
TRIED = 10_000  # episodes at once, of which 188 ended a second: benchmarks/results/orchestrator_load-cpu.json

app = typer.Typer(help="A Ray cluster: its nodes, what a recipe takes of it, checks.", no_args_is_help=True)
Address = Annotated[str, typer.Option("--cluster", metavar="ADDRESS", help="Ray's address, or local: this machine's.")]


@app.command(epilog="Example: etude cluster status --cluster ray://head:10001")
def status(cluster: Address = "local", as_json: options.AsJson = False) -> None:
    """Show the nodes of a cluster, and what of them is free."""
    from etude.cluster import require_ray

    require_ray()
    from etude.cluster.connect import joined
    from etude.cluster.placement import free, nodes

    with joined(cluster, _say):
        found, left = nodes(), free()
    rows: list[tuple[str, str, int, int]] = [
        (node.address, node.id[:8], int(node.has["GPU"]), int(node.has["CPU"])) for node in found
    ]
    if as_json:
        options.print_json(
            {"nodes": [dict(zip(("address", "id", "gpus", "cpus"), row, strict=True)) for row in rows], "free": left}
        )
        return
    Console().print(terminal(Table(("node", "id", ">GPUs", ">CPUs"), rows)))
    options.echo(f"free now: {left}")


@app.command(epilog="Example: etude cluster plan recipe.toml --cluster local")
def plan(
    recipes: options.RecipeFiles,
    change: options.Changes = None,
    cluster: Address = "local",
    cache: options.CacheFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a recipe takes of a cluster, whether it has that, and what grows with its size; refused as the run would be."""
    recipe = _recipe(recipes, change)
    settings, grows = _table(recipe, recipes), _grows(recipe, options.cache_folder(cache))
    from etude.cluster import require_ray

    require_ray()
    from etude.cluster.connect import joined
    from etude.cluster.placement import bundles, nodes, refuse_impossible, words

    wanted = bundles(settings)
    rows: list[tuple[str, int, str]] = [(part, len(takes), words(takes[0])) for part in ("trainer", "engines", "sandboxes")
            if (takes := [each.takes for each in wanted if each.part == part])]  # fmt: skip
    if not as_json:
        Console().print(terminal(Table(("part", ">places", "first of them"), rows)))
    with joined(cluster, _say):
        refuse_impossible(wanted, nodes())
    if as_json:
        places = [{"part": part, "places": count, "each": each} for part, count, each in rows]
        options.print_json({"places": places, "grows": grows})
        return
    options.echo("the cluster has room for all of it")
    for line in grows:
        options.echo(line)


@app.command(epilog="Example: etude cluster doctor recipe.toml --cluster ray://head:10001 --out /shared/runs/mine")
def doctor(
    recipes: Annotated[list[Path] | None, typer.Argument(metavar="[RECIPE...]", help="Recipe whose engines to look for.")] = None,
    cluster: Address = "local", out: options.OutFolder = None,
) -> None:  # fmt: skip
    """Check the nodes: versions of Ray, Python and Etude, clocks, the run's folder, vLLM. Exit code 1: something is wrong."""
    settings = _table(_recipe(recipes, None), recipes) if recipes else None
    from etude.cluster import require_ray

    require_ray()
    from etude.cluster.connect import joined, problems, survey
    from etude.cluster.host import about

    folder = out.absolute() if out else None
    with joined(cluster, _say):
        seen = asyncio.run(survey(folder, settings))
        wrong = problems(seen, about(), folder)
    for each in seen:
        told: Any = each.about
        options.echo(f"{each.node}: {', '.join(f'{k} {v}' for k, v in told.versions.items()) if told else 'no answer'}")
    for line in wrong:
        options.echo(f"wrong: {line}")
    if folder is None:
        options.echo("not checked: whether all nodes see the run's folder; name it with --out")
    options.echo(f"{len(wrong)} problem(s)" if wrong else "all is well")
    if wrong:
        raise typer.Exit(1)


def _say(line: str) -> None:
    options.echo(line, err=True)


def _recipe(recipes: list[Path], change: list[str] | None) -> Recipe:
    from etude.cli.run import load

    return load(recipes, change)


def _table(recipe: Recipe, paths: list[Path]) -> ClusterSettings:
    if recipe.cluster is None:
        raise UserError(
            f"{paths[-1]} has no [cluster]; say in it what trainer, engines and sandboxes take (docs/cluster.md)"
        )
    return recipe.cluster


def _grows(recipe: Recipe, cache: Path) -> list[str]:
    """Return what of `rl` grows with model and cluster, by what was measured (docs/cluster.md, where it breaks)."""
    entry = next((each for each in recipe.stages if each.kind == "rl"), None)
    if entry is None or recipe.base is None or recipe.cluster is None:
        return []
    from etude.models.shape import shape_of
    from etude.run.plan import base_config

    own: Any = entry.settings
    engines = sum(each.count for each in recipe.cluster.engines)
    lines = []
    if not own.lora:
        gigabytes = 2e-9 * shape_of(base_config(recipe.base, cache)).parameters
        ranks, seconds = recipe.cluster.ranks, PUBLISH * gigabytes / recipe.cluster.ranks
        who = f"{ranks} ranks write a share of it each" if ranks > 1 else "one rank writes it"
        step = f"{who} after each step, while none is trained: about {seconds:,.1f} s, by one rank's rate on an H200"
        read = f"{engines} engines read about {DELTA * gigabytes * engines:,.2f} GB a step, a new one all of it"
        lines.append(f"rl: the model is {gigabytes:,.2f} GB; {step}; {read}")
    if own.at_once > TRIED:
        lines.append(f"rl: {own.at_once:,} episodes at once; {TRIED:,} were tried, on half a core of the driver")
    return lines
