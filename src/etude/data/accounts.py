"""What became of everything: the counts of the units of a source, added up to its entry in the manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from etude.data.manifest import SourceEntry
from etude.data.shape import SHAPED
from etude.data.units import RESULT
from etude.errors import UserError
from etude.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.data.compare import Dropped
    from etude.data.settings import SourceSettings
    from etude.data.sources import OpenSource

NO_TEXT = ("read: ", "decode: ")  # steps whose drops have no tokens
REASONS = 3  # given when nothing is left of a source


def _added(results: Sequence[Mapping[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result[key])
    return total


def source_entry(
    source: SourceSettings,
    opened: OpenSource,
    folders: Sequence[Path],
    duplicates: Sequence[Dropped],
    repositories: int,
    heldout: Sequence[str],
) -> SourceEntry:
    """Return the entry of a source in the manifest."""
    filtered = [read_json(folder / RESULT) for folder in folders]
    shaped = [read_json(folder / SHAPED) for folder in folders]
    tallies = [result["tally"] for result in filtered]
    numbers = {key: sum(tally[key] for tally in tallies) for key in ("documents_in", "bytes_in", "kept", "kept_bytes")}
    gone, gone_bytes = _added(duplicates, "documents"), _added(duplicates, "bytes")
    kept_bytes = numbers["kept_bytes"] - gone_bytes.total()
    tokens = _added(shaped, "totals")
    written = tokens["train"] + tokens["heldout"]
    lost = _added(tallies, "dropped_bytes")
    no_text = sum(size for reason, size in lost.items() if reason.startswith(NO_TEXT))
    return SourceEntry(
        name=source.name,
        domain=source.domain,
        location=opened.location,
        revision=opened.revision,
        digest=hashlib.sha256("".join(result["digest"] for result in filtered).encode()).hexdigest(),
        documents_in=numbers["documents_in"],
        bytes_in=numbers["bytes_in"],
        kept=numbers["kept"] - gone.total(),
        kept_bytes=kept_bytes,
        drops=_sorted(_added(tallies, "drops") + gone),
        dropped_bytes=_sorted(lost + gone_bytes),
        scrubbed=_sorted(_added(filtered, "scrubbed")),
        repositories=repositories,
        heldout_repositories=sorted(heldout),
        licences=_sorted(_added(shaped, "licences")),
        languages=_sorted(_added(shaped, "languages")),
        evidence=_sorted(_added(shaped, "evidence")),
        tokens={split: tokens[split] for split in ("train", "heldout")},
        text_bytes={split: tokens[f"{split}_bytes"] for split in ("train", "heldout")},
        tokens_in=round((numbers["bytes_in"] - no_text) * written / kept_bytes) if kept_bytes else 0,
        fim=tokens["fim"],
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    """Return counts, the largest first; equal ones by name, so that the order is fixed."""
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def refuse_empty(name: str, documents_in: int, drops: Mapping[str, int]) -> None:
    """Say why nothing is left of a source."""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in list(_sorted(Counter(drops)).items())[:REASONS])
    unlicensed = reasons.partition(" ")[2].startswith("licence: licence unknown")
    advice = 'set its `licence`, if you know it, or `unknown = "keep"`' if unlicensed else "change its settings"
    raise UserError(
        f"source {name!r}: not one of its {documents_in:,} documents is left ({reasons or 'there were none'}); "
        f"{advice}, or take it out of the recipe"
    )
