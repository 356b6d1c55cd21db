"""The folder of a run, and what it means for a stage in it to be finished.

    RUN/recipe.toml         the resolved recipe of the last command
    RUN/run.json            the stages in order, and the command that continues
    RUN/lock                who works on it
    RUN/STAGE/              a finished stage: model/, metrics.jsonl, record.json and what else it makes
    RUN/.work/STAGE-…/      a stage at work, or interrupted; renamed when it is finished
    RUN/.replaced/STAGE-…/  finished stages that a changed recipe has replaced; kept, and used again if it changes back

Everything a finished stage has was written under `.work` and came here in one rename.

One process at a time works on a run.

The kernel holds the lock (`flock`), so it ends with its owner, however that dies; the file beside it only tells who the
owner is. A lock file left by a dead owner therefore stops nobody, and is taken over with a word about it.

Ctrl-C and SIGTERM: stop at the next safe place, keep every finished unit, say how to go on.

A unit at hand is dropped and done again by the next session. A second signal stops at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from etude.errors import Interrupted, UserError
from etude.files import link_or_copy, publish_folder, read_json, sha256_file, write_json
from etude.lineage.record import LINEAGE_FILE, RECORD_FILE, FileDigest, Record, load_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.progress import Reporter

MODEL = "model"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
SHORT = 12  # characters of a digest in a folder name


@dataclass(frozen=True)
class RunFolder:
    """Where things are in a run."""

    path: Path

    def stage(self, name: str) -> Path:
        """Return the folder of a finished stage."""
        return self.path / name

    def work(self, name: str, fingerprint: str) -> Path:
        """Return the folder of a stage at work."""
        return self.path / ".work" / f"{name}-{fingerprint[:SHORT]}"

    def replaced(self, name: str, fingerprint: str) -> Path:
        """Return where a replaced stage is kept."""
        return self.path / ".replaced" / f"{name}-{fingerprint[:SHORT]}"

    def other_work(self, name: str, fingerprint: str) -> list[Path]:
        """Return unfinished work on a stage under other settings."""
        return [path for _, path in self.works(name) if path != self.work(name, fingerprint)]

    def works(self, name: str) -> list[tuple[float, Path]]:
        """Return all folders of a stage at work with the time each was touched, the last one at the end."""
        pattern = re.compile(rf"{re.escape(name)}-[0-9a-f]{{{SHORT}}}")  # not those of a stage whose name starts alike
        found = []
        for path in (self.path / ".work").glob(f"{name}-*"):
            with contextlib.suppress(FileNotFoundError):  # published while we look
                if pattern.fullmatch(path.name):
                    found.append((path.stat().st_mtime, path))
        return sorted(found)

    def adopting(self, name: str, fingerprint: str) -> Path:
        """Return where finished work from elsewhere is placed first.

        Not the stage's own work folder: files are linked to another run's, and work appends to its metrics in place.
        """
        return self.path / ".work" / f"{name}-{fingerprint[:SHORT]}.adopting"


def recorded_files(record: Record) -> dict[str, FileDigest]:
    """Return all files of a stage by path inside its folder."""
    return {f"{MODEL}/{name}": digest for name, digest in record.weights.items()} | record.outputs


def finished(folder: Path, fingerprint: str) -> Record | None:
    """Return the record if the folder holds this very work, whole by the sizes of its files; else None."""
    record = readable_record(folder) if (folder / RECORD_FILE).is_file() else None
    whole = record is not None and record.fingerprint == fingerprint and not missing_files(folder, record)
    return record if whole else None  # by the sizes of its files: reading them all is for taking them elsewhere


def readable_record(folder: Path) -> Record | None:
    """Return the record of a folder; None if there is none that can be read, for then the stage is done again."""
    try:
        return load_record(folder)
    except UserError:
        return None


def missing_files(folder: Path, record: Record) -> list[str]:
    """Return the recorded files that are gone or have another size."""
    lineage = f"{MODEL}/{LINEAGE_FILE}"
    unnamed = [lineage] if record.weights and not (folder / lineage).is_file() else []
    files = {name: (folder / name, digest.bytes) for name, digest in recorded_files(record).items()}
    return unnamed + [name for name, (file, size) in files.items() if not file.is_file() or file.stat().st_size != size]


def publish_stage(run: RunFolder, name: str, work: Path, index: StageIndex) -> None:
    """Give finished work its place, keeping what was there before under other settings."""
    final = run.stage(name)
    if final.exists():
        record = readable_record(final)
        aside = run.replaced(name, record.fingerprint if record else "damaged")
        shutil.rmtree(aside, ignore_errors=True)
        publish_folder(final, aside)
        if record:
            index.add(record.fingerprint, aside)
    publish_folder(work, final)
    index.add(load_record(final).fingerprint, final)


@dataclass(frozen=True)
class StageIndex:
    """Where on this machine finished stages are, by fingerprint: a hint that is checked, never trusted."""

    cache: Path

    def add(self, fingerprint: str, folder: Path) -> None:
        """Remember a finished stage."""
        write_json(self._entry(fingerprint), {"folder": str(folder.resolve())})

    def find(self, fingerprint: str) -> Path | None:
        """Return the folder of a finished stage with this fingerprint, if it is still there and whole."""
        entry = self._entry(fingerprint)
        try:
            folder = entry.parent.joinpath(read_json(entry)["folder"])
            return folder if finished(folder, fingerprint) else None
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None  # a hint that is gone or damaged is no hint

    def _entry(self, fingerprint: str) -> Path:
        return self.cache / "stages" / f"{fingerprint}.json"


def adopt(source: Path, place: Path, reporter: Reporter) -> bool:
    """Place a finished stage of another run into a new folder, checking every byte; False if it does not check out.

    Only what the record names is taken: whatever else lies there is somebody else's. The other run is not locked, so its
    files may go away meanwhile: then this is False as well.
    """
    shutil.rmtree(place, ignore_errors=True)
    try:
        record = load_record(source)
        recorded = recorded_files(record)
        with reporter.task(f"checking {source}", sum(digest.bytes for digest in recorded.values()), "B") as task:
            for name, digest in recorded.items():
                if sha256_file(source / name, task.advance) != digest.sha256:
                    reporter.say(f"{source / name} is not what its record says; doing the stage again")
                    return False
        for name in [*recorded, *([f"{MODEL}/{LINEAGE_FILE}"] if record.weights else []), RECORD_FILE]:
            file, target = source / name, place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                target.symlink_to(file.readlink())
            else:
                link_or_copy(file, target)
    except (FileNotFoundError, UserError):
        reporter.say(f"{source} went away; doing the stage again")
        return False
    return True


LOCK_FILE = "lock"
LOOKS, LOOK_AGAIN = 10, 0.02  # times, seconds


class RunLock:
    """Holds a run for this process. Use as a context manager."""

    def __init__(self, run: Path, say: Callable[[str], object]) -> None:
        self.path = run / LOCK_FILE
        self.say = say
        self._descriptor = -1

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._take():
            os.close(self._descriptor)
            raise UserError(_refusal(self.path.parent, read_owner(self.path)))
        before = read_owner(self.path)
        if before:
            who = f"process {before['pid']} on {before['host']}"
            self.say(f"taking over {self.path.parent}: its last owner, {who}, ended without finishing")
        owner = {"pid": os.getpid(), "host": platform.node(), "name": _process_name(os.getpid()), "since": time.time()}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)
        return self

    def _take(self) -> bool:
        """Take the kernel's lock; look again for a moment, since `etude status` holds it while it looks."""
        for _ in range(LOOKS):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_AGAIN)
            else:
                return True
        return False

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._descriptor, 0)  # an empty file: nobody owns it, and nobody died
        os.close(self._descriptor)


