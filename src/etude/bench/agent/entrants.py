"""Models as contestants: played by a policy that is loaded when its turn comes, and told from others of their name."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from etude.agent.endpoint import BYTES
from etude.bench.agent.contestant import Contestant
from etude.files import digest_of, files_below
from etude.lineage.record import LINEAGE_FILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from etude.agent.policies import Found
    from etude.bench.agent.contestant import Player


def entrant(found: Found, name: str = "") -> Contestant:
    """Return a model as a contestant; without a name given, one from a folder is called NAME@DIGEST."""
    marked = f"{found.name}@{weights_mark(found.folder)}" if found.folder and not name else found.name
    return Contestant(name or marked, partial(_playing, found), 1 if found.folder else BYTES)


@asynccontextmanager
async def _playing(found: Found) -> AsyncIterator[Player]:
    policy, talk = await found.open()
    try:
        yield lambda _task: (policy, talk)
    finally:
        await policy.close()


def weights_mark(folder: Path) -> str:
    """Return what tells a model from others of its name: trials of one must not pass for the other's.

    It is made of its record, which has the weights' digests, and of its files' sizes: reading all weights would take minutes.
    """
    record = folder / LINEAGE_FILE
    sizes = [[path.name, path.stat().st_size] for path in files_below(folder)]
    return digest_of([record.read_text(encoding="utf-8") if record.is_file() else "", sizes])[:6]
