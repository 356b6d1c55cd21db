"""What the documents of a release are written from: one set of facts, so that the card, the BOMs and the forms cannot disagree.

Nothing here is asked of a person but `Provider`; everything else comes from records and files. A fact that nobody recorded is None,
and each document says so in the words of `NOT_KNOWN`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.files import read_json
from etude.lineage.licences import obligations
from etude.lineage.weight_files import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from etude.lineage.duties import Duty
    from etude.lineage.record import CarriedLicence, DataUse, FileDigest, Lineage, Parent, Record

NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Architecture:
    """What the files of a model say about its shape."""

    family: str | None  # `model_type` of config.json
    name: str | None  # the class that loads it
    parameters: int
    context: int | None  # positions
    dtypes: tuple[str, ...]  # of the tensors, as safetensors calls them


@dataclass(frozen=True)
class Measured:
    """One number of an evaluation."""

    task: str  # what was asked, such as the name of the task set
    metric: str  # such as `avg@5`
    value: float
    interval: tuple[float, float] | None = None  # of 95%
    note: str = ""  # under which rules, on how many tasks


@dataclass(frozen=True)
class Provider:
    """What only the releasing person can say."""

    name: str | None = None
    contact: str | None = None
    intended_use: str | None = None
    release_date: str | None = None  # ISO 8601


@dataclass(frozen=True)
class Release:
    """All facts of a release. `files`: by path in the release folder, without the documents that are made from this."""

    name: str
    version: str
    lineage: Lineage
    files: Mapping[str, FileDigest]
    architecture: Architecture
    licence: str | None = None  # id of our own LICENSE, if its text is known
    duties: Sequence[Duty] = ()
    compute_lines: Sequence[str] = ()  # the shares of compute in words, `Shares.lines()`
    compute: Mapping[str, Any] = field(default_factory=dict)  # the same for programs, `Shares.to_json()`
    evaluation: Sequence[Measured] = ()
    audit: Mapping[str, Any] | None = None  # `Finding.to_json()`; None: not audited
    provider: Provider = field(default_factory=Provider)

    @property
    def head(self) -> Record:
        """The record of the released model."""
        return self.lineage.records[self.lineage.head]


def read_architecture(folder: Path) -> Architecture:
    """Read a model's shape from its config and from the headers of its weights, without loading them."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config", config)
    tensors = [each for file in sorted(folder.glob("*.safetensors")) for each in read_header(file).tensors.values()]
    return Architecture(
        family=config.get("model_type"),
        name=(config.get("architectures") or [None])[0],
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        context=inner.get("max_position_embeddings"),
        dtypes=tuple(sorted({tensor.dtype for tensor in tensors})),
    )


def in_order(lineage: Lineage, *roles: str) -> list[Record]:
    """Return the head and its ancestors, parents before children; `roles`: follow only such edges."""
    found: dict[str, Record] = {}

    def visit(key: str) -> None:
        for edge in lineage.records[key].parents:
            if edge.record and edge.record not in found and (not roles or edge.role in roles):
                visit(edge.record)
        found[key] = lineage.records[key]

    visit(lineage.head)
    return list(found.values())


def roots(lineage: Lineage) -> list[Record]:
    """Return the records of the bases a model grew from: those with an origin that have no such ancestor themselves."""
    found, grown = [], set()
    for record in in_order(lineage, "weights"):
        inherits = any(edge.record in grown for edge in record.parents if edge.role == "weights")
        if record.origin and not inherits:
            found.append(record)
        if record.origin or inherits:
            grown.add(record.id)
    return found


def base_names(lineage: Lineage) -> list[str]:
    """Return what the bases are called, by hub name where they came from the hub; empty: trained from scratch."""
    origins = [record.origin for record in roots(lineage) if record.origin]
    names = [origin.source[4:] if origin.source.startswith("hub ") else origin.name for origin in origins]
    recordless = [edge.name for record, edge in edges(lineage, "weights") if edge.record is None]
    return list(dict.fromkeys([*names, *recordless]))


def edges(lineage: Lineage, *roles: str) -> list[tuple[Record, Parent]]:
    """Return the edges of such roles into the records whose weights the model continues."""
    return [(record, edge) for record in in_order(lineage, "weights") for edge in record.parents if edge.role in roles]


def trained_on(lineage: Lineage) -> list[tuple[Record, DataUse]]:
    """Return all data that went into the weights, by the stage that read it."""
    return [(record, use) for record in in_order(lineage, "weights") for use in record.data]


def carried(lineage: Lineage) -> list[CarriedLicence]:
    """Return the licence files of the whole tree: those of the head, and any text that only an ancestor had."""
    own = lineage.records[lineage.head].licences
    told = {each.sha256 for each in own}
    others = {each.sha256: each for record in in_order(lineage) for each in record.licences if each.sha256 not in told}
    return [*own, *others.values()]


def licence_terms(release: Release) -> list[str]:
    """Return the SPDX ids of all licences that apply at once, our own first. Notices are no licences of their own."""
    known = {entry["id"]: str(entry["spdx"]) for entry in obligations()}
    files = carried(release.lineage)
    ours = release.files.get("LICENSE")
    own = [known[release.licence]] if release.licence else []
    if ours and not own and ours.sha256 not in {each.sha256 for each in files}:
        own = [f"LicenseRef-unidentified-{ours.sha256[:12]}"]
    theirs = [
        known[each.licence] if each.licence else f"LicenseRef-unidentified-{each.sha256[:12]}"
        for each in files
        if each.licence or not PurePosixPath(each.file).name.upper().startswith(("NOTICE", "COPYRIGHT"))
    ]
    return list(dict.fromkeys([*own, *theirs]))


def audited(release: Release) -> str:
    """Return what the audit of the weights says, and against what."""
    audit = release.audit
    return f"against {audit['reference']}: {audit['verdict']['sentence']}" if audit else "compared with no known base"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; what would break a cell, or be taken for HTML, is escaped."""
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    text = NOT_KNOWN if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
