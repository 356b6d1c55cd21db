"""What the page can change of a run: the weights of its reward, and whether it goes on; each as the command line does it.

A folder may come from anybody. So its command is never run as it is written there: a run is continued by its own recipe, with this
program. And a process is only asked to stop if it holds the lock of the run, whatever number the lock's file names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.rl import wish
from etude.errors import UserError
from etude.run.folder import LOCK_FILE, running_owner
from etude.web.html import Html, act, element, join, note

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.web.app import Action
    from etude.web.reading import Run, Shelf, Stage

LOG = "continued.log"  # in the run's folder: what a continued run says


def actions_on(shelf: Shelf) -> dict[str, Action]:
    """Return what the page may ask for, by name."""

    def of(does: Callable[[Run, dict[str, Any]], str]) -> Action:
        return lambda body: {"said": does(shelf.run(body.pop("run", "")), body)}

    return {"weights": of(weigh), "stop": of(stop), "continue": of(go_on)}


def weigh(run: Run, wanted: dict[str, Any]) -> str:
    """Change the weights of the reward, as `etude rl weights` does: the run itself takes them over, and writes it into the ledger."""
    stage = run.stage(str(wanted.pop("stage", "")))
    try:
        weights = {part: float(value) for part, value in wanted.items()}
    except (TypeError, ValueError):
        raise UserError("a weight is a number such as 0.2") from None
    now = wish(run.folder / stage.path, weights)
    return "wanted: " + ", ".join(f"{part} {weight:g}" for part, weight in now.items())


def stop(run: Run, _: dict[str, Any]) -> str:
    """Ask the process that works on a run to stop at the next safe place, as Ctrl-C does."""
    owner = running_owner(run.folder)
    if owner is None:
        raise UserError(f"nobody is at work on {run.folder.name}")
    if not _holds(owner["pid"], run.folder / LOCK_FILE):
        raise UserError(f"who works on {run.folder.name} is not a process of this machine; stop it where it runs")
    os.kill(owner["pid"], signal.SIGINT)
    return f"process {owner['pid']} stops at the next safe place; what is finished is kept"


def _holds(pid: Any, lock: Path) -> bool:
    """Whether a process of this machine has a run's lock open."""
    with contextlib.suppress(OSError):
        opened = Path(f"/proc/{pid}/fd").iterdir() if isinstance(pid, int) and pid > 1 else ()
        return any(each.samefile(lock) for each in opened if each.exists())
    return False


def go_on(run: Run, _: dict[str, Any]) -> str:
    """Continue a run by its own recipe, in a process that goes on when the page is closed."""
    if running_owner(run.folder) is not None:
        raise UserError(f"{run.folder.name} is being worked on already")
    if not run.has("recipe.toml"):
        raise UserError(f"{run.folder.name} has no recipe.toml to continue by")
    where = run.status.folder
    given_in = where if where and Path(where).is_dir() else None  # paths in the recipe are relative to that
    command = [sys.executable, "-P", "-m", "etude", "run", str(run.folder / "recipe.toml"), "--out", str(run.folder)]
    with (run.folder / LOG).open("ab") as log:
        begun = subprocess.Popen(
            command, cwd=given_in, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return f"process {begun.pid} goes on; what it says is in {run.folder / LOG}"


# ---- the forms for it


def steering(run: Run) -> Html:
    """Return what stops or continues a run."""
    running = running_owner(run.folder) is not None
    if not running and all(each.state == "done" for each in run.stages):
        return Html()
    name, words = ("stop", "Stop at the next safe place") if running else ("continue", "Continue this run")
    return act(name, element("button", words), run=run.key)


def weights_form(stage: Stage, weights: dict[str, float]) -> Html:
    """Return what changes the weights of a running stage's reward."""
    if stage.state != "running" or not weights:
        return Html()
    fields = [element("label", f"{part} ", element("input", name=part, type="number", step="any", min=0, placeholder=f"{weight:g}"))
              for part, weight in weights.items()]  # fmt: skip
    about = "Weights of the reward's parts, from the groups that close next on. The ledger records what and from which step."
    return join(note(about), act("weights", *fields, element("button", "Change"), run=stage.run.key, stage=stage.name))
