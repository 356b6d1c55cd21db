"""The facts of a release, collected once: the card, the bills of materials, the gate and `etude verify` all read them here.

Nothing here is asked of a person but `product`; everything else comes from records and files. A fact that nobody recorded is None,
and each document says so in the words of `NOT_KNOWN`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.files import read_json
from etude.lineage.licences import obligations
from etude.lineage.weight_files import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.lineage.duties import Duty, Product
    from etude.lineage.record import CarriedLicence, DataUse, FileDigest, Lineage, Origin, Parent, Record

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
class Release:
    """All facts of a release. `files`: by path in the release folder, without the documents that are made from this."""

    name: str
    version: str
    lineage: Lineage
    files: Mapping[str, FileDigest]
    architecture: Architecture
    product: Product  # what only the releasing person can say
    licence: str | None = None  # id of our own LICENSE, if its text is known
    duties: Sequence[Duty] = ()
    compute_lines: Sequence[str] = ()  # the shares of compute in words, `Shares.lines()`
    compute: Mapping[str, Any] = field(default_factory=dict)  # the same for programs, `Shares.to_json()`
    evaluation: Sequence[Measured] = ()
    audited: str = "compared with no known base"  # what the audit of the weights says, and against what

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


@dataclass(frozen=True)
class Claim:
    """A base that a tree says its weights start from."""

    name: str
    digest: str  # of its weights


def in_order(lineage: Lineage, *roles: str) -> list[Record]:
    """Return the head and its ancestors, corpora included, parents before children; `roles`: follow only such edges."""
    ordered: dict[str, Record] = {}

    def visit(key: str) -> None:
        for edge in lineage.records[key].parents:
            if edge.record in lineage.records and edge.record not in ordered and (not roles or edge.role in roles):
                visit(edge.record)
        if (corpus := lineage.records[key].corpus) and not roles:
            visit(corpus)
        ordered[key] = lineage.records[key]

    visit(lineage.head)
    return list(ordered.values())


def roots(lineage: Lineage) -> list[tuple[Record, Origin]]:
    """Return the records of the bases a model grew from: those with an origin that have no such ancestor themselves."""
    bases, grown = [], set()
    for record in in_order(lineage, "weights"):
        inherits = any(edge.record in grown for edge in record.parents if edge.role == "weights")
        if record.origin and not inherits:
            bases.append((record, record.origin))
        if record.origin or inherits:
            grown.add(record.id)
    return bases


def claims(lineage: Lineage) -> list[Claim]:
    """Return the bases of a tree, parents without a record included; none for a model made from nothing."""
    recordless = [Claim(edge.name, edge.model_digest) for _, edge in edges(lineage, "weights") if edge.record is None]
    known = [Claim(origin.name, base.model_digest) for base, origin in roots(lineage)]
    return list(dict.fromkeys([*known, *recordless]))


def base_names(lineage: Lineage) -> list[str]:
    """Return the names of the bases, by hub name where they came from the hub; empty: trained from scratch."""
    sources = {base.model_digest: origin.source for base, origin in roots(lineage)}
    hub = {digest: source[4:] for digest, source in sources.items() if source.startswith("hub ")}
    return list(dict.fromkeys(hub.get(claim.digest, claim.name) for claim in claims(lineage)))


def edges(lineage: Lineage, *roles: str) -> list[tuple[Record, Parent]]:
    """Return the edges of such roles into the records whose weights the model continues."""
    return [(record, edge) for record in in_order(lineage, "weights") for edge in record.parents if edge.role in roles]


def trained_on(lineage: Lineage) -> list[tuple[Record, DataUse]]:
    """Return all data that went into the weights, by the stage that read it."""
    return [(record, use) for record in in_order(lineage, "weights") for use in record.data]


def carried(lineage: Lineage) -> list[CarriedLicence]:
    """Return the licence files of the whole tree: those of the head, and any text that only an ancestor had."""
    own = lineage.records[lineage.head].licences
    others = {each.sha256: each for record in in_order(lineage) for each in record.licences}
    return [*own, *(each for sha256, each in others.items() if sha256 not in {mine.sha256 for mine in own})]


def shown_source(source: str) -> str:
    """Return where something came from as strangers may read it: of a path on somebody's machine the last part."""
    return re.sub(r"^(.*\b(?:folder|file|git|parquet|jsonl) )?(?:file://)?[~/](?:.*/)?(?=[^/]+/?$)", r"\1…/", source)


def without_places(value: Any) -> Any:
    """Return a record, as JSON, whose paths on this machine are cut to their last part: it goes out with every release."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    return shown_source(value) if isinstance(value, str) else value


def is_notice(file: str, *others: str) -> bool:
    """Say whether a licence file is a notice, or one of other such kinds, which are no licences of their own."""
    return PurePosixPath(file).name.upper().startswith(("NOTICE", *others))


def licence_terms(release: Release) -> list[str]:
    """Return the SPDX ids of all licences that apply at once, our own first. Notices are no licences of their own."""
    known = {entry["id"]: str(entry["spdx"]) for entry in obligations()}
    texts = [each for each in carried(release.lineage) if each.licence or not is_notice(each.file, "COPYRIGHT")]
    terms = [(each.licence, each.sha256) for each in texts]
    ours = release.files.get("LICENSE")
    if release.licence or (ours and ours.sha256 not in {each.sha256 for each in texts}):
        terms.insert(0, (release.licence, ours.sha256 if ours else ""))
    return list(dict.fromkeys(known[name] if name else f"LicenseRef-unidentified-{sha[:12]}" for name, sha in terms))
