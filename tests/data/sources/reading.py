"""Reading whole sources, for tests."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.document import Drop, Raw
from etude.data.settings import SourceSettings
from etude.data.sources import OpenSource, identify_source, open_source
from etude.progress import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from etude.data.document import Part
    from etude.data.sources.package import Archive

MOST = 1000


def settings_of(**location: Any) -> SourceSettings:
    return SourceSettings(name="some", **location)


def opened(cache: Path = Path("/nonexistent"), most_bytes: int = MOST, **location: Any) -> OpenSource:
    return open_source(settings_of(**location), most_bytes, cache, Reporter(quiet=True))


def identity(**location: Any) -> dict[str, Any]:
    return identify_source(settings_of(**location))


def entries(parts: Iterable[Part | Archive]) -> list[Raw | Drop]:
    """Read everything as a worker does, after pickling; a part read twice gives the same."""
    found: list[Raw | Drop] = []
    for part in parts:
        there: Part | Archive = pickle.loads(pickle.dumps(part))
        read = list(there.read())
        assert read == list(part.read())
        found += read
    return found


def texts(parts: Iterable[Part | Archive]) -> dict[str, bytes]:
    raws = [entry for entry in entries(parts) if isinstance(entry, Raw)]
    assert len({(raw.repository, raw.path) for raw in raws}) == len(raws)
    return {raw.path: raw.content for raw in raws}


def reasons(parts: Iterable[Part | Archive]) -> dict[str, str]:
    drops = [entry for entry in entries(parts) if isinstance(entry, Drop)]
    assert {drop.step for drop in drops} <= {"read"}
    return {drop.path: drop.reason for drop in drops}
