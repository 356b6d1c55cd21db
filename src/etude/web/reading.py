"""A run's folder, read while others write it, and never further than the folder goes.

Files of lines grow to gigabytes, so they are indexed by the byte offset of each line, once, and then only what was appended is read.
A run may come from anybody: no link in it is followed, and no name in it leads out of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import threading
import time
import tomllib
from array import array
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

from etude.errors import UserError, one_line
from etude.lineage.record import RECORD_FILE
from etude.report.status import RunStatus, StageStatus, run_status
from etude.rooted import READ, Rooted, parts_of
from etude.run.folder import METRICS, all_work, readable_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from etude.lineage.record import Record

PIECE = 1 << 20  # bytes read at once
LONGEST = 256 << 20  # bytes of a line, beyond which a file is not one of lines
TURN = 0.02  # seconds of reading after which others have their turn
FRESH = 0.5  # seconds for which what is known of a run's state is believed
LARGEST = 64 << 20  # bytes of a file that is read as a whole
Kept = TypeVar("Kept")


class Lines:
    """The whole lines of a file that is appended to."""

    def __init__(self, open_file: Callable[[], IO[bytes]]) -> None:
        self._open = open_file
        self.starts = array("Q", [0])  # of every whole line, and where the next one will begin
        self._file_id: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def news(self) -> Iterator[bytes]:
        """Yield the lines that were appended since this was last asked. A file that became another one is read anew: `restarted`."""
        with self._open() as file:
            about = os.fstat(file.fileno())
            if self._file_id != (about.st_dev, about.st_ino) or about.st_size < self.starts[-1]:
                self._file_id, self.starts = (about.st_dev, about.st_ino), array("Q", [0])
            file.seek(self.starts[-1])
            left = b""
            while piece := file.read(PIECE):
                *whole, left = (left + piece).split(b"\n")
                if len(left) > LONGEST:
                    raise UserError(f"line {len(self) + 1} has more than {LONGEST:,} bytes; it is no file of Etude")
                for line in whole:
                    self.starts.append(self.starts[-1] + len(line) + 1)
                    yield line

    def line(self, number: int) -> bytes:
        """Return a line by its number, from 0."""
        with self._open() as file:
            file.seek(self.starts[number])
            return file.read(self.starts[number + 1] - self.starts[number] - 1)


class Follower:
    """Something that is made of a file's lines as they come, in a thread: who looks waits a moment, and else sees what there is."""

    def __init__(self, lines: Lines, patience: float | None) -> None:
        self.lines, self.patience = lines, patience  # seconds; None: until all is read
        self.complete = False
        self.trouble = ""  # why the rest cannot be read
        self._busy = threading.Lock()

    def take(self, line: bytes, number: int) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        """Forget everything: the file became another one."""
        raise NotImplementedError

    def follow(self) -> Self:
        """Read what was appended, and return itself."""
        if self._busy.acquire(blocking=False):
            reading = threading.Thread(target=self._read, daemon=True)
            reading.start()
            reading.join(self.patience)
        return self

    def _read(self) -> None:
        since = time.monotonic()
        try:
            for line in self.lines.news():
                self.complete = False
                if len(self.lines) == 1:
                    self.clear()
                self.take(line, len(self.lines) - 1)
                if time.monotonic() - since > TURN:
                    time.sleep(TURN / 4)  # others have their turn
                    since = time.monotonic()
            self.complete = True
        except FileNotFoundError:  # not begun, or published meanwhile: its stage is elsewhere now
            self.complete = True
        except UserError as error:
            self.trouble, self.complete = str(error), True
        finally:
            self._busy.release()


