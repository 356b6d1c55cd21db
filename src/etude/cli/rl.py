"""`etude rl`: look at a run of reinforcement learning, and change its rewards while it goes on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from etude.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(help="Reinforcement learning: watch a run, report on it, change its rewards.", no_args_is_help=True)
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or that of its rl stage.")]
LOOK = 0.5  # seconds between two looks at a run


@dataclass(frozen=True)
class _Found:
    """An rl stage on disk."""

    run: Path
    folder: Path
    finished: bool


@app.command(epilog="Example: etude rl report runs/agent")
def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Write the page (HTML, Markdown, PNG) into this folder.")] = None,
) -> None:
    """Write one page with the plots of a run, finished or going on."""
    from etude.report.rl import PAGE, steps_of, verdict, write_report

    found = _find(run)
    whole = found.finished and (found.folder / PAGE).exists()  # it was written with the stage, and is in its record
    said = verdict(steps_of(found.folder)) if whole and out is None else write_report(found.folder, out or found.folder)
    typer.echo("\n".join([*said, f"report: {(out or found.folder) / PAGE}"]))


@app.command(epilog="Example: etude rl weights runs/agent length=0.2 conduct=0.1")
def weights(
    run: RunFolder,
    changes: Annotated[list[str], typer.Argument(metavar="PART=NUMBER...", help="New weights of parts of the reward.")],
) -> None:
    """Change the weights of the reward's parts in a run that goes on; the change is recorded."""
    from etude.files import read_json, write_json
    from etude.rewards.reward import reweighted
    from etude.rl.ledger import Ledger, Weighted
    from etude.rl.processes import LEDGER, WISH

    found, wished = _find(run), dict(_change(word) for word in changes)
    if found.finished:
        raise UserError(f"{found.folder} is finished; set the weights in a recipe, under rewards of its rl stage")
    told = [event for event in Ledger(found.folder / LEDGER).read()[0] if isinstance(event, Weighted)]
    if not told:
        raise UserError(f"{found.folder} has not begun; set the weights in its recipe, or try again later")
    path = found.folder / WISH
    wished = (read_json(path) if path.exists() else {}) | wished
    now = reweighted(told[-1].weights, wished)
    write_json(path, wished)
    typer.echo("wanted: " + ", ".join(f"{part} {weight:g}" for part, weight in now.items()))
    typer.echo("groups that close from now on are weighed so; `etude rl watch` and the report show from which step")


def _change(word: str) -> tuple[str, float]:
    part, _, text = word.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{word!r} does not set a weight; write PART=NUMBER, such as length=0.2")
    return part, value


@app.command(epilog="Example: etude rl watch runs/agent")
def watch(run: RunFolder) -> None:
    """Show a run as it goes on, from another terminal, until it ends; one that is over is shown once."""
    from etude.run.folder import running_owner

    console, found = Console(highlight=False), _find(run)
    if not console.is_terminal or found.finished or running_owner(found.run) is None:
        console.print(_picture(found))
        return
    with Live(_picture(found), console=console, auto_refresh=False) as live:
        while not found.finished and running_owner(found.run) is not None:
            time.sleep(LOOK)
            found = _find(run)
            live.update(_picture(found), refresh=True)


def _picture(found: _Found) -> RenderableType:
    from etude.files import read_json
    from etude.jsonl import read_rows
    from etude.report.rl import METRICS
    from etude.rl.view import dashboard
    from etude.run.folder import PROGRESS

    rows = read_rows(found.folder / METRICS, "train/")
    seconds = sum(row["device_seconds"] for row in rows)
    state: dict[str, Any] = {"done": len(rows), "total": len(rows), "seconds": seconds, "seconds_left": None}
    if (found.folder / PROGRESS).exists():
        state |= read_json(found.folder / PROGRESS)
    return dashboard(rows, state)


def _find(path: Path) -> _Found:
    """Return the rl stage that a folder means: its own, or the last of a run that has begun; work before finished work."""
    from etude.lineage.record import RECORD_FILE
    from etude.report.rl import METRICS
    from etude.report.status import run_status

    if (path / METRICS).exists():
        work = path.resolve().parent.name == ".work"
        return _Found(path.resolve().parents[work], path, (path / RECORD_FILE).exists())
    stage = "" if (path / "run.json").exists() or not (path.parent / "run.json").exists() else path.name
    run = path.parent if stage else path
    named = [each for each in run_status(run).stages if each.kind == "rl" and stage in {"", each.name}]
    for each in reversed(named):
        if (folder := _folder(run, each.name, each.state)) is not None:
            return _Found(run, folder, each.state in {"done", "damaged"})
    raise UserError(f"{path} has no rl stage that has begun; etude status {run} shows its stages")


def _folder(run: Path, name: str, state: str) -> Path | None:
    from etude.run.folder import RunFolder as Layout

    if state in {"running", "stopped"}:
        return Layout(run).works(name)[-1][1]
    return run / name if state in {"done", "damaged"} else None
