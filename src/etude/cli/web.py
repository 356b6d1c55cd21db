"""`etude web`: runs in a browser, live; `etude web export`: one run as a folder of files that needs no server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli import options
from etude.errors import UserError
from etude.progress import Reporter


class _ShowsFirst(TyperGroup):
    """`etude web runs/x` means `etude web show runs/x`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, args if args and args[0] in own else ["show", *args])


app = typer.Typer(
    cls=_ShowsFirst, help="Runs in a browser: `etude web [RUN...]` serves a page, `etude web export RUN FOLDER` writes it as files.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.command(epilog="Example: etude web runs/quickstart --open")
def show(  # noqa: PLR0913, PLR0917 - an argument for every option
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Run folders, or folders of runs; default: runs.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0 = any free port).")] = 7777,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that browsers must give.")] = None,
    repo: Annotated[list[Path] | None, typer.Option(help="Repository that agents may work on. Repeatable.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model of agents. Repeatable; default: sprout.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Agents at work at once; more wait.")] = 2,
    agents: Annotated[
        Path | None, typer.Option(help="Folder of sessions; default ~/.local/share/etude/agents.")
    ] = None,
    sandbox: options.SandboxName = "auto",
) -> None:
    """Serve runs as a page, live while they go on, and let agents work; nothing is touched but what you ask for on the page."""
    from etude.inference.http import Limits, bind, gate_for, server_of
    from etude.serve.process import read_token
    from etude.web.actions import actions_on
    from etude.web.agents import Agents
    from etude.web.app import PATIENCE, Pages
    from etude.web.reading import Shelf

    folders = runs or ([] if repo and not Path("runs").exists() else [Path("runs")])
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give that of a run, or one with runs in it")
    if missing := [each for each in repo or [] if not each.is_dir()]:
        raise UserError(f"{missing[0]} is no folder; name a repository with --repo")
    work = Agents(
        (agents or Path.home() / ".local/share/etude/agents").absolute(), [str(each.resolve()) for each in repo or []],
        model or ["sprout"], at_once, sandbox,
    )  # fmt: skip
    gate = gate_for(host, read_token(token_file) if token_file else None, allow_open=False)
    limits = Limits(drain=1)
    with bind(host, port) as address:
        shelf = Shelf(folders, PATIENCE)
        pages = Pages(shelf, gate, actions_on(shelf) | work.actions(), work)
        threading.Thread(target=work.keep_beginning, daemon=True).start()
        address.listen()  # who comes before the server has begun waits, and is not refused
        where = f"http://{host}:{address.getsockname()[1]}/"
        options.echo(f"{len(shelf.runs)} runs at {where} - Ctrl-C ends it", err=True)
        if open_:
            typer.launch(where)
        server_of(pages.app(), limits).run(sockets=[address])


@app.command(epilog="Example: etude web export runs/quickstart site")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the pages.")],
    rollouts: Annotated[
        int, typer.Option(min=0, help="Rollouts whose pages are written, those that taught the most first.")
    ] = 300,
) -> None:
    """Write the page of a run as files: they open from disk, and any static host can show them."""
    from etude.web.export import export_run

    written, left = export_run(run, folder, rollouts, Reporter())
    more = f"; {left:,} pages of rollouts are left out, raise --rollouts" if left else ""
    options.echo(f"{written:,} files in {folder}; open {folder / 'index.html'}{more}")