def _refusal(run: Path, owner: dict[str, Any] | None) -> str:
    if owner is None:
        return f"{run} is being used by another process; wait for it"
    who = f"process {owner['pid']} ({owner['name']}) on {owner['host']}"
    if owner["host"] == platform.node() and not Path(f"/proc/{owner['pid']}").exists() and Path("/proc").exists():
        return f"{run}: {who} has ended, but a process it started still holds the run; end that one first"
    return f"{run} is being used by {who}; wait for it, stop it, or choose another folder with --out"


def read_owner(lock_file: Path) -> dict[str, Any] | None:
    """Return who wrote the lock file last, or None if it was left in order."""
    try:
        owner = json.loads(lock_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "name"} <= set(owner) else None


def running_owner(run: Path) -> dict[str, Any] | None:
    """Return the process that works on a run now, or None. Takes nothing over."""
    lock_file = run / LOCK_FILE
    if not lock_file.exists():
        return None
    with lock_file.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_owner(lock_file) or {"pid": 0, "host": "unknown", "name": "unknown"}
    return None


def _process_name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "etude"
    program, *rest = [os.fsdecode(word) for word in words if word]
    return " ".join([Path(program).name, *rest]).replace("\n", " ")[:120]


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers that the user asked to stop. Use as a context manager in the main thread."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _frame: object) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        self.say("stopping at the next safe place; once more to stop at once")

    def check(self) -> None:
        """Raise Interrupted if the user asked to stop. Called where everything so far is on disk."""
        if self.signal_number is not None:
            raise Interrupted(self.signal_number)
