"""What several commands share: options, JSON output, and how Ctrl-C stops a command without losing work."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Group
from rich.live import Live

from etude.errors import LAYOUT, Interrupted, UserError, nearest, visible
from etude.models.fetch import default_cache
from etude.report.page import print_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from etude.agent.tools import ToolName, ToolSettings
    from etude.progress import Reporter

LOOK = 0.5  # seconds between two looks at a run
Settings = TypeVar("Settings", bound=BaseModel)
AsJson = Annotated[bool, typer.Option("--json", help="JSON output for scripts, instead of a table.")]
CacheFolder = Annotated[Path | None, typer.Option("--cache", help="Cache of downloads; default ~/.cache/etude.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Setting to change: stage.key=value. Repeatable.")]
Device = Annotated[str, typer.Option("--device", help="Device: auto, cpu or cuda.")]
Tokeniser = Annotated[str, typer.Option(help="Tokeniser of a server's model: folder or base; default: the server's.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan; run nothing.")]
Minutes = Annotated[float, typer.Option("--minutes", min=0.01, help="Time limit of an episode in minutes.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="Run folder; default runs/NAME.")]
PageFolder = Annotated[Path | None, typer.Option("--out", help="Folder for the report (HTML, Markdown, PNG).")]
_recipes = typer.Argument(metavar="RECIPE...", help="Recipe files; later files override settings of earlier ones.")
RecipeFiles = Annotated[list[Path], _recipes]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Sampling temperature (0 = greedy).")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token of the server.")]
_tools = typer.Option("--tools", help="Comma-separated tools; default: all but bash. `bash` alone: as mini-swe-agent.")
SandboxName = Annotated[str, typer.Option(help="Sandbox: auto, namespaces, podman:IMAGE or docker:IMAGE.")]
ToolNames = Annotated[str, _tools]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Turn limit of an episode.")]


def cache_folder(given: Path | None) -> Path:
    return given.absolute() if given else default_cache()


def watch(look: Callable[[], tuple[list[RenderableType], bool]], console: Console, *, once: bool) -> None:
    """Show what `look` returns, again and again while it says that there is more to come."""
    parts, more = look()
    with Live(Group(*parts), console=console, auto_refresh=False, transient=True) as live:
        while more and not once:
            time.sleep(LOOK)
            parts, more = look()
            live.update(Group(*parts), refresh=True)
    print_parts(console, parts)


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print plain lines; what strangers wrote in them cannot steer a terminal."""
    typer.echo(visible(text, LAYOUT), err=err, nl=nl)


def print_json(value: Any) -> None:
    """Print JSON; control codes are written as JSON writes them, so that it reads back the same."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    echo(re.sub(r"[^\x20-\x7e\n]", lambda each: each[0] if each[0].isprintable() else json.dumps(each[0])[1:-1], text))


def checked(kind: type[Settings], given: dict[str, Any]) -> Settings:
    """Return settings made of options; of a value that is refused, say which and why."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = (
            f"{first['loc'][-1]} = {first['input']!r}: " if first["loc"] else ""
        )  # or several that do not fit together
        raise UserError(where + first["msg"].removeprefix("Value error, ")) from None


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
        option = idle[0].replace("_", "-")
        raise UserError(f"--{option} is for models of a server; name one by its address, or leave it out")


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
