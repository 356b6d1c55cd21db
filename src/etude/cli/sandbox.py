"""`etude sandbox`: which backends work on this machine, and a shell inside one."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.options import AsJson, echo, print_json

if TYPE_CHECKING:
    from etude.sandbox.box import Result, Sandbox

app = typer.Typer(help="Sandboxes for code that a model wrote: test backends, open a shell.", no_args_is_help=True)
_task = typer.Argument(metavar="TASK", help="Task folder, or any folder: the workspace is a copy of it.")
Task = Annotated[Path, _task]
Backend = Annotated[str, typer.Option(help="Backend: auto, namespaces, docker:IMAGE or podman:IMAGE.")]
Seconds = Annotated[float, typer.Option(min=1, help="Time limit of a command in seconds.")]
# A line is run where the last one ended. Only that is carried over: variables and what runs in the background are not.
LINE = 'cd -- "$1" && eval "$2"; code=$?; printf "%s%s" "$3" "$PWD" >&2; exit $code'


@app.command("probe", epilog="Example: etude sandbox probe")
def probe(as_json: AsJson = False) -> None:
    """Start a sandbox with every backend; show which ones work here and what enforces the limits."""
    from etude.sandbox.probe import probe_all

    results = asyncio.run(probe_all())
    if as_json:
        print_json([{"backend": each.backend, "works": each.works, "detail": each.detail} for each in results])
    else:
        for each in results:
            echo(f"{each.backend:<12}{'works' if each.works else 'no':<8}{each.detail}")
    if not any(each.works for each in results):
        raise typer.Exit(1)


@app.command("shell", epilog="Example: etude sandbox shell ~/my-project")
def shell(task: Task, backend: Backend = "auto", seconds: Seconds = 120.0) -> None:
    """Open a shell in a task's workspace as an agent sees it. Changes are discarded; `exit` or Ctrl-D leaves."""
    from etude.errors import UserError, one_line
    from etude.sandbox.box import Place, SandboxError
    from etude.sandbox.layers import prepare
    from etude.sandbox.local import open_sandbox

    tree = workspace_of(task)
    if not tree.is_dir():
        raise UserError(f"{task} is not a folder; name a task's folder or a source tree")
    with tempfile.TemporaryDirectory(prefix="etude-shell-") as folder, asyncio.Runner() as runner:
        Path(folder).chmod(0o755)  # the workload is another user
        if left_out := prepare(tree, Path(folder) / "layer"):
            echo(f"left out: {left_out} special files", err=True)
        try:
            box = runner.run(open_sandbox(Place((Path(folder) / "layer",)), backend))
        except SandboxError as error:
            raise UserError(f"{one_line(error)}; `etude sandbox probe` says what works here") from error
        try:
            about = f"sandbox: {box.backend}, with a copy of {tree}; no network; `exit` leaves and discards changes"
            echo(about, err=True)
            _converse(runner, box, seconds)
        finally:
            runner.run(box.close())


def workspace_of(task: Path) -> Path:
    """Return the folder that a task's agent works in: Harbor's environment/, its tree where there is one; else the folder."""
    places = (task / "environment" / "tree", task / "environment", task)
    return next((place for place in places if place.is_dir()), task)


def _converse(runner: asyncio.Runner, box: Sandbox, seconds: float) -> None:
    where = "/workspace"
    while (line := _ask(where)) is not None:
        mark = secrets.token_hex(16)  # not to be guessed by what runs
        try:
            done = runner.run(box.exec(["sh", "-c", LINE, "sh", where, line, mark], timeout=seconds))
        except KeyboardInterrupt:
            echo(f"^C: no longer waited for; it ends after {seconds:g} s at most", err=True)
            continue
        errors, marked, ended = done.err.partition(mark.encode())
        if marked:  # else it was killed, or has left the shell
            where = ended.decode(errors="surrogateescape")
        _show(done, errors)


def _show(done: Result, errors: bytes) -> None:
    """Print the output of a line. It may try to control the terminal: control characters are shown, not sent."""
    for text, left_out, err in ((done.out, done.cut[0], False), (errors, done.cut[1], True)):
        echo(text.decode(errors="replace"), err=err, nl=False)
        if left_out:
            echo(f"[{left_out:,} bytes left out of the middle]", err=True)
    notes = [note for note, holds in (("out of time", done.timed_out), ("out of memory", done.oom)) if holds]
    if done.rc or notes:
        echo(f"[{', '.join([*notes, f'exit code {done.rc}'])}]", err=True)


def _ask(where: str) -> str | None:
    """Return the next line, typed or from a pipe; None after `exit` or at the end."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401 - gives input() its editing and its history

            line = input(f"{where}$ ")
        elif not (line := sys.stdin.readline()):
            return None
    except EOFError:
        return None
    except KeyboardInterrupt:
        echo(err=True)
        return ""
    return None if line.strip() == "exit" else line
