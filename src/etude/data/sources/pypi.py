"""Packages at versions, as their source archives; kept in the cache, and checked whenever they are used again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from etude.data.sources.archive import ArchivePart
from etude.data.sources.opened import OpenSource
from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

FETCHERS = 4
PIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9._!+-]*")


def pins_of(settings: SourceSettings) -> list[str]:
    """Return the packages, each once, as they are written."""
    for pin in settings.pypi:
        if not PIN.fullmatch(pin):
            raise UserError(f"source {settings.name!r}: {pin!r} is no package at a version; write it as name==version")
    return list(dict.fromkeys(settings.pypi))


def open_pypi(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch what is not in the cache; each package is a part."""
    pins = pins_of(settings)
    folder = cache / "sdists"
    with reporter.task("fetching packages", len(pins), "packages") as task, ThreadPoolExecutor(FETCHERS) as pool:
        fetching = [pool.submit(_fetched, pin, folder) for pin in pins]
        try:
            for fetched in as_completed(fetching):
                fetched.result()
                task.advance()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    notes = [fetched.result() for fetched in fetching]
    digest = digest_of([[pin, note["sha256"]] for pin, note in zip(pins, notes, strict=True)])
    parts = [ArchivePart(str(folder / note["file"]), most_bytes) for note in notes]
    return OpenSource(f"package {', '.join(pins)}", digest, [*parts])


def _fetched(pin: str, folder: Path) -> dict[str, str]:
    """Return the name and the digest of a package's archive in the cache, fetching it if it is not there as it was."""
    note = folder / f"{pin}.json"
    try:
        known: dict[str, str] = read_json(note)
        if sha256_file(folder / known["file"]) == known["sha256"]:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not whole
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.data.sources.pip_client", pin, str(folder)]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if pip.returncode:
        said = pip.stderr.strip().splitlines() or ["pip said nothing"]
        raise UserError(f"cannot fetch {pin}: {said[-1]}")
    known = json.loads(pip.stdout.splitlines()[-1])
    write_json(note, known)
    return known
