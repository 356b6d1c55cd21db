"""Sessions: the agent at work in the background, each a process and a folder of its own. Whoever shows them only reads files.

    AGENTS/ID/request.json     what was asked, of which model, about which repository
    AGENTS/ID/lock             held by the session's process through its standard input
    AGENTS/ID/log              what the process said; it is there as soon as the session has begun
    AGENTS/ID/traces.jsonl     the trace, written anew with every node
    AGENTS/ID/changes.json     what was changed, and what was there before: enough to apply it when somebody says so
    AGENTS/ID/stop             it was asked to stop
    AGENTS/ID/end.json         how it ended
    AGENTS/ID/decisions.jsonl  what the user said to it (feedback.py)

How a session stands follows from these alone, so a kill of any process at any moment leaves nothing to repair. The kernel lets go of
the lock however its holder ends; without an end and without a holder a session was killed. The lock is taken before the process is
started and handed to it, so that no session is begun twice, by two servers either.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.agent.changes import apply, below_folder, content_of
from etude.agent.policies import find
from etude.agent.repository import leaving_nothing, run_agent, sandboxed_copy, settings_for
from etude.agent.tools import ToolSettings
from etude.agent.trace import Trace, read_traces, write_traces
from etude.errors import UserError, one_line
from etude.files import read_json, write_json, write_text
from etude.lineage.record import load_lineage
from etude.models.fetch import default_cache
from etude.progress import Reporter
from etude.sandbox.box import Entry, SandboxError
from etude.sandbox.layers import lookup, write_layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from etude.sandbox.layers import Below

TURNS, SECONDS, TEMPERATURE = 50, 1800.0, 0.7  # as `etude agent` has them
MOST_WAITING = 50
MOST_REQUEST = 20_000  # characters
MOST_CHANGED = 64 << 20  # bytes of changed files that are kept, so that they can be applied
ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9]{3}-[0-9a-f]{4}")  # by time, so that names sort as they were asked
LOOK = 1.0  # seconds between two looks whether one that waits can begin


class Session:
    """One session, as its files tell."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, folder.name
        self.request: dict[str, Any] = read_json(folder / "request.json")

    @contextlib.contextmanager
    def locked(self, how: int) -> Iterator[IO[str] | None]:
        """Hold the lock; yield None where others do and `how` says not to wait."""
        with (self.folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, how)
                held: IO[str] | None = lock
            except BlockingIOError:
                held = None
            yield held

    @property
    def end(self) -> dict[str, str]:
        """The state it ended in and why; empty while it has not."""
        with contextlib.suppress(FileNotFoundError):
            return dict(read_json(self.folder / "end.json"))
        return {}

    @property
    def state(self) -> str:
        """Waiting, running, finished, failed, stopped or killed. The order of the looks matters: it may begin or end between two."""
        begun = (self.folder / "log").exists()
        with self.locked(fcntl.LOCK_SH | fcntl.LOCK_NB) as free:  # others may look, too
            if ended := self.end:
                return ended["state"]
        if begun and not free:
            return "running"
        return "stopped" if self.stopping else "killed" if begun else "waiting"

    @property
    def stopping(self) -> bool:
        return (self.folder / "stop").exists()

    @cached_property
    def trace(self) -> Trace | None:
        """What it had done when this was first asked for."""
        path = self.folder / "traces.jsonl"
        return read_traces(path)[0][0] if path.exists() else None

    @property
    def log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "log").read_text(errors="replace")
        return ""

    def begin(self) -> subprocess.Popen[bytes] | None:
        """Start its process, unless it has begun or ended already."""
        command = [sys.executable, "-P", "-m", "etude.agent.sessions", str(self.folder)]
        with self.locked(fcntl.LOCK_EX | fcntl.LOCK_NB) as lock:
            if lock is None or self.stopping:
                return None
            with contextlib.suppress(FileExistsError), (self.folder / "log").open("xb") as log:
                environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # for what it starts
                try:
                    return subprocess.Popen(command, cwd=self.request["in"], stdin=lock, stdout=log, stderr=log,
                                            env=environment, start_new_session=True)  # fmt: skip
                except OSError as error:  # the folder it was asked in is gone, or there is no room for a process
                    self.finish("failed", one_line(error))
        return None

    def stop(self) -> None:
        """End it, whether it waits or is at work; what it did so far stays. Asked a second time, it is killed."""
        if self.state not in {"waiting", "running"}:
            raise UserError("this session has ended already")
        number = signal.SIGKILL if self.stopping else signal.SIGTERM
        (self.folder / "stop").touch()
        for descriptor in Path("/proc").glob("[0-9]*/fd/0"):
            with contextlib.suppress(OSError):
                if descriptor.samefile(self.folder / "lock"):
                    os.kill(int(descriptor.parts[2]), number)

    def finish(self, state: str, why: str = "") -> None:
        write_json(self.folder / "end.json", {"state": state, "why": why})

    async def work(self) -> None:
        """Let the agent work, and keep what it did and changed. Nothing is applied."""
        asked, cache = self.request, default_cache()
        source = await find(asked["model"], "auto", cache, Reporter())
        policy, talk = await source.open()
        settings = settings_for(policy, turns=TURNS, seconds=SECONDS, temperature=TEMPERATURE)
        trace = Trace(self.id, asked["request"])
        trace.made_by["model"] = {"name": source.name, "digest": _digest(source.folder)}
        try:
            async with sandboxed_copy(Path(asked["repository"]), asked["sandbox"]) as copy:
                entries = await run_agent(
                    trace, copy, policy, talk, settings, ToolSettings(), cache=cache, watch=lambda _: self._write(trace)
                )
                self._write(trace)
                if entries:
                    self._keep(entries, copy.layer)
        finally:
            await policy.close()

    def _write(self, trace: Trace) -> None:
        write_traces(self.folder / "traces.jsonl", [trace])

    def _keep(self, entries: Sequence[Entry], layer: Path) -> None:
        """Keep the changes, and of the repository what lies at their places, which tells later whether it is still as it was."""
        below: list[tuple[str, Below]] = []
        for entry in entries:
            here = lookup([layer], entry.path)
            below += [(entry.path, here)] if entry.kind == "folder" else below_folder(entry.path, here)
        before = [
            Entry(path, "folder" if each.folders else "link" if stat.S_ISLNK(each.found.st_mode) else "file", 0, each.found.st_mode,
                  content_of(each)) for path, each in below if each.found
        ]  # fmt: skip
        if sum(len(each.content or b"") for each in (*entries, *before)) > MOST_CHANGED:
            raise UserError(
                f"more than {MOST_CHANGED >> 20} MiB were changed; `etude agent` can apply that, a session not"
            )
        write_text(self.folder / "changes.json", json.dumps({"after": _packed(entries), "before": _packed(before)}))

    @property
    def has_changes(self) -> bool:
        return (self.folder / "changes.json").exists() and self.end.get("state") == "finished"

    def apply(self) -> int:
        """Apply what was changed to the repository, all or nothing; return how many files that were."""
        kept = read_json(self.folder / "changes.json")
        with tempfile.TemporaryDirectory() as folder:
            layer = write_layer(Path(folder) / "before", _unpacked(kept["before"]), ())
            return apply(_unpacked(kept["after"]), Path(self.request["repository"]), layer)


