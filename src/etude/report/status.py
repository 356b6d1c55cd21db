"""How a run stands, read from its folder alone: works while another process is at it, and after that died."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from etude.errors import UserError
from etude.files import read_json
from etude.lineage.record import RECORD_FILE
from etude.progress import Task, duration, of_total, speed
from etude.report.ending import in_short, read_all
from etude.run.folder import PROGRESS, all_work, missing_files, readable_record, running_owner

STALE = 30.0  # seconds without news after which a running stage's rate is no longer believed


@dataclass(frozen=True)
class StageStatus:
    """One line of `etude status`."""

    name: str
    kind: str
    state: str  # done, running, stopped, waiting, damaged
    progress: dict[str, Any] | None
    summary: dict[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """A run as it stands."""

    run: str
    owner: dict[str, Any] | None
    command: str
    folder: str | None  # where the command was given: its paths are relative to that
    stages: list[StageStatus]


def run_status(run: Path) -> RunStatus:
    """Read how a run stands."""
    try:
        head = read_json(run / "run.json")
    except (FileNotFoundError, NotADirectoryError):
        advice = "runs lie in runs/NAME by default"
        raise UserError(f"{str(run)!r} is not the folder of a run (no run.json); {advice}") from None
    except ValueError:
        raise UserError(f"{run / 'run.json'} is damaged; run the recipe again, finished stages are kept") from None
    try:
        listed = [(str(stage["name"]), str(stage["kind"])) for stage in head["stages"]]
        command, given_in = str(head["command"]), head.get("in")
    except (KeyError, TypeError):
        raise UserError(f"{run / 'run.json'} was not written by Etude; runs lie in runs/NAME by default") from None
    owner = running_owner(run)
    stages = [_stage_status(run, name, kind, running=owner is not None) for name, kind in listed]
    return RunStatus(str(run), owner, command, given_in, stages)


def _stage_status(run: Path, name: str, kind: str, *, running: bool) -> StageStatus:
    finished_at = (run / name).stat().st_mtime if (run / name / RECORD_FILE).is_file() else 0.0
    # Work that is newer than the finished stage goes on under changed settings; older work was abandoned.
    works = [work for at, work in all_work(run, name) if at > finished_at and not (work / RECORD_FILE).exists()]
    if works:
        return StageStatus(name, kind, "running" if running else "stopped", _progress(works[-1]), {})
    if not (run / name / RECORD_FILE).is_file():
        return StageStatus(name, kind, "waiting", None, {})
    record = readable_record(run / name)
    if record is None or missing_files(run / name, record):
        return StageStatus(name, kind, "damaged", None, {})
    return StageStatus(name, kind, "done", None, dict(record.summary))


def _progress(work: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = read_json(work / PROGRESS)
        age = time.time() - (work / PROGRESS).stat().st_mtime
    except (OSError, ValueError):
        return None
    return state | {"age": age}


def status_table(status: RunStatus) -> Table:
    """Draw it for the terminal."""
    table = Table("stage", "state", "progress", "rate", "time left", "result", box=None, pad_edge=False)
    colours = {"done": "green", "running": "cyan", "stopped": "yellow", "waiting": "dim", "damaged": "red"}
    finished = read_all(Path(status.run), [stage.name for stage in status.stages if stage.state == "done"])
    results = {ended.record.stage: in_short(ended, finished[:at]) for at, ended in enumerate(finished)}
    for stage in status.stages:
        cells = (*_progress_cells(stage), results.get(stage.name, ""))
        table.add_row(Text(stage.name), Text(stage.state, colours[stage.state]), *map(Text, cells))
    return table


def headline(status: RunStatus) -> str:
    """Return in one line who is at work, or how to go on."""
    if status.owner:
        return f"{status.run}: process {status.owner['pid']} is at work"
    if all(stage.state == "done" for stage in status.stages):
        return f"{status.run}: done"
    elsewhere = status.folder is not None and status.folder != str(Path.cwd())
    return f"{status.run}: nobody is at work; continue with: {f'cd {status.folder} && ' if elsewhere else ''}{status.command}"


def _progress_cells(stage: StageStatus) -> tuple[str, str, str]:
    if stage.progress is None:
        return ("", "", "")
    known = {field: stage.progress[field] for field in ("label", "total", "unit", "done", "skipped")}
    task = Task(**known, started=time.monotonic() - stage.progress["seconds"])
    share = f"{100 * task.done / task.total:.0f}%" if task.total else ""
    done = f"{task.label}: {of_total(task)} {share}"
    if stage.state != "running":
        return (done, "", "")
    if stage.progress["age"] > STALE:
        return (done, "", f"no news for {duration(stage.progress['age'])}")
    left = task.seconds_left
    return (done, speed(task), duration(left) if left is not None else "")
