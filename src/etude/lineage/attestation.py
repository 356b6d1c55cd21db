"""A stage as an in-toto statement with SLSA provenance: these weights came from those inputs, under these settings.

There is no predicate for training in in-toto's list; provenance says it all if a kind of stage is taken as a build type. Inputs
that are not one file are named by digests of ours, whose algorithm stands in docs/records.md: `etudeModel` and `etudeData`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.lineage.record import FileDigest, Lineage, Record

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"


def statement(record: Record, lineage: Lineage) -> dict[str, Any]:
    """Return the statement about one stage of a lineage, ready to be signed."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": _files(record.weights),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:etude:stage:{record.kind}:{record.kind_version}",
                "externalParameters": {"stage": record.stage, "settings": record.recipe.stage},
                "internalParameters": {
                    "recipe": record.recipe.hash, "fingerprint": record.fingerprint, "seeds": record.seeds,
                    "packages": record.packages,
                },
                "resolvedDependencies": _dependencies(record, lineage),
            },
            "runDetails": {
                "builder": {"id": "urn:etude:local", "version": {"etude": record.code.etude}},
                "metadata": {"invocationId": record.id, "startedOn": record.started, "finishedOn": record.finished},
                "byproducts": [
                    {"name": "record", "digest": {"etudeRecord": record.id}},
                    {"name": "compute", "annotations": record.compute.model_dump(mode="json")},
                    {"name": "hardware", "annotations": record.hardware.model_dump(mode="json")},
                    *_files(record.outputs),
                ],
            },
        },
    }  # fmt: skip


def statement_errors(document: Mapping[str, Any]) -> list[str]:
    """Return what in-toto's own types and checks find wrong, at most one line."""
    from google.protobuf.json_format import ParseDict, ParseError
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    try:
        Statement.copy_from_pb(ParseDict(dict(document), Message())).validate()
        if document.get("predicateType") == PREDICATE_TYPE:
            ParseDict(document["predicate"], Provenance())
    except (ParseError, ValueError) as error:
        return [str(error).splitlines()[0]]
    return []


def _dependencies(record: Record, lineage: Lineage) -> list[dict[str, Any]]:
    """Return what went in: parents by the files of their weights, data, and the program."""
    found: list[dict[str, Any]] = []
    for edge in record.parents:
        about = {"role": edge.role, "record": edge.record, "etudeModel": edge.model_digest}
        files = _files(lineage.records[edge.record].weights, f"{edge.name}/") if edge.record else []
        found += [file | {"annotations": about} for file in files]
        if not files:
            found.append({"name": edge.name, "digest": {"etudeModel": edge.model_digest}, "annotations": about})
    for use in record.data:
        counts = {"source": use.source, "revision": use.revision, "files": use.files, "licences": use.licences}
        found.append({"name": use.name, "digest": {"etudeData": use.digest}, "annotations": counts})
    if record.origin:
        found += _files(record.origin.received, f"{record.origin.name}/")
    commit = {"digest": {"gitCommit": record.code.revision}} if record.code.revision else {}
    return [*found, {"name": "etude", **commit, "annotations": record.code.model_dump(mode="json")}]


def _files(files: Mapping[str, FileDigest], prefix: str = "") -> list[dict[str, Any]]:
    return [{"name": prefix + name, "digest": {"sha256": file.sha256}} for name, file in sorted(files.items())]
