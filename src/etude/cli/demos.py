"""`etude tasks demos`: demonstrations for SFT from the reference solutions of a training set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from etude.cli.options import CacheFolder, ToolNames, chosen_tools
from etude.errors import Interrupted, UserError
from etude.progress import Reporter


def demos(  # noqa: PLR0913, PLR0917 - an argument for every option
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="A training set, such as recipes/tasks/train.jsonl.")],
    model: Annotated[str, typer.Option(help="The base or run that is to learn from them: its tokeniser writes them.")] = "sprout",
    template: Annotated[str, typer.Option(help="As in [sft]: auto, base, chatml, or a .jinja file.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default runs/demos/NAME.")] = None,
    each: Annotated[int, typer.Option(min=1, max=6, help="Demonstrations of each task, in different styles of prompt.")] = 1,
    styles: Annotated[str, typer.Option(help="Of the prompts, with commas between.")] = "terse,trace,premise,full",
    most: Annotated[int, typer.Option(min=0, help="Demonstrations in all, spread over the set; 0: no bound.")] = 0,
    tools: ToolNames = "",
    only: Annotated[str, typer.Option(help="Only tasks whose ids begin with one of these words.")] = "",
    seed: Annotated[int, typer.Option(help="What is drawn depends on it.")] = 0,
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Replay reference solutions through the harness and keep what passes. Run the same command again to go on."""
    from etude.data.chat.template import choose_template
    from etude.jsonl import MetricsLog
    from etude.models.fetch import default_cache
    from etude.models.load import load_tokeniser
    from etude.models.locate import locate
    from etude.run.interrupt import StopRequest
    from etude.tasks.demos import TRACES, DemoSettings, make, refuse_benchmarks, studio_for

    refuse_benchmarks(manifest)
    given = {"tasks": str(manifest), "only": only, "each": each, "most": most, "styles": styles.split(","),
             "tools": chosen_tools(tools).tools}  # fmt: skip
    try:
        settings = DemoSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        given_word = f", not {first['input']!r}" if first["loc"] else ""  # none: several settings do not fit together
        raise UserError(f"demos: {first['msg'].removeprefix('Value error, ')}{given_word}") from None
    reporter, place = Reporter(), cache or default_cache()
    tokeniser = load_tokeniser(locate(model, cache, reporter)[1])
    choose_template(tokeniser, template)  # as the sft stage will leave it
    studio, wanted = studio_for(settings, tokeniser, place, reporter, seed)
    folder = out or Path("runs", "demos", studio.tasks.name)
    with StopRequest(reporter.say) as stop, MetricsLog(folder / "log.jsonl") as log:
        reporter.check_stop = stop.check
        try:
            made = asyncio.run(make(studio, folder, log, reporter, wanted))
        except Interrupted as interruption:
            reporter.say(f"stopped; what was made is kept in {folder}; run the same command to go on")
            raise typer.Exit(128 + interruption.signal_number) from None
    typer.echo(f"{made['kept']} of {made['wanted']} demonstrations in {folder / TRACES}")
    for what in ("tokens", "styles", "wrong turns", "left out", "other ways"):
        typer.echo(f"{what}: {made[what]}")
