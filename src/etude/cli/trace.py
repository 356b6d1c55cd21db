"""`etude trace`: looking at episodes, and passing them on to other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.errors import UserError, one_line

if TYPE_CHECKING:
    from etude.agent.trace import Trace

app = typer.Typer(help="Episodes: look at them, pass them on.", no_args_is_help=True)
TraceFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of traces, one a line.")]
Episode = Annotated[str | None, typer.Option(metavar="N|ID", help="One episode, by its number (from 1) or its id.")]


@app.command(epilog="Example: etude trace show runs/fix/traces.jsonl --episode 3")
def show(
    file: TraceFile,
    episode: Episode = None,
    full: Annotated[bool, typer.Option("--full", help="Do not fold long outputs.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours.")] = False,
) -> None:
    """Print an episode, the first if none is named."""
    from etude.agent.show import show as show_trace

    console = Console(no_color=plain, color_system=None if plain else "auto", highlight=False)
    show_trace(_read(file, episode or "1")[0], console, full=full)


@app.command("list", epilog="Example: etude trace list runs/fix/traces.jsonl")
def list_(file: TraceFile) -> None:
    """List the episodes of a file."""
    from etude.agent.show import visible

    table = Table(box=None, pad_edge=False)
    for column in ("no", "id", "task", "stop", "turns", "sampled", "reward"):
        table.add_column(column, justify="left" if column in {"id", "task", "stop"} else "right", overflow="fold")
    for number, trace in enumerate(_read(file), 1):
        turns = sum(node.kind == "turn" for node in trace.nodes)
        sampled = sum(len(node.tokens) for node in trace.nodes if node.sampled)
        reward = f"{sum(trace.rewards.values()):.3g}" if trace.rewards else ""
        cells = [number, trace.id, " ".join(trace.task.split())[:60], trace.stop, turns, sampled, reward]
        table.add_row(*(Text(visible(str(cell))) for cell in cells))
    Console(highlight=False).print(table)


@app.command(epilog="Example: etude trace export runs/fix/traces.jsonl --atif out")
def export(
    file: TraceFile,
    atif: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to: trajectory-1.json, trajectory-2.json, …")],
    episode: Episode = None,
) -> None:
    """Write episodes as ATIF 1.8, one file each, token ids and log-probs included."""
    from etude.agent.atif import to_atif
    from etude.files import write_json

    traces = _read(file, episode)
    for number, trace in enumerate(traces, 1):
        write_json(atif / f"trajectory-{number}.json", to_atif(trace))
    typer.echo(f"{len(traces)} in {atif}")


@app.command("import", epilog="Example: etude trace import out/*.json --out traces.jsonl")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="ATIF trajectories.")],
    out: Annotated[Path, typer.Option(help="A new file of traces.")],
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
    typer.echo(f"{len(traces)} in {out}")


def _read(path: Path, episode: str | None = None) -> list[Trace]:
    """Return the traces of a file, or the one that is named."""
    from etude.agent.trace import read_traces

    traces, torn = read_traces(path)
    if torn:
        typer.echo(f"note: the last line of {path} is torn ({torn} bytes); its episode is left out", err=True)
    if not traces:
        raise UserError(f"{path} has no whole trace in it")
    if episode is None:
        return traces
    named = [trace for number, trace in enumerate(traces, 1) if episode in {str(number), trace.id}]
    if not named:
        raise UserError(
            f"{path} has no episode {episode!r}: they are numbered 1 to {len(traces)}; etude trace list {path}"
        )
    return named[:1]