def _digest(folder: Path | None) -> str:
    """Return the digest of a model's weights, where its lineage tells it."""
    with contextlib.suppress(UserError):
        if folder is not None:
            lineage = load_lineage(folder)
            return lineage.records[lineage.head].model_digest
    return ""


def _packed(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """Return entries as JSON has them: names may be any bytes, and so may contents."""
    return [(each.path, each.kind, stat.S_IMODE(each.mode), base64.b64encode(each.content or b"").decode())
            for each in entries]  # fmt: skip


def _unpacked(rows: Sequence[Sequence[Any]]) -> list[Entry]:
    return [Entry(path, kind, 0, mode, base64.b64decode(content)) for path, kind, mode, content in rows]


class Sessions:
    """A folder of sessions, the newest first."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self.folder, self.at_once = folder, at_once
        self._begun: list[subprocess.Popen[bytes]] = []

    def __iter__(self) -> Iterator[Session]:
        folders = sorted((each for each in self.folder.glob("*") if ID.fullmatch(each.name)), reverse=True)
        return (Session(each) for each in folders if (each / "request.json").is_file())

    def get(self, name: str) -> Session:
        """Return a session by its id. KeyError: there is none."""
        if not ID.fullmatch(name) or not (self.folder / name / "request.json").is_file():
            raise KeyError(name)
        return Session(self.folder / name)

    def ask(self, request: str, **about: str) -> Session:
        """Put a new session into the line. `about`: model, repository, sandbox, and after which session it tries again."""
        if not request.strip():
            raise UserError("the request is empty; say what is to be done")
        if len(request) > MOST_REQUEST:
            raise UserError(f"the request has {len(request):,} characters; {MOST_REQUEST:,} is the most")
        if sum(each.state == "waiting" for each in self) >= MOST_WAITING:
            raise UserError(f"{MOST_WAITING} sessions wait already; stop some of them first")
        now = time.time()
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now * 1000) % 1000:03d}-{secrets.token_hex(2)}"
        folder = self.folder / name
        folder.mkdir(mode=0o700, parents=True)
        asked = {"request": request, "time": now, "in": str(Path.cwd()), **about}
        write_text(folder / "request.json", json.dumps(asked, indent=1))
        return Session(folder)

    def begin_due(self, repositories: Sequence[str], models: Sequence[str]) -> None:
        """Begin those that have waited longest, as far as there is room, and only for repositories and models that are allowed."""
        self._begun = [each for each in self._begun if each.poll() is None]
        states = [(each, each.state) for each in self if not each.end]
        room = self.at_once - sum(state == "running" for _, state in states)
        due = [each for each, state in reversed(states) if state == "waiting"
               and each.request["repository"] in repositories and each.request["model"] in models]  # fmt: skip
        self._begun += [begun for each in due[: max(0, room)] if (begun := each.begin())]


def main(folder: Path) -> None:
    """Work on a session, and note how it ended."""
    session, state, why = Session(folder), "finished", ""
    try:
        with leaving_nothing():
            if session.stopping:  # before the signal could be heard
                sys.exit()
            asyncio.run(session.work())
    except (SystemExit, KeyboardInterrupt):
        state = "stopped"
    except SandboxError as error:
        state, why = "failed", f"{one_line(error)}; `etude sandbox probe` says what works here"
    except UserError as error:
        state, why = "failed", one_line(error)
    except Exception as error:  # noqa: BLE001 - whatever it was, the page must be able to say so
        traceback.print_exc()
        state, why = "failed", f"{type(error).__name__}: {one_line(error)}"
    session.finish(state, why)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
