"""The metrics of a run, sent to sinks: TensorBoard, Trackio, Weights & Biases, MLflow.

Nothing in a stage knows of it. A process for each sink follows the files that stages write anyway, so a sink that is slow, raises or
hangs costs the run nothing but a line: it is said once, counted, and tried again, and `etude log` sends later what is missing. What a
sink has had is noted in `RUN/log/SINK/state.json` after each batch; rows are counted, so a stage that is resumed goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, one_line
from etude.files import read_json, write_json
from etude.jsonl import numbers, read_lines
from etude.recipe.recipe import STAGE_NAME
from etude.report.sinks import SINKS, Point, Sink
from etude.report.status import run_status
from etude.run.folder import METRICS, all_work, readable_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BATCH = 200  # points between two notes of what was sent
LOOK, SLOWEST = 5.0, 60.0  # seconds between two looks, and between two tries of a sink that fails
PATIENCE = 30.0  # seconds that the end of a run waits for its sinks


class Sending:
    """The rows of a run on their way to one sink. After an error the sink is opened anew, with what it had taken whole."""

    def __init__(self, run: Path, name: str) -> None:
        self.run, self.name, self.folder = run, name, run / "log" / name
        self.folder.mkdir(parents=True, exist_ok=True)
        if links := [path for path in (self.folder.parent, self.folder, *self.folder.iterdir()) if path.is_symlink()]:
            raise UserError(f"{links[0]} is a link, and nothing is written through it; remove it")
        self._sink: Sink | None = None
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the follower of a run that was killed may have some rows left

    def send(self, *, last: bool = False) -> int:
        """Send what is new, and return how many points that was."""
        sent, sink = 0, self._sink or self._open()
        self._sink = None
        news = self._news()
        while batch := list(itertools.islice(news, BATCH)):
            sink.send(batch)
            write_json(self.folder / "state.json", self._state)
            sent += len(batch)
        if last:
            with contextlib.suppress(StopIteration):
                sink.send([])
        self._sink = sink
        return sent

    def _open(self) -> Sink:
        path, head = self.folder / "state.json", read_json(self.run / "run.json")
        fresh: dict[str, Any] = {"id": secrets.token_hex(4), "stages": {}, "points": 0}
        self._state = read_json(path) if path.exists() else fresh
        sink = SINKS[self.name](self.folder, head["name"], self.run.resolve().name, self._state)
        next(sink)
        write_json(path, self._state)
        return sink

    def _news(self) -> Iterator[Point]:
        names = [str(stage["name"]) for stage in read_json(self.run / "run.json")["stages"]]
        for name in filter(STAGE_NAME.fullmatch, names):
            final = self.run / name
            at = final.stat().st_mtime if final.exists() else 0.0
            yield from self._rows(name, max([(at, final), *all_work(self.run, name)])[1])  # older work was abandoned

    def _rows(self, stage: str, folder: Path) -> Iterator[Point]:
        """Yield what is new of a stage, at last its summary. What replaces a stage has another first row, and is another group."""
        record, (lines, _) = readable_record(folder), read_lines(folder / METRICS, missing_ok=True)
        if not lines:
            return
        mark, stages = hashlib.sha256(stage.encode() + lines[0]).hexdigest()[:16], self._state["stages"]
        again = sum(each["name"].partition("~")[0] == stage for each in stages.values())
        name = f"{stage}~{again + 1}" if again else stage
        seen = stages.setdefault(mark, {"name": name, "rows": 0, "step": 0, "time": 0.0})
        if record:
            lines.append(json.dumps({**record.summary, "key": "summary/"}).encode())
        for line in lines[seen["rows"] :]:
            seen["rows"] += 1
            if values := _read(line, seen):
                self._state["points"] += 1
                yield Point(self._state["points"] - 1, seen["name"], seen["step"], seen["time"], values)


def _read(line: bytes, seen: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of a step, of a measurement or of the whole stage, and note its step and time."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        row = json.loads(line)
        kind, _, at = row["key"].partition("/")
        seen["time"] = float(row.get("time", seen["time"]))
        if kind in {"train", "eval", "summary"}:
            seen["step"] = min(abs(int(row.get("step", at or seen["step"]))), 2**62)
            return dict(numbers(row, f"{seen['name']}/" if kind == "train" else f"{seen['name']}/{kind}/"))
    return {}


def send(run: Path, name: str) -> int:
    """Send what a sink has not had of a run that nobody works on."""
    if run_status(run).owner:
        raise UserError(f"{run} is going on; it sends its metrics itself with [log] in its recipe, or wait for it")
    try:
        return Sending(run, name).send(last=True)
    except Exception as error:
        raise UserError(f"{name}: {one_line(error)}") from error


def follow(run: Path, name: str) -> None:
    """Send what a run writes until standard input ends, as it does with the run; only what there is to say goes to standard error."""
    ended, failures, wait, trouble, last = threading.Event(), 0, 0.0, "", False

    def wait_for_end() -> None:
        sys.stdin.buffer.read(1)
        ended.set()
        time.sleep(PATIENCE)
        os.killpg(0, signal.SIGKILL)  # it leads its own group, with what the package has started

    os.nice(10)
    threading.Thread(target=wait_for_end, daemon=True).start()
    sending, said = Sending(run, name), os.fdopen(os.dup(2), "w", buffering=1)
    with (sending.folder / "messages.txt").open("ab") as messages:
        for standard in (1, 2):
            os.dup2(messages.fileno(), standard)
    while not last:
        last = ended.wait(wait)
        try:
            sending.send(last=last)
            wait, trouble = LOOK, ""
        except Exception as error:  # noqa: BLE001 - whatever a package raises, the run goes on
            failures, wait, trouble = failures + 1, min(max(2 * wait, LOOK), SLOWEST), one_line(error)
            if failures == 1:
                said.write(f"log: {name} fails, and is tried again; the run goes on: {trouble}\n")
    if failures:
        rest = f"etude log {run} --to {name} sends what is missing" if trouble else "in the end it has had everything"
        said.write(f"log: {name} failed {failures} times; {rest}\n")


@contextlib.contextmanager
def following(sinks: Sequence[str], run: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Have sinks follow a run while the body runs; its end waits some seconds for them, and never longer."""
    command = [sys.executable, "-P", "-m", "etude", "log", str(run), "--follow", "--to"]
    begun = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        for name in sinks
    }
    try:
        yield
    finally:
        until = time.monotonic() + PATIENCE + LOOK
        for process in begun.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError), process.stdin as end:  # it may have gone
                end.write(b"\n")  # not only closed: a process of a stage may have kept a copy of this end
        for name, process in begun.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if (code := process.poll()) != 0:
                ending = "has not ended" if code is None else f"ended with code {code}"
                say(f"log: {name} {ending}; etude log {run} --to {name} sends what is missing")
