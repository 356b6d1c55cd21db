"""`etude bench`: models on a set of tasks, measured along four axes; results of several benchmarks, side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli import options
from etude.errors import UserError
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence


class _RunUnlessNamed(TyperGroup):
    """`etude bench MODEL…` is `etude bench run MODEL…`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show its commands, and the options of the one that is meant where none is named."""
        super().format_help(ctx, formatter)
        run = self.commands["run"]
        run.format_help(run.make_context("run", [], ctx, resilient_parsing=True), formatter)


about = "Benchmark agents: `etude bench MODEL... --tasks SET`; compare results."
app = typer.Typer(cls=_RunUnlessNamed, no_args_is_help=True, help=about)
PriceRead = Annotated[float, typer.Option(min=0.0, help="Price of a million prompt tokens, uncached.")]
PriceCached = Annotated[float, typer.Option(min=0.0, help="Price of a million prompt tokens, cached.")]
PriceWritten = Annotated[float, typer.Option(min=0.0, help="Price of a million sampled tokens.")]


@app.command(epilog="Example: etude bench runs/mine smollm2-135m --tasks recipes/tasks/quick.jsonl --k 5")
def run(  # noqa: PLR0913, PLR0917 - an argument for every option
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Run or model folder, base, URL or URL#NAME, oracle, noop.")],
    tasks: Annotated[Path, typer.Option(metavar="SET", help="Task manifest, task folder, folder of those; questions: a JSONL.")],
    k: Annotated[int, typer.Option(help="Attempts of every model at every task.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Results folder; default runs/bench/NAME. Run again to resume.")] = None,
    arena: Annotated[str, typer.Option(help="Arena of the tasks: code, questions, or python:module.Class.")] = "code",
    corpus: Annotated[str, typer.Option(help="Questions: JSONL or folder that the tool `search` looks in.")] = "",
    judge: Annotated[str, typer.Option(help="Questions: model or address that judges rubrics.")] = "",
    style: Annotated[str, typer.Option(help="Style of the requests: terse, trace, premise, full, vague, shown or told.")] = "terse",
    only: Annotated[str, typer.Option(help="Prefixes of the ids of tasks to use, separated by spaces; default: all.")] = "",
    limit: Annotated[int, typer.Option(help="Number of tasks (0 = all); a larger number includes a smaller one's tasks.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Concurrent attempts (0 = two a core).")] = 0,
    sandbox: options.SandboxName = "auto",
    tools: options.ToolNames = "", turns: options.Turns = 50, minutes: options.Minutes = 30.0, temperature: options.Temperature = 1.0,
    price_read: PriceRead = 0.0, price_cached: PriceCached = 0.0, price_written: PriceWritten = 0.0,
    token_file: options.TokenFile = None, tokeniser: options.Tokeniser = "", device: options.Device = "auto",
    cache: options.CacheFolder = None,
) -> None:  # fmt: skip
    """Run k attempts of every model at every task; an interrupted benchmark resumes with the same command."""
    from etude.bench.agents import BenchSettings
    from etude.cli.api import measure
    from etude.tasks.manifest import find_manifest, read_rows

    offered = options.chosen_tools(tools).tools
    given = {"k": k, "limit": limit, "concurrency": concurrency, "style": style, "sandbox": sandbox, "tools": {"tools": offered},
             "arena": arena, "questions": {"corpus": corpus, "judge": judge},
             "harness": {"turns": turns, "seconds": 60.0 * minutes, "temperature": temperature}}  # fmt: skip
    settings, reporter = options.checked(BenchSettings, given), Reporter()
    code = arena == "code"
    if code and "oracle" in models and not {"edit", "write"} <= {*offered}:
        raise UserError("the oracle needs the tools edit and write; leave --tools or `oracle` out")
    options.refuse_without_server(models, token_file=token_file, tokeniser=tokeniser)
    if code and not tasks.is_dir():
        read_rows(find_manifest(str(tasks), "--tasks"))  # before a server is asked or a model is loaded
    place = options.cache_folder(cache)

    server = {"device": device, "token": options.token_in(token_file), "tokeniser": tokeniser}
    with options.interruptible(reporter, "all finished trials are kept; run the same command to resume"):
        folder = asyncio.run(measure(models, tasks, settings, out, place, reporter, only, **server))
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


def _report(folders: Sequence[Path], target: Path, **prices: float) -> None:
    from etude.bench.axes import Prices
    from etude.report.benchmark import write_report

    for line in write_report(folders, target, Prices(**prices) if any(prices.values()) else None):
        options.echo(line)
    options.echo(f"{target / 'report.md'}, {target / 'report.html'}; pictures beside them")
