"""A run as a folder of pages that open from disk: the served pages, without what only a server can do.

What is reached from the run's page is written; of rollouts, of which there may be hundreds of thousands, no more than was asked for.
A link to a page that is not written becomes plain text, so that nothing leads nowhere.
"""

from __future__ import annotations

import posixpath
import re
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import unquote

from etude.errors import UserError
from etude.files import write_text
from etude.web.app import STATIC, static_file
from etude.web.reading import Shelf
from etude.web.site import Site

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter

BOUNDED = re.compile(r"/(rollout|trial)-[0-9-]+\.html$")
LINK = re.compile(r'<a href="([^"]*)"[^>]*>(.*?)</a>', re.DOTALL)


def export_run(run: Path, folder: Path, rollouts: int, reporter: Reporter) -> tuple[int, int]:
    """Write the pages of a run into a new folder; return how many files there are, and how many pages were left out."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose a new folder")
    if not (run / "run.json").exists():
        raise UserError(f"{run} is not the folder of a run (no run.json)")
    site = Site(Shelf([run]))
    pages, left = _reached(site, rollouts)
    with reporter.task("writing pages", len(pages), "pages") as task:
        for path in pages:
            write_text(folder / path, _unlinked(site.page(path, served=False), path, pages))
            task.advance(1)
    for name in [*STATIC, "uplot.LICENSE.txt"]:
        write_text(folder / "static" / name, static_file(name).decode())
    return len(pages) + len(STATIC) + 1, left


def _reached(site: Site, rollouts: int) -> tuple[dict[str, None], int]:
    """Return the pages that the first leads to, in the order of reaching them, and how many were too many."""
    found, waiting, left = {"index.html": None}, deque(f"run/{each.key}/index.html" for each in site.shelf.runs), 0
    room = rollouts
    while waiting:
        path = waiting.popleft()
        if path in found:
            continue
        if BOUNDED.search(path):
            if room <= 0:
                left += 1
                continue
            room -= 1
        found[path] = None
        try:
            more = site.view(unquote(path)).more
        except KeyError:
            del found[path]
            continue
        waiting.extend(posixpath.join(posixpath.dirname(path), unquote(each)) for each in more)
    return found, left


def _unlinked(text: str, path: str, pages: dict[str, None]) -> str:
    """Return a page whose links to pages that are not written are text."""

    def kept(found: re.Match[str]) -> str:
        address = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(found[1])))
        return found[0] if found[1].startswith("#") or address in pages else found[2]

    return LINK.sub(kept, text)
