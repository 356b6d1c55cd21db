"""`etude agent`: the agent on your own repository, in a copy; what it changed is applied after a yes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from etude.cli.options import CacheFolder, ToolNames, chosen_tools, token_in
from etude.errors import UserError, one_line
from etude.progress import Reporter

if TYPE_CHECKING:
    from etude.agent.trace import Trace
    from etude.sandbox.box import Entry


def agent(  # noqa: PLR0913, PLR0917 - an argument for every option
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="What to do, in your words.")],
    model: Annotated[
        str, typer.Option(help="A run's or model's folder, a base, or an endpoint's /v1 address.")
    ] = "sprout",
    repo: Annotated[Path, typer.Option(help="The repository; the agent works on a copy of it.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Apply the changes without asking.")] = False,
    sandbox: Annotated[str, typer.Option(help="auto, namespaces, bubblewrap, podman or docker.")] = "auto",
    name: Annotated[str, typer.Option(help="Which of an endpoint's models; default: its first.")] = "",
    token_file: Annotated[Path | None, typer.Option(help="File with the endpoint's token.")] = None,
    tools: ToolNames = "",
    turns: Annotated[int, typer.Option(min=1, help="Turns at most.")] = 50,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes at most.")] = 30.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token.")] = 0.7,
    trace: Annotated[Path | None, typer.Option(help="File to append the episode's trace to.")] = None,
    context: Annotated[
        int | None, typer.Option(min=512, help="Tokens at most; default: the model's; an endpoint's: 32768.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cache: CacheFolder = None,
) -> None:
    """Work on a request in a sandboxed copy of a repository; show the diff and apply it after a yes."""
    from etude.agent.policies import find
    from etude.agent.product import active_environment, attempt, settings_for, workshop
    from etude.agent.show import Live
    from etude.agent.trace import append_trace
    from etude.models.fetch import default_cache
    from etude.sandbox.box import SandboxError

    if not request.strip():
        raise UserError("the request is empty; say what is to be done")
    console, folder = Console(), cache.absolute() if cache else default_cache()
    offered = chosen_tools(tools)
    live = Live(console)

    async def work() -> None:
        token = token_in(token_file)
        found = await find(model, device, folder, Reporter(), name=name, token=token, context=context)
        policy, talk = await found.open()
        settings = settings_for(policy, turns=turns, seconds=60 * minutes, temperature=temperature)
        try:
            async with workshop(repo.absolute(), sandbox, active_environment()) as shop:
                console.print(
                    f"{policy.info.name} on a copy of {shop.files} files, sandbox: {shop.sandbox.backend}", style="dim"
                )
                episode, entries = await attempt(
                    request,
                    shop,
                    policy,
                    talk,
                    settings,
                    offered,
                    cache=folder,
                    watch=lambda node: None if node.kind == "opening" else live.node(node),
                )
                if trace is not None:
                    append_trace(trace, episode)
                _tell(console, episode)
                if episode.diff:
                    _offer(console, entries, repo.absolute(), shop.layer, yes=yes)
        finally:
            await policy.close()

    try:
        asyncio.run(work())
    except SandboxError as error:
        raise UserError(f"{one_line(error)}; `etude sandbox probe` says what works here") from None


def _offer(console: Console, entries: list[Entry], repo: Path, layer: Path, *, yes: bool) -> None:
    """Apply the changes after a yes; what cannot be applied is said before anybody is asked."""
    from etude.agent.changes import apply, refuse

    refuse(entries, repo, layer)
    if yes or typer.confirm("Apply these changes?", default=False):
        console.print(f"{apply(entries, repo, layer)} files changed in {repo}")
    else:
        console.print("Nothing was applied.")


def _tell(console: Console, episode: Trace) -> None:
    from etude.agent.show import shown_diff

    why = {"finished": "done", "malformed": "gave up: its calls could not be read"}.get(
        episode.stop, f"stopped: limit of {episode.stop}"
    )
    counts = episode.counts
    console.rule(style="dim")
    console.print(
        f"{why} · {counts.get('turns', 0)} turns · {counts.get('calls', 0)} calls · {counts.get('sampled', 0)} tokens"
    )
    if caches := counts.get("cache_entries_left_out"):
        console.print(f"{caches} files and folders of caches are left out", style="dim")
    console.print(shown_diff(episode.diff) if episode.diff else "No file was changed.")
