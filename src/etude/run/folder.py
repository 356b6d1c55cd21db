"""The folder of a run: what is where, what makes a stage in it finished, and the lock that admits one process at a time.

    RUN/recipe.toml         the resolved recipe of the last command
    RUN/run.json            the stages in order, and the command that continues
    RUN/lock                who works on it
    RUN/STAGE/              a finished stage: model/, metrics.jsonl, record.json and what else it makes
    RUN/.work/STAGE-…/      a stage in progress, or interrupted; renamed when it is finished
    RUN/.replaced/STAGE-…/  finished stages that a changed recipe has replaced; kept, and used again if it changes back

Everything in a finished stage was written under `.work` and came here in one rename.

The kernel holds the lock (`flock`), so it ends with its owner, however that dies; the file only names the owner. A lock
file of a dead owner therefore stops nobody, and is taken over with a message.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import link_or_copy, publish_folder, read_json, sha256_files, write_json
from etude.lineage.record import LINEAGE_FILE, RECORD_FILE, FileDigest, Record, load_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from etude.progress import Reporter

MODEL = "model"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
RELEASE = "release"  # the folder that a release stage makes inside its own
SHORT = 12  # characters of a digest in a folder name


def work_of(run: Path, name: str, fingerprint: str) -> Path:
    """Return the folder of a stage in progress."""
    return run / ".work" / f"{name}-{fingerprint[:SHORT]}"


def replaced(run: Path, name: str, fingerprint: str) -> Path:
    """Return where a replaced stage is kept."""
    return run / ".replaced" / f"{name}-{fingerprint[:SHORT]}"


def all_work(run: Path, name: str) -> list[tuple[float, Path]]:
    """Return all work folders of a stage with the time each was changed, the latest last."""
    works = []
    for path in (run / ".work").glob(f"{name}-{'[0-9a-f]' * SHORT}"):  # not of a stage whose name starts alike
        with contextlib.suppress(FileNotFoundError):  # published meanwhile
            works.append((path.stat().st_mtime, path))
    return sorted(works)


def recorded_files(record: Record) -> dict[str, FileDigest]:
    """Return all files of a stage by path inside its folder."""
    return {f"{MODEL}/{name}": digest for name, digest in record.weights.items()} | record.outputs


def finished(folder: Path, fingerprint: str) -> Record | None:
    """Return the record if the folder holds this very work, whole by the sizes of its files; else None."""
    record = readable_record(folder)
    if record is None or record.fingerprint != fingerprint or missing_files(folder, record):
        return None
    return record


def readable_record(folder: Path) -> Record | None:
    """Return the record of a folder; None if there is none that can be read, for then the stage is done again."""
    try:
        return load_record(folder)
    except (UserError, NotADirectoryError):
        return None


def missing_files(folder: Path, record: Record) -> list[str]:
    """Return the recorded files that are gone or have another size."""
    lineage = f"{MODEL}/{LINEAGE_FILE}"
    unnamed = [lineage] if record.weights and not (folder / lineage).is_file() else []
    files = {name: (folder / name, digest.bytes) for name, digest in recorded_files(record).items()}
    return unnamed + [name for name, (file, size) in files.items() if not file.is_file() or file.stat().st_size != size]


def publish_stage(final: Path, work: Path, cache: Path) -> None:
    """Give finished work its place, keeping what was there before under other settings."""
    if final.exists():
        record = readable_record(final)
        aside = replaced(final.parent, final.name, record.fingerprint if record else "damaged")
        shutil.rmtree(aside, ignore_errors=True)
        publish_folder(final, aside)
        if record:
            remember(cache, record.fingerprint, aside)
    publish_folder(work, final)
    remember(cache, load_record(final).fingerprint, final)


def remember(cache: Path, fingerprint: str, folder: Path) -> None:
    """Note where on this machine a finished stage is: a hint that is checked, never trusted."""
    write_json(cache / "stages" / f"{fingerprint}.json", {"folder": str(folder.resolve())})


def recall(cache: Path, fingerprint: str) -> Path | None:
    """Return where a finished stage with this fingerprint was last; None if the hint is gone or damaged."""
    try:
        return Path(read_json(cache / "stages" / f"{fingerprint}.json")["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def adopt(source: Path, place: Path, reporter: Reporter) -> bool:
    """Place a finished stage of another run into a new folder, checking every byte; False if it does not check out.

    Only what the record names is taken. The other run is not locked, so its files may go away meanwhile: then this is
    False as well. `place` is not the stage's own work folder: its files are linked to the other run's, and work appends
    to its metrics in place.
    """
    shutil.rmtree(place, ignore_errors=True)
    try:
        record = load_record(source)
        recorded = recorded_files(record)
        with reporter.task(f"checking {source}", sum(digest.bytes for digest in recorded.values()), "B") as task:
            digests = sha256_files([source / name for name in recorded], task.advance)
        for name, digest in recorded.items():
            if digests[source / name] != digest.sha256:
                reporter.say(f"{source / name} is not what its record says; running the stage again")
                return False
        for name in [*recorded, *([f"{MODEL}/{LINEAGE_FILE}"] if record.weights else []), RECORD_FILE]:
            file, target = source / name, place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                target.symlink_to(file.readlink())
            else:
                link_or_copy(file, target)
    except (FileNotFoundError, UserError):
        reporter.say(f"{source} went away; running the stage again")
        return False
    return True


LOCK_FILE = "lock"
LOOKS, LOOK_AGAIN = 10, 0.02  # times, seconds


@contextlib.contextmanager
def lock_run(run: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Hold a run for this process; another one that holds it is named in the error."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # parents are made, so here nothing can be: /proc and the like
        raise UserError(f"no folder can be made at {run}; choose another one with --out") from None
    path = run / LOCK_FILE
    with path.open("a+b", buffering=0) as file:
        if not _take(file.fileno()):
            raise UserError(_refusal(run, read_owner(path)))
        if before := read_owner(path):
            who = f"process {before['pid']} on {before['host']}"
            say(f"taking over {run}: its last owner, {who}, ended without finishing")
        command = " ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]).replace("\n", " ")[:120]
        owner = {"pid": os.getpid(), "host": platform.node(), "name": command, "since": time.time()}
        file.truncate(0)
        file.write(json.dumps(owner).encode())
        try:
            yield
        finally:
            file.truncate(0)  # an empty file: nobody owns it, and nobody died


def _take(descriptor: int) -> bool:
    """Take the kernel's lock; look again for a moment, since `etude status` holds it while it looks."""
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOOK_AGAIN)
    return False


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
    path = run / LOCK_FILE
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return read_owner(path) or {"pid": 0, "host": "unknown", "name": "unknown"}
    return None
