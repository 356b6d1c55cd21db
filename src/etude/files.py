"""Files that are either whole or not there.

Every artefact is written beside its final place, flushed to the disk and renamed: whoever finds a file under its final
name finds all of it, whenever the writer was killed. Digests are SHA-256 in hex throughout.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

READ_BLOCK = 1 << 20


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces. Equal values give equal texts, so equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON-like value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path, on_bytes: Callable[[int], object] | None = None) -> str:
    """Return the SHA-256 of a file; `on_bytes` hears of every block read, for a progress bar."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BLOCK):
            digest.update(block)
            if on_bytes:
                on_bytes(len(block))
    return digest.hexdigest()


def sha256_files(paths: Iterable[Path], on_bytes: Callable[[int], object] = lambda _: None) -> dict[Path, str]:
    """Return the SHA-256 of files, several read at once: one core hashes 1 GB/s, and a large model lies in many files."""
    alone, listed = threading.Lock(), list(paths)
    stopped: list[BaseException] = []  # by whom it is told: Ctrl-C

    def heard(size: int) -> None:
        with alone:
            if stopped:
                raise CancelledError
            try:
                on_bytes(size)
            except BaseException as error:
                stopped.append(error)
                raise

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        try:
            return dict(zip(listed, threads.map(lambda path: sha256_file(path, heard), listed), strict=True))
        except CancelledError:
            raise stopped[0] from None


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder (a rename, a new file) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success it is flushed and takes its final name, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        fsync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left half-written in a folder that this process owns."""
    for left in folder.glob(".*.[0-9]*.part"):
        left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file for people and programs, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def files_below(folder: Path) -> list[Path]:
    """Return all files under a folder in path order, links to files included, folders not."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fsync_tree(folder: Path) -> None:
    """Flush every file and every name under a folder, before it is given its final name."""
    for path in files_below(folder):
        if not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        fsync_folder(path)


def publish_folder(work: Path, final: Path) -> None:
    """Give a finished work folder its final name. `final` must not exist: results are replaced by nobody."""
    fsync_tree(work)
    final.parent.mkdir(parents=True, exist_ok=True)
    work.rename(final)
    fsync_folder(final.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Place the same bytes at `target`: a hard link where the file system allows one, else a copy.

    Only for files that nobody changes in place, that is for files published by this module.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}:
            raise
        shutil.copy2(source, target)


def digest_of_files(digests: Mapping[str, str]) -> str:
    """Return one digest for a set of files, given their digests by relative path."""
    return digest_of(dict(digests))
