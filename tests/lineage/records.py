"""Records to test with: every field filled, and a family of three generations."""

from __future__ import annotations

from typing import Any

from etude.lineage.environment import Code, Hardware
from etude.lineage.record import (
    CarriedLicence,
    Compute,
    DataUse,
    FileDigest,
    Lineage,
    Origin,
    Parent,
    RecipeUse,
    Record,
)

UNUSUAL = {"low": 5.0, "high": 9e13, "sampling_flops": 2.0, "sandbox_seconds": 3.0}


def full_record(**changes: Any) -> Record:
    """Return a record in which no field is empty but that of a corpus, whose record would be needed, too."""
    fields: dict[str, Any] = {
        "stage": "cpt",
        "kind": "continued-pretraining",
        "kind_version": 3,
        "fingerprint": "f" * 64,
        "parents": [Parent(name="base", role="weights", record="b" * 64, model_digest="d" * 64)],
        "origin": Origin(
            name="tiny",
            source="hub owner/tiny",
            revision="c0ffee",
            received={"tiny.gguf": FileDigest(sha256="1" * 64, bytes=10)},
            conversion="none",
            continues="tinier",
            pretraining=Compute(
                tokens=5, model_flops=7.0, method="operations", device="abacus", device_seconds=1.5, **UNUSUAL
            ),
            sources={"context": "config.json"},
        ),
        "data": [
            DataUse(
                name="code",
                source="folder /code",
                revision="abc",
                digest="2" * 64,
                files=3,
                bytes=99,
                left_out={"empty": 1},
                licences={"MIT": 99},
                tokens=30,
            )
        ],
        "code": Code(etude="0.1.0", revision="9" * 40, dirty=False),
        "recipe": RecipeUse(hash="3" * 64, stage={"steps": 10}),
        "seeds": {"recipe": 0},
        "packages": {"torch": "2.11.0"},
        "hardware": Hardware(system="Linux x86_64", cpu="cpu", cores=2, memory_bytes=1 << 30, accelerators=["gpu"]),
        "compute": Compute(
            tokens=1234567, model_flops=8.9e12, method="operations", device="gpu", device_seconds=61.0, **UNUSUAL
        ),
        "weights": {"model.safetensors": FileDigest(sha256="4" * 64, bytes=2_500_000)},
        "outputs": {"report.json": FileDigest(sha256="5" * 64, bytes=17)},
        "licences": [CarriedLicence(file="LICENSE", sha256="6" * 64, licence="MIT", inherited_from="tiny")],
        "summary": {"loss": 1.25, "steps": 10, "note": "fine"},
        "started": "2026-11-15T03:06:00+00:00",
        "finished": "2026-11-15T03:12:00+00:00",
        "sessions": 1,
    }
    return Record.model_validate(fields | changes)


def child_of(parent: Record | None, stage: str, *others: Parent) -> Record:
    """Return a record of a stage made from a parent's weights, and from other parents."""
    weights = {"model.safetensors": FileDigest(sha256=stage[0] * 64, bytes=1000)}
    edges = (
        [Parent(name=parent.stage, role="weights", record=parent.id, model_digest=parent.model_digest)]
        if parent
        else []
    )
    origin = full_record().origin if parent is None else None
    made = {"parents": [*edges, *others], "weights": weights, "origin": origin}
    return full_record(stage=stage, kind=stage, **made)


def corpus_record(*teachers: Parent) -> Record:
    """Return the record of a corpus."""
    outputs = {
        "manifest.json": FileDigest(sha256="8" * 64, bytes=100),
        "shards/0": FileDigest(sha256="9" * 64, bytes=9),
    }
    made: dict[str, Any] = {"parents": teachers, "weights": {}, "outputs": outputs, "origin": None, "licences": []}
    return full_record(stage="data", kind="data", **made)


def three_generations() -> tuple[Lineage, list[Record]]:
    """Return the lineage of a model with a parent, which learned from a corpus and a teacher without a record, and a base."""
    teacher = Parent(name="teacher-9b", role="teacher", record=None, model_digest="e" * 64)
    base = child_of(None, "base")
    corpus = corpus_record(Parent(name="gone", role="teacher", record="0" * 64, model_digest="e" * 64))
    middle = child_of(base, "cpt", teacher).model_copy(update={"corpus": corpus.id})
    last = child_of(middle, "sft")
    lineage = Lineage.of(last, [Lineage.of(middle, [Lineage.of(base, [])], corpus)])
    return lineage, [base, middle, last]
