"""Fetch one source archive with pip's own index client, so that the user's index, proxy and credentials hold.

`pip download` would run the package's setup.py to learn its dependencies; here no package code runs. It is called as
`python -m etude.data.sources.pip_client NAME==VERSION FOLDER`, in a process of its own, to keep pip's internals out of
ours; it prints the file's name and digest as JSON, or one line on standard error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from packaging.version import parse

from etude.data.sources.archive import SUFFIXES
from etude.errors import nearest
from etude.files import whole_file

SHOWN = 12  # newest versions to choose from


def main(pin: str, folder: Path) -> None:
    """Fetch `pin` into `folder`."""
    try:
        from pip._internal.commands import create_command
    except ImportError:
        sys.exit(f"{sys.executable} has no pip; install it: python -m ensurepip")
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-input"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)  # noqa: SLF001 - as pip does
        link = chosen(finder.find_all_candidates(pin.partition("==")[0]), pin)
        sys.stdout.write(json.dumps(download(session, link, folder)) + "\n")


def chosen(candidates: list[Any], pin: str) -> Any:
    """Return pip's link to the source archive at the pinned version."""
    name, version = pin.split("==")
    if not candidates:
        sys.exit(
            f"the package index has no {name!r} or cannot be reached; check the name, the network and pip's settings"
        )
    archives = sorted((one for one in candidates if one.link.filename.endswith(SUFFIXES)), key=lambda one: one.version)
    links = [one.link for one in archives if parse(str(one.version)) == parse(version)]
    if not links:
        known = [str(one.version) for one in archives[-SHOWN:]]
        sys.exit(f"{name} has no source archive at version {version}{nearest(version, known)}")
    return min(links, key=lambda link: [link.filename.endswith(suffix) for suffix in SUFFIXES].index(True))


def download(session: Any, link: Any, folder: Path) -> dict[str, str]:
    """Write the archive, whole or not at all; return its name and digest."""
    name = Path(link.filename).name
    digest = hashlib.sha256()
    response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
    response.raise_for_status()
    with whole_file(folder / name) as beside, beside.open("wb") as file:
        for block in response.iter_content(1 << 20):
            digest.update(block)
            file.write(block)
        if link.hash_name == "sha256" and link.hash != digest.hexdigest():
            sys.exit(
                f"{name} is not the file that the index promises: its SHA-256 differs; try again, or check the index"
            )
    return {"file": name, "sha256": digest.hexdigest()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