class Stage:
    """One stage of a run, wherever its folder is now."""

    def __init__(self, run: Run, status: StageStatus) -> None:
        self.run, self.name, self.kind, self.state, self.status = run, status.name, status.kind, status.state, status
        self.path = status.name
        if self.state in {"running", "stopped"} and (works := all_work(run.folder, self.name)):
            self.path = f".work/{works[-1][1].name}"

    @property
    def folder(self) -> Path:
        return self.run.folder / self.path

    @property
    def address(self) -> str:
        """Where its pages are, from the top."""
        return f"run/{self.run.key}/{quote(self.name)}"

    def has(self, name: str) -> bool:
        return self.run.has(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        return self.run.read(f"{self.path}/{name}")

    def json(self, name: str) -> Any:
        """Return a JSON file of the stage; None if it has none, or none that can be read."""
        return self.run.json(f"{self.path}/{name}")

    def lines(self, name: str) -> Lines:
        return self.run.lines(f"{self.path}/{name}")

    @property
    def record(self) -> Record | None:
        if not self.has(RECORD_FILE):
            return None
        return self.run.kept(f"{self.path}/{RECORD_FILE}", "record", lambda: readable_record(self.folder))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings it runs with: those of its record, or of the run's recipe while it has none."""
        if record := self.record:
            return record.recipe.stage
        settings = self.run.recipe.get(self.name, {})
        return settings if isinstance(settings, dict) else {}


class Run:
    """A run's folder."""

    def __init__(self, key: str, folder: Path, patience: float | None) -> None:
        self.key, self.folder, self.patience = key, folder, patience
        self.caches: dict[str, Any] = {}  # what was made of its files, by what and where; made once for each file
        self._status: tuple[float, RunStatus] | None = None

    def opened(self, path: str) -> IO[bytes]:
        """Open a file below the folder. FileNotFoundError: there is none, or a link leads to it."""
        try:
            with Rooted(self.folder) as rooted, rooted.holder(path) as (held, name):
                file = os.fdopen(os.open(name, READ, dir_fd=held), "rb")
        except OSError as error:
            raise FileNotFoundError(path) from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise FileNotFoundError(path)
        return file

    def has(self, path: str) -> bool:
        """Whether a file or a folder is there, and no link on the way."""
        with contextlib.suppress(OSError), Rooted(self.folder) as rooted:
            about = rooted.stat(path)
            return about is not None and not stat.S_ISLNK(about.st_mode)
        return False

    def read(self, path: str) -> bytes:
        with self.opened(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{path} has more than {LARGEST:,} bytes; it is not shown")
        return content

    def json(self, path: str) -> Any:
        with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
            return json.loads(self.read(path))
        return None

    def lines(self, path: str) -> Lines:
        made: Lines = self.caches.setdefault(f"lines of {path}", Lines(lambda: self.opened(path)))
        return made

    def kept(self, path: str, what: str, make: Callable[[], Kept]) -> Kept:
        """Return what is made of a file, made again when the file has changed. `what`: its name, as several may be made of one."""
        with self.opened(path) as file:
            about = os.fstat(file.fileno())
        mark = (about.st_ino, about.st_mtime_ns, about.st_size)
        key = f"{what} of {path}"
        if (known := self.caches.get(key)) is None or known[0] != mark:
            known = self.caches[key] = mark, make()
        made: Kept = known[1]
        return made

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe of the last command; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, UserError):
            return tomllib.loads(self.read("recipe.toml").decode())
        return {}

    @property
    def status(self) -> RunStatus:
        """How it stands; UserError says why that cannot be known."""
        if self._status is None or time.monotonic() - self._status[0] > FRESH:
            head = self.json("run.json")
            names = [each.get("name") for each in head["stages"]] if _is_head(head) else []
            if odd := [name for name in names if not _is_plain(name)]:
                raise UserError(f"run.json names a stage {odd[0]!r}, which is no name of a folder; it is not read")
            if linked := [name for name in names if os.path.islink(self.folder / name)]:  # noqa: PTH114
                raise UserError(f"the stage {linked[0]!r} is a link; it is not followed")
            self._status = time.monotonic(), run_status(self.folder)
        return self._status[1]

    @property
    def stages(self) -> list[Stage]:
        return [Stage(self, each) for each in self.status.stages]

    def stage(self, name: str) -> Stage:
        """Return a stage by its name. KeyError: there is none."""
        return {each.name: each for each in self.stages}[name]

    @property
    def mark(self) -> str:
        """What changes whenever the run does, or more of it is read: sizes and times of what is appended to, states of stages."""
        marks: list[Any] = [(each.name, each.state, each.path) for each in self.stages]
        marks += [each.complete and len(each.lines) for each in [*self.caches.values()] if isinstance(each, Follower)]
        for each in self.stages:
            for name in (METRICS, "ledger.jsonl", "trials.jsonl", "progress.json"):
                with contextlib.suppress(OSError), self.opened(f"{each.path}/{name}") as file:
                    about = os.fstat(file.fileno())
                    marks.append((about.st_size, about.st_mtime_ns))
        return f"{hash(str(marks)) & 0xFFFFFFFFFFFF:x}"


def _is_head(head: Any) -> bool:
    stages = head.get("stages") if isinstance(head, dict) else None
    return isinstance(stages, list) and all(isinstance(each, dict) for each in stages)


def _is_plain(name: Any) -> bool:
    """Whether a stage's name is one name below the run, and not of those that the run itself uses."""
    try:
        return isinstance(name, str) and len(parts_of(name)) == 1 and not name.startswith(".") and name.isprintable()
    except OSError:
        return False


class Shelf:
    """All runs there are: those named, and those in folders of runs. Looked for anew each time, as runs begin while we look."""

    def __init__(self, folders: list[Path], patience: float | None = None) -> None:
        self.folders, self.patience = [folder.absolute() for folder in folders], patience
        self._runs: dict[Path, Run] = {}
        self._keys: dict[str, Run] = {}

    @property
    def runs(self) -> list[Run]:
        """The runs, those changed last first."""
        found = []
        for folder in self.folders:
            inside = [folder] if (folder / "run.json").exists() else _below(folder)
            found += [self._run(each) for each in inside]
        return sorted(dict.fromkeys(found), key=lambda run: -_changed(run.folder))

    def run(self, key: str) -> Run:
        """Return a run by its key. KeyError: there is none."""
        if key not in self._keys:
            _ = self.runs
        return self._keys[key]

    def _run(self, folder: Path) -> Run:
        if folder not in self._runs:
            name = "".join(char if (char.isalnum() and char.isascii()) or char in "-_" else "-" for char in folder.name)
            name = name[:60].strip("-") or "run"
            numbered = (f"{name}-{number}" for number in itertools.count(2))
            key = next(each for each in itertools.chain([name], numbered) if each not in self._keys)
            self._runs[folder] = self._keys[key] = Run(key, folder, self.patience)
        return self._runs[folder]


def _below(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [each for each in folder.iterdir() if not each.is_symlink() and (each / "run.json").is_file()]
    return []


def _changed(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / "run.json").stat().st_mtime
    return 0.0


def why(error: Exception) -> str:
    """Return in a line what is wrong with a file."""
    return f"{error} is not there" if isinstance(error, FileNotFoundError) else one_line(error)
