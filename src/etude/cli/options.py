"""What several commands share: options, JSON output, and how Ctrl-C stops a command without losing work."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from etude.errors import Interrupted, UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.agent.tools import ToolName, ToolSettings
    from etude.progress import Reporter

AsJson = Annotated[bool, typer.Option("--json", help="JSON output for scripts, instead of a table.")]
CacheFolder = Annotated[Path | None, typer.Option("--cache", help="Cache of downloads; default ~/.cache/etude.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Setting to change: stage.key=value. Repeatable.")]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu or cuda.")]
Tokeniser = Annotated[
    str, typer.Option(help="Tokeniser of a server's model: a folder or base; default: as the server says.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan; run nothing.")]
Minutes = Annotated[float, typer.Option("--minutes", min=0.01, help="Time limit of an episode in minutes.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/NAME.")]
PageFolder = Annotated[Path | None, typer.Option("--out", help="Folder for the report (HTML, Markdown, PNG).")]
_recipes = typer.Argument(metavar="RECIPE...", help="Recipe files; later files override settings of earlier ones.")
RecipeFiles = Annotated[list[Path], _recipes]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Sampling temperature (0 = greedy).")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token of the server.")]
_tools = typer.Option("--tools", help="Comma-separated tools; default: all but bash. `bash` alone: as mini-swe-agent.")
ToolNames = Annotated[str, _tools]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Turn limit of an episode.")]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def chosen_tools(words: str) -> ToolSettings:
    from etude.agent.tools import SPECS, ToolSettings

    names = [word.strip() for word in words.split(",")] if words else ToolSettings().tools
    for name in names:
        if name not in SPECS:
            raise UserError(f"--tools: there is no tool {name!r}{nearest(name, SPECS)}")
    return ToolSettings(tools=cast("list[ToolName]", names))


def refuse_without_server(models: Sequence[str], **given: object) -> None:
    """Refuse options that only a server's model has, where no model is one."""
    from etude.agent.policies import SCHEMES

    if (idle := [name for name, value in given.items() if value]) and not any(m.startswith(SCHEMES) for m in models):
        raise UserError(
            f"--{idle[0].replace('_', '-')} is for models of a server; name one by its address, or leave it out"
        )


def token_in(path: Path | None) -> str:
    if path is None:
        return ""
    from etude.serve.process import read_token

    return read_token(path)


@contextlib.contextmanager
def interruptible(reporter: Reporter, advice: str) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the work at its next safe place, where all finished units are on disk, and say how to go on.

    A unit in progress is dropped and done again by the next session. A second signal stops at once.
    """
    asked: list[int] = []

    def ask(number: int, _frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        reporter.say("stopping at the next safe place; once more to stop at once")

    def check() -> None:
        if asked:
            raise Interrupted(asked[0])

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    reporter.check_stop = check
    try:
        yield
    except Interrupted as interruption:
        reporter.say(f"stopped; {advice}")
        raise typer.Exit(128 + interruption.signal_number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
