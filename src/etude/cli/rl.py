"""`etude rl`: look at a run of reinforcement learning, and change its rewards while it goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, RenderableType

from etude.cli import options
from etude.cli.options import PageFolder  # noqa: TC001 - typer reads annotations at run time
from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

app = typer.Typer(help="Reinforcement learning: watch a run, report on it, change its rewards.", no_args_is_help=True)
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or the folder of its rl stage.")]


class _Stage(NamedTuple):
    """An rl stage on disk."""

    run: Path
    folder: Path
    finished: bool


@app.command(epilog="Example: etude rl report runs/agent")
def report(run: RunFolder, out: PageFolder = None) -> None:
    """Write a report with the plots of a run, finished or running."""
    from etude.report.rl import PAGE, steps_of, verdict, write_report

    stage = _find(run)
    whole = stage.finished and (stage.folder / PAGE).exists()  # it was written with the stage, and is in its record
    place = out or stage.folder
    lines = verdict(steps_of(stage.folder)) if whole and out is None else write_report(stage.folder, place)
    options.echo("\n".join([*lines, f"report: {place / PAGE}"]))


@app.command(epilog="Example: etude rl weights runs/agent length=0.2 conduct=0.1")
def weights(
    run: RunFolder,
    changes: Annotated[list[str], typer.Argument(metavar="PART=NUMBER...", help="New weights, such as length=0.2.")],
) -> None:
    """Change the reward weights of a running run; the change is recorded."""
    now = wish(run, dict(_change(word) for word in changes))
    options.echo("wanted: " + ", ".join(f"{part} {weight:g}" for part, weight in now.items()))
    options.echo("groups that close from now on are weighed so; `etude rl watch` and the report show from which step")


def wish(run: Path, wanted: Mapping[str, float]) -> dict[str, float]:
    """Ask a run that goes on for other weights of its reward; return all of them as they will be. It records the change itself."""
    from etude.files import read_json, write_json
    from etude.rewards.reward import reweighted
    from etude.rl.ledger import Ledger, Weighted
    from etude.rl.processes import LEDGER, WISH

    stage = _find(run)
    if stage.finished:
        raise UserError(f"{stage.folder} is finished; set the weights in a recipe, under rewards of its rl stage")
    events = [event for event in Ledger(stage.folder / LEDGER).read()[0] if isinstance(event, Weighted)]
    if not events:
        raise UserError(f"{stage.folder} has not begun; set the weights in its recipe, or try again later")
    path = stage.folder / WISH
    wanted = {**(read_json(path) if path.exists() else {}), **wanted}
    now = reweighted(events[-1].weights, wanted)
    write_json(path, wanted)
    return now


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
    """Show a live view of a run until it ends; a finished run is shown once."""
    from etude.run.folder import running_owner

    console = Console(highlight=False)

    def look() -> tuple[list[RenderableType], bool]:
        stage = _find(run)
        return [_picture(stage)], not stage.finished and running_owner(stage.run) is not None

    options.watch(look, console, once=not console.is_terminal)


def _picture(stage: _Stage) -> RenderableType:
    from etude.files import read_json
    from etude.jsonl import read_rows
    from etude.report.rl import METRICS
    from etude.rl.view import dashboard
    from etude.run.folder import PROGRESS

    rows, progress = read_rows(stage.folder / METRICS, "train/"), stage.folder / PROGRESS
    seconds = sum(row["device_seconds"] for row in rows)
    state: dict[str, Any] = {"done": len(rows), "total": len(rows), "seconds": seconds, "seconds_left": None}
    return dashboard(rows, state | (read_json(progress) if progress.exists() else {}))


def _find(path: Path) -> _Stage:
    """Return the rl stage that a folder means: its own, or the last of a run that has begun; work before finished work."""
    from etude.lineage.record import RECORD_FILE
    from etude.report.rl import METRICS
    from etude.report.status import run_status
    from etude.run.folder import all_work

    if (path / METRICS).exists():
        work = path.resolve().parent.name == ".work"
        return _Stage(path.resolve().parents[work], path, (path / RECORD_FILE).exists())
    stage = "" if (path / "run.json").exists() or not (path.parent / "run.json").exists() else path.name
    run = path.parent if stage else path
    for each in reversed(run_status(run).stages):
        if each.kind == "rl" and stage in {"", each.name}:
            if each.state in {"running", "stopped"}:
                return _Stage(run, all_work(run, each.name)[-1][1], finished=False)
            if each.state in {"done", "damaged"}:
                return _Stage(run, run / each.name, finished=True)
    raise UserError(f"{path} has no rl stage that has begun; etude status {run} shows its stages")
