"""`etude bench`: models on a set of tasks, measured along four axes; results of several benchmarks, side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli import options
from etude.errors import UserError
from etude.files import digest_of, read_json
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.bench.agents import Agent
    from etude.tasks.manifest import TaskSet


class _RunUnlessNamed(TyperGroup):
    """`etude bench MODEL…` is `etude bench run MODEL…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


about = "Benchmark agents: `etude bench MODEL... --tasks SET`; compare results."
app = typer.Typer(cls=_RunUnlessNamed, no_args_is_help=True, help=about)
PriceRead = Annotated[float, typer.Option(min=0.0, help="Price of a million prompt tokens, uncached.")]
PriceCached = Annotated[float, typer.Option(min=0.0, help="Price of a million prompt tokens, cached.")]
PriceWritten = Annotated[float, typer.Option(min=0.0, help="Price of a million sampled tokens.")]


@app.command(epilog="Example: etude bench runs/mine smollm2-135m --tasks recipes/tasks/quick.jsonl --k 5")
def run(  # noqa: PLR0913, PLR0917 - an argument for every option
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Run or model folder, base, URL or URL#NAME, oracle, noop.")],
    tasks: Annotated[Path, typer.Option(metavar="SET", help="Task manifest, task folder, or folder of task folders.")],
    k: Annotated[int, typer.Option(help="Attempts of every model at every task.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Results folder; default runs/bench/NAME. Run again to resume.")] = None,
    style: Annotated[str, typer.Option(help="Style of the requests: terse, trace, premise, full, shown or told.")] = "terse",
    limit: Annotated[int, typer.Option(help="Number of tasks (0 = all); a larger number includes a smaller one's tasks.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Concurrent attempts (0 = two a core).")] = 0,
    tools: options.ToolNames = "", turns: options.Turns = 50, minutes: options.Minutes = 30.0, temperature: options.Temperature = 1.0,
    price_read: PriceRead = 0.0, price_cached: PriceCached = 0.0, price_written: PriceWritten = 0.0,
    token_file: options.TokenFile = None, tokeniser: options.Tokeniser = "", device: options.Device = "auto",
    cache: options.CacheFolder = None,
) -> None:  # fmt: skip
    """Run k attempts of every model at every task; an interrupted benchmark resumes with the same command."""
    from etude.bench.agents import BenchSettings, run_benchmark
    from etude.run.folder import lock_run
    from etude.tasks.manifest import find_manifest, read_rows

    offered = options.chosen_tools(tools).tools
    given = {"k": k, "limit": limit, "concurrency": concurrency, "style": style, "tools": {"tools": offered},
             "harness": {"turns": turns, "seconds": 60.0 * minutes, "temperature": temperature}}  # fmt: skip
    settings, reporter = options.checked(BenchSettings, given), Reporter()
    if "oracle" in models and not {"edit", "write"} <= {*offered}:
        raise UserError("the oracle needs the tools edit and write; leave --tools or `oracle` out")
    options.refuse_without_server(models, token_file=token_file, tokeniser=tokeniser)
    if not tasks.is_dir():
        read_rows(find_manifest(str(tasks), "--tasks"))  # before a server is asked or a model is loaded
    place = options.cache_folder(cache)

    async def work() -> Path:
        agents = await _agents(models, token_file, device, place, tokeniser)
        task_set = _tasks(tasks, place, reporter)
        folder = out or Path("runs", "bench", task_set.name)
        with lock_run(folder, reporter.say):
            await run_benchmark(task_set, agents, settings, folder, place, reporter)
        return folder

    with options.interruptible(reporter, "all finished trials are kept; run the same command to resume"):
        folder = asyncio.run(work())
    _report([folder], folder, read=price_read, cached=price_cached, written=price_written)


@app.command(epilog="Example: etude bench compare runs/bench/before runs/bench/after")
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Results folders of `etude bench`.")],
    out: Annotated[Path | None, typer.Option(help="Report folder; default runs/bench/A-B.")] = None,
    price_read: PriceRead = 0.0, price_cached: PriceCached = 0.0, price_written: PriceWritten = 0.0,
) -> None:  # fmt: skip
    """Report on one benchmark, or on several side by side; those run under different rules are refused."""
    target = out or Path("runs", "bench", "-".join(folder.absolute().name for folder in folders))
    _report(folders, target, read=price_read, cached=price_cached, written=price_written)


async def _agents(
    words: Sequence[str], token_file: Path | None, device: str, cache: Path, tokeniser: str
) -> list[Agent]:
    """Return the models to measure. All are found before any is loaded."""
    from etude.agent.policies import find
    from etude.bench.agents import BUILT_IN, model_agent

    token, reporter = options.token_in(token_file), Reporter()
    made: dict[str, Agent] = {}
    for word in words:
        each = BUILT_IN.get(word)
        each = each or model_agent(await find(word, device, cache, reporter, token=token, tokeniser=tokeniser))
        if each.name in made:
            raise UserError(f"{each.name} is named twice; measure endpoints of one name into folders of their own")
        made[each.name] = each
    return list(made.values())


def _tasks(path: Path, cache: Path, reporter: Reporter) -> TaskSet:
    """Build a set from its manifest, or from task folders that `etude tasks build --harbor` wrote."""
    from etude.tasks.formats import read_task
    from etude.tasks.manifest import TaskSet, load_set

    if path.is_dir():
        folders = [path] if (path / "task.toml").exists() else sorted(each.parent for each in path.glob("*/task.toml"))
        read = [read_task(folder, cache, reporter) for folder in folders]
        codebases = {f"{codebase.name}=={codebase.version}": codebase for _, codebase in read}
        digest = digest_of([read_json(folder / "tests" / "etude.json") for folder in folders])
        task_set = TaskSet(path.absolute().name, digest, tuple(task for task, _ in read), codebases)
    else:
        task_set = load_set(path, cache, reporter)
    if not task_set.tasks:
        raise UserError(f"{path} holds no tasks; make a set with `etude tasks make`")
    return task_set


def _report(folders: Sequence[Path], target: Path, **prices: float) -> None:
    from etude.bench.axes import Prices
    from etude.report.benchmark import write_report

    for line in write_report(folders, target, Prices(**prices) if any(prices.values()) else None):
        typer.echo(line)
    typer.echo(f"{target / 'report.md'}, {target / 'report.html'}; pictures beside them")
