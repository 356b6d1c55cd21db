"""`etude bench`: models at a set of tasks, measured along four axes; results of earlier runs, side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from etude.cli.options import CacheFolder, ToolNames, chosen_tools, token_in
from etude.errors import Interrupted, UserError
from etude.files import digest_of, read_json
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.bench.agents import BenchSettings, Contestant
    from etude.tasks.manifest import TaskSet


class _RunUnlessNamed(TyperGroup):
    """`etude bench MODEL…` is `etude bench run MODEL…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunUnlessNamed, no_args_is_help=True, help="Agents, measured: `etude bench MODEL... --tasks SET`, and results compared."
)  # fmt: skip
PriceRead = Annotated[float, typer.Option(min=0.0, help="Price of a million tokens of prompts that were not cached.")]
PriceCached = Annotated[float, typer.Option(min=0.0, help="Price of a million tokens of prompts that were.")]
PriceWritten = Annotated[float, typer.Option(min=0.0, help="Price of a million sampled tokens.")]


@app.command(epilog="Example: etude bench runs/mine smollm2-135m --tasks recipes/tasks/quick.jsonl --k 5")
def run(  # noqa: PLR0913, PLR0917 - an argument for every option
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="As --model of `etude agent`, or URL#NAME; oracle; noop.")],
    tasks: Annotated[Path, typer.Option(metavar="SET", help="A manifest of tasks, a task's folder, or a folder of those.")],
    k: Annotated[int, typer.Option(help="Attempts of every model at every task.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default runs/bench/NAME. Run again to go on.")] = None,
    style: Annotated[str, typer.Option(help="Of the requests: terse, trace, premise, full, shown or told.")] = "terse",
    limit: Annotated[int, typer.Option(help="Only so many tasks; a larger number includes a smaller one's; 0: all.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Attempts at once; 0: two a core.")] = 0,
    tools: ToolNames = "",
    turns: Annotated[int, typer.Option(help="Turns of an attempt at most.")] = 50,
    minutes: Annotated[float, typer.Option(help="Minutes of an attempt at most.")] = 30.0,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token.")] = 0.7,
    price_read: PriceRead = 0.0, price_cached: PriceCached = 0.0, price_written: PriceWritten = 0.0,
    token_file: Annotated[Path | None, typer.Option(help="File with the endpoints' token.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Have every model try every task k times; killed at any moment, the same command goes on."""
    from etude.bench.agents import run_benchmark
    from etude.models.fetch import default_cache
    from etude.run.folder import RunLock, StopRequest

    offered = chosen_tools(tools).tools
    given = {"k": k, "limit": limit, "concurrency": concurrency, "style": style, "tools": {"tools": offered},
             "harness": {"turns": turns, "seconds": 60.0 * minutes, "temperature": temperature}}  # fmt: skip
    settings, reporter = _settings(given), Reporter()
    if "oracle" in models and not {"edit", "write"} <= {*offered}:
        raise UserError("the oracle needs the tools edit and write; leave --tools or `oracle` out")
    place = cache.absolute() if cache else default_cache()

    async def work() -> Path:
        contestants = await _contestants(models, token_file, device, place)
        found = _tasks(tasks, place, reporter)
        folder = out or Path("runs", "bench", found.name)
        with RunLock(folder, reporter.say):
            await run_benchmark(found, contestants, settings, folder, place, reporter)
        return folder

    with StopRequest(reporter.say) as stop:
        reporter.check_stop = stop.check
        try:
            folder = asyncio.run(work())
        except Interrupted as interruption:
            reporter.say("stopped; all trials that had ended are kept; run the same command to go on")
            raise typer.Exit(128 + interruption.signal_number) from None
    _report([folder], folder, read=price_read, cached=price_cached, written=price_written)


@app.command(epilog="Example: etude bench compare runs/bench/before runs/bench/after")
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `etude bench` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; default runs/bench/A-B.")] = None,
    price_read: PriceRead = 0.0, price_cached: PriceCached = 0.0, price_written: PriceWritten = 0.0,
) -> None:  # fmt: skip
    """Report on the results of one run, or of several side by side; those made by other rules are refused."""
    target = out or Path("runs", "bench", "-".join(folder.absolute().name for folder in folders))
    _report(folders, target, read=price_read, cached=price_cached, written=price_written)


def _settings(given: dict[str, Any]) -> BenchSettings:
    from etude.bench.agents import BenchSettings

    try:
        return BenchSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{first['loc'][-1]} = {first['input']}: {first['msg'].lower()}") from None


async def _contestants(words: Sequence[str], token_file: Path | None, device: str, cache: Path) -> list[Contestant]:
    """Return who is measured. All are found before any is loaded."""
    from etude.agent.policies import find
    from etude.bench.agents import BUILT_IN, entrant

    token, reporter = token_in(token_file), Reporter()
    made: dict[str, Contestant] = {}
    for word in words:
        each = BUILT_IN.get(word) or entrant(await find(word, device, cache, reporter, token=token))
        if each.name in made:
            raise UserError(f"{each.name} is named twice; measure endpoints of one name into folders of their own")
        made[each.name] = each
    return list(made.values())


def _tasks(path: Path, cache: Path, reporter: Reporter) -> TaskSet:
    """Build a set from its manifest, or from task folders that `etude tasks build --harbor` wrote."""
    from etude.tasks.harbor import read_task
    from etude.tasks.manifest import TaskSet, load_set

    if path.is_dir():
        folders = [path] if (path / "task.toml").exists() else sorted(each.parent for each in path.glob("*/task.toml"))
        read = [read_task(folder, cache, reporter) for folder in folders]
        codebases = {f"{codebase.name}=={codebase.version}": codebase for _, codebase in read}
        digest = digest_of([read_json(folder / "tests" / "etude.json") for folder in folders])
        found = TaskSet(path.absolute().name, digest, tuple(task for task, _ in read), codebases)
    else:
        found = load_set(path, cache, reporter)
    if not found.tasks:
        raise UserError(f"{path} holds no tasks; make a set with `etude tasks make`")
    return found


def _report(folders: Sequence[Path], target: Path, **prices: float) -> None:
    from etude.bench.axes import Prices
    from etude.report.benchmark import write_report

    for line in write_report(folders, target, Prices(**prices) if any(prices.values()) else None):
        typer.echo(line)
    typer.echo(f"{target / 'report.md'}, {target / 'report.html'}; pictures beside them")
