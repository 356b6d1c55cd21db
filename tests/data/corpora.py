"""Small corpora that are written by hand, for tests of what reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.data.manifest import Manifest, ShardEntry
from etude.data.packing import dtype_for

if TYPE_CHECKING:
    from pathlib import Path


def write_manifest(
    folder: Path,
    shards: list[dict[str, Any]],
    shares: dict[str, float],
    *,
    length: int,
    separator: int,
    vocabulary: int,
) -> None:
    """Write the manifest of a corpus of which only the shards are there."""
    Manifest(
        etude="0", seed=0, length=length, dtype=dtype_for(vocabulary), separator=separator, vocabulary=vocabulary,
        tokeniser="", exact_fast_tokeniser=True, shares=shares, histogram={}, contamination=None, sources=[],
        shards=[ShardEntry(**shard) for shard in shards], tools={}, settings={},
    ).save(folder)  # fmt: skip
