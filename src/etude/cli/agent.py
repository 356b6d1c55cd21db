"""`etude agent`: the agent on your own repository, in a copy; what it changed is applied after a yes. `etude trace`: its episodes."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import options
from etude.errors import UserError, one_line
from etude.progress import Console, Reporter
from etude.report.page import Table, terminal

if TYPE_CHECKING:
    from etude.agent.trace import Node, Trace
    from etude.sandbox.box import Entry


def agent(  # noqa: PLR0913, PLR0917 - an argument for every option
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request: what to change, in plain words.")],
    model: Annotated[str, typer.Option(help="Model: run folder, model folder, base, or a server's URL.")] = "sprout",
    repo: Annotated[Path, typer.Option(help="Repository; the agent works on a copy of it.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Apply the changes without asking.")] = False,
    sandbox: options.SandboxName = "auto",
    name: Annotated[str, typer.Option(help="Name of the server's model; default: its first.")] = "",
    token_file: options.TokenFile = None,
    tokeniser: options.Tokeniser = "",
    tools: options.ToolNames = "",
    turns: options.Turns = 50,
    minutes: options.Minutes = 30.0,
    temperature: options.Temperature = 0.7,
    trace: Annotated[Path | None, typer.Option(help="File to append the episode's trace to.")] = None,
    context: Annotated[int | None, typer.Option(min=512, help="Context in tokens; default: the model's.")] = None,
    device: options.Device = "auto",
    cache: options.CacheFolder = None,
) -> None:
    """Work on a request in a sandboxed copy of a repository; show the diff and apply it after a yes."""
    from etude.agent.policies import find
    from etude.agent.repository import leaving_nothing, run_agent, sandboxed_copy, settings_for
    from etude.agent.trace import Trace, append_trace
    from etude.report.episode import Live, visible
    from etude.sandbox.box import SandboxError

    if not request.strip():
        raise UserError("the request is empty; say what is to be done")
    options.refuse_without_server([model], name=name, token_file=token_file, tokeniser=tokeniser)
    console, folder, offered = Console(), options.cache_folder(cache), options.chosen_tools(tools)
    live, episode = Live(console), Trace(uuid.uuid4().hex[:12], request)

    def watch(node: Node) -> None:
        if node.kind != "opening":
            live.node(node)

    async def work() -> None:
        token = options.token_in(token_file)
        source = await find(
            model, device, folder, Reporter(), name=name, token=token, context=context, tokeniser=tokeniser
        )
        policy, talk = await source.open()
        settings = settings_for(policy, turns=turns, seconds=60 * minutes, temperature=temperature)
        try:
            async with sandboxed_copy(repo.absolute(), sandbox) as copy:
                where = f"a copy of {copy.files} files, sandbox: {copy.sandbox.backend}"
                console.print(visible(f"{policy.info.name} on {where}"), style="dim", markup=False)
                entries = await run_agent(episode, copy, policy, talk, settings, offered, cache=folder, watch=watch)
                if trace is not None:
                    append_trace(trace, episode)
                _sum_up(console, episode)
                if episode.diff:
                    _offer(console, entries, repo.absolute(), copy.layer, yes=yes)
        finally:
            await policy.close()

    try:
        with leaving_nothing():
            asyncio.run(work())
    except SandboxError as error:
        raise UserError(f"{one_line(error)}; `etude sandbox probe` says what works here") from None


def _offer(console: Console, entries: list[Entry], repo: Path, layer: Path, *, yes: bool) -> None:
    """Apply the changes after a yes; what cannot be applied is said before anybody is asked."""
    from etude.agent.changes import apply, check

    check(entries, repo, layer)
    if yes or typer.confirm("Apply these changes?", default=False):
        console.print(f"{apply(entries, repo, layer)} files changed in {repo}")
    else:
        console.print("Nothing was applied.")


def _sum_up(console: Console, episode: Trace) -> None:
    from etude.report.episode import ending, shown_diff

    counts = Counter(episode.counts)
    console.rule(style="dim")
    console.print(f"{ending(episode)} · {counts['turns']} turns · {counts['calls']} calls · {counts['sampled']} tokens")
    if caches := counts["cache_entries_left_out"]:
        console.print(f"{caches} files and folders of caches are left out", style="dim")
    console.print(shown_diff(episode.diff) if episode.diff else "No file was changed.")


trace_app = typer.Typer(help="Traces of episodes: show, list, export, import.", no_args_is_help=True)
TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="Trace file (JSONL).")]
Episode = Annotated[str | None, typer.Option(metavar="N|ID", help="Episode, by its number (from 1) or its id.")]


@trace_app.command(epilog="Example: etude trace show runs/fix/traces.jsonl --episode 3")
def show(
    file: TraceFile,
    episode: Episode = None,
    full: Annotated[bool, typer.Option("--full", help="Long outputs in full.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours.")] = False,
) -> None:
    """Print an episode, the first if none is named."""
    from etude.report.episode import show as show_trace

    console = Console(no_color=plain, color_system=None if plain else "auto", highlight=False)
    show_trace(_read(file, episode or "1")[0], console, full=full)


@trace_app.command("list", epilog="Example: etude trace list runs/fix/traces.jsonl")
def list_(file: TraceFile) -> None:
    """List the episodes of a file."""
    from etude.report.episode import reward_of

    rows = []
    for number, trace in enumerate(_read(file), 1):
        turns = sum(node.kind == "turn" for node in trace.nodes)
        sampled = sum(len(node.tokens) for node in trace.nodes if node.sampled)
        reward = "" if (value := reward_of(trace)) is None else f"{value:.3g}"
        rows.append((number, trace.id, " ".join(trace.task.split())[:60], trace.stop, turns, sampled, reward))
    heads = (">no", "id", "task", "stop", ">turns", ">sampled", ">reward")
    Console(highlight=False).print(terminal(Table(heads, rows)))


@trace_app.command(epilog="Example: etude trace export runs/fix/traces.jsonl --atif out")
def export(
    file: TraceFile,
    atif: Annotated[Path | None, typer.Option(metavar="FOLDER", help="ATIF 1.8: output folder, a file an episode.")] = None,
    otlp: Annotated[str, typer.Option(metavar="FOLDER|URL", help="OpenTelemetry spans: output folder, or collector.")] = "",
    content: Annotated[bool, typer.Option("--content", help="--otlp: with what was asked, said and answered.")] = False,
    episode: Episode = None,
) -> None:  # fmt: skip
    """Write episodes as ATIF 1.8, token ids and log-probs included, or as OpenTelemetry spans."""
    from etude.agent.atif import to_atif
    from etude.agent.otlp import post, to_otlp
    from etude.files import write_json, write_text

    if (atif is None) == (not otlp) or (content and not otlp):
        raise UserError("give --atif FOLDER or --otlp FOLDER, one of them; --content goes with --otlp")
    traces = _read(file, episode)
    if atif is not None:
        for number, trace in enumerate(traces, 1):
            write_json(atif / f"trajectory-{number}.json", to_atif(trace))
    else:
        requests = [to_otlp(trace, file.stat().st_mtime, content=content) for trace in traces]
        if otlp.startswith(("http://", "https://")):
            for request in requests:
                post(request, otlp)
        else:
            write_text(Path(otlp) / "traces.otlp.jsonl", "".join(f"{request}\n" for request in requests))
    options.echo(f"{len(traces)} in {atif or otlp}")


@trace_app.command("import", epilog="Example: etude trace import out/*.json --out traces.jsonl")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="ATIF trajectory files.")],
    out: Annotated[Path, typer.Option(help="New trace file (JSONL).")],
) -> None:
    """Read ATIF trajectories, ours or other programs'."""
    from etude.agent.atif import from_atif
    from etude.agent.trace import write_traces
    from etude.files import read_json

    if out.exists():
        raise UserError(f"{out} is there already; choose another --out")
    traces = []
    for path in files:
        try:
            document = read_json(path)
        except (ValueError, RecursionError, FileNotFoundError) as error:
            raise UserError(f"{path} is not a JSON file: {one_line(error)}") from None
        traces.append(from_atif(document, str(path)))
    write_traces(out, traces)
    options.echo(f"{len(traces)} in {out}")


def _read(path: Path, episode: str | None = None) -> list[Trace]:
    """Return the traces of a file, or the one that is named."""
    from etude.agent.trace import read_traces

    traces, torn = read_traces(path)
    if torn:
        options.echo(f"note: the last line of {path} is torn ({torn} bytes); its episode is left out", err=True)
    if not traces:
        raise UserError(f"{path} has no whole trace in it")
    if episode is None:
        return traces
    named = [trace for number, trace in enumerate(traces, 1) if episode in {str(number), trace.id}]
    if not named:
        numbered = f"they are numbered 1 to {len(traces)}; etude trace list {path}"
        raise UserError(f"{path} has no episode {episode!r}: {numbered}")
    return named[:1]
