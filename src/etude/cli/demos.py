"""`etude tasks demos`: demonstrations for SFT from the reference solutions of a training set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import CacheFolder  # noqa: TC001 - typer reads it
from etude.errors import Interrupted
from etude.progress import Reporter


def demos(  # noqa: PLR0913, PLR0917 - an argument for every option
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="A training set, such as recipes/tasks/train.jsonl.")],
    model: Annotated[str, typer.Option(help="The base or run that is to learn from them: its tokeniser writes them.")] = "sprout",
    template: Annotated[str, typer.Option(help="As in [sft]: auto, base, chatml, or a .jinja file.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default runs/demos/NAME.")] = None,
    each: Annotated[int, typer.Option(min=1, max=4, help="Demonstrations of each task, in different styles of prompt.")] = 1,
    only_bash: Annotated[bool, typer.Option("--only-bash", help="One tool, as mini-swe-agent has it.")] = False,
    only: Annotated[str, typer.Option(help="Only tasks whose ids begin like this.")] = "",
    seed: Annotated[int, typer.Option(help="What is drawn depends on it.")] = 0,
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Replay reference solutions through the harness and keep what passes. Run the same command again to go on."""
    from etude.agent.formats import ChatFormat, choose_format
    from etude.agent.tool_specs import BASH_ONLY, ToolSettings
    from etude.cli.serve import locate
    from etude.data.chat.template import choose_template
    from etude.jsonl import MetricsLog
    from etude.models.fetch import default_cache
    from etude.models.load import load_tokeniser
    from etude.run.interrupt import StopRequest
    from etude.tasks.attempt import searcher_for
    from etude.tasks.demos import TRACES, Studio, make, refuse_benchmarks, tokeniser_digest
    from etude.tasks.manifest import load_set

    refuse_benchmarks(manifest)
    reporter, place = Reporter(), cache or default_cache()
    tokeniser = load_tokeniser(locate(model, cache, reporter)[1])
    choose_template(tokeniser, template)  # as the sft stage will leave it
    talk = choose_format(tokeniser)
    assert isinstance(talk, ChatFormat)
    tasks = load_set(manifest, place, reporter, only)
    tools = ToolSettings(tools=BASH_ONLY) if only_bash else ToolSettings()
    studio = Studio(tasks, talk, tokeniser_digest(tokeniser), searcher_for(tools, place), seed, tools)
    folder = out or Path("runs", "demos", tasks.name)
    with StopRequest(reporter.say) as stop, MetricsLog(folder / "log.jsonl") as log:
        reporter.check_stop = stop.check
        try:
            made = asyncio.run(make(studio, folder, log, reporter, each))
        except Interrupted as interruption:
            reporter.say(f"stopped; what was made is kept in {folder}; run the same command to go on")
            raise typer.Exit(128 + interruption.signal_number) from None
    typer.echo(f"{made['kept']} of {made['wanted']} demonstrations in {folder / TRACES}")
    for what in ("tokens", "styles", "wrong turns", "left out", "other ways"):
        typer.echo(f"{what}: {made[what]}")
