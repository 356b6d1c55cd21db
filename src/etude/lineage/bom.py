"""The release as a CycloneDX 1.7 machine-learning bill of materials.

`pedigree.ancestors` is the family tree, `formulation` the list of stages, data components are what they read. The JSON is written by
hand and validated by CycloneDX's own library: its object model has no model card, and drops one it reads without a word.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from etude.files import canonical_json
from etude.lineage.release_facts import NOT_KNOWN, audited, edges, in_order, licence_terms, trained_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.lineage.record import DataUse, FileDigest, Lineage, Record
    from etude.lineage.release_facts import Release

MODEL = "machine-learning-model"
APPROACHES = {
    "pretrain": "self-supervised", "cpt": "self-supervised", "extend": "self-supervised", "mtp": "self-supervised",
    "sft": "supervised", "rl": "reinforcement-learning",
}  # fmt: skip


def bom(release: Release) -> dict[str, Any]:
    """Return the bill of materials, `bom.cdx.json`."""
    uses = {data_ref(use): use for _, use in trained_on(release.lineage)}
    others = {f"{edge.role}:{edge.model_digest}": edge for _, edge in edges(release.lineage, "teacher", "judge")}
    head, provider = release.head, release.provider
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{identity(release)}",
        "version": 1,
        "metadata": {
            "timestamp": head.finished,
            "tools": {"components": [{"type": "application", "name": "etude", "version": head.code.etude}]},
            **({"supplier": {"name": provider.name}} if provider.name else {}),
            "component": _model(release, list(uses)),
        },
        "components": [
            *(_dataset(ref, use) for ref, use in uses.items()),
            *({"type": MODEL, "bom-ref": ref, "name": edge.name, "description": edge.role,
               "properties": _properties({"model_digest": edge.model_digest, "record": edge.record})}
              for ref, edge in others.items()),
        ],
        "dependencies": [{"ref": "model", "dependsOn": [*uses, *others]}],
        "formulation": [{"bom-ref": "formulation", "workflows": [_workflow(release.lineage)]}],
    }  # fmt: skip


def bom_errors(document: Mapping[str, Any]) -> list[str]:
    """Return what CycloneDX's strict validator finds wrong, a line each."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    found = JsonStrictValidator(SchemaVersion.V1_7).validate_str(canonical_json(document), all_errors=True)
    return [str(error).splitlines()[0] for error in found or ()]


def identity(release: Release) -> uuid.UUID:
    """Return the same identity for the same release whenever its documents are written."""
    return uuid.uuid5(uuid.NAMESPACE_OID, canonical_json([release.name, release.version, release.lineage.head]))


def data_ref(use: DataUse) -> str:
    """Return how a dataset is referred to. Two sources may hold the same bytes."""
    return f"data:{use.name}:{use.digest}"


def _model(release: Release, datasets: list[str]) -> dict[str, Any]:
    terms = licence_terms(release)
    compute = canonical_json(dict(release.compute)) if release.compute else NOT_KNOWN
    facts = {
        "record": release.lineage.head,
        "model_digest": release.head.model_digest,
        "compute": compute,
        "audit": audited(release),
    }
    return {
        "type": MODEL, "bom-ref": "model", "name": release.name, "version": release.version,
        "licenses": [{"expression": " AND ".join(terms)}] if terms else [],
        "pedigree": {"ancestors": _ancestors(release.lineage, release.head, set())},
        "modelCard": _card(release, datasets),
        "components": _files(release.files),
        "properties": _properties(facts),
    }  # fmt: skip


def _ancestors(lineage: Lineage, record: Record, told: set[str]) -> list[dict[str, Any]]:
    """Return the parents whose weights were continued, each with its own. One that was told before is only named again."""
    found = []
    for edge in record.parents:
        if edge.role != "weights":
            continue
        parent = lineage.records[edge.record] if edge.record else None
        name = parent.origin.name if parent and parent.origin else edge.name
        properties = _properties({"model_digest": edge.model_digest, "record": edge.record})
        about: dict[str, Any] = {"type": MODEL, "name": name, "properties": properties}
        if parent and edge.record not in told:
            told.add(parent.id)
            about["pedigree"] = {"ancestors": _ancestors(lineage, parent, told), "notes": f"made by {parent.kind}"}
            about["components"] = _files(parent.weights)
        found.append(about)
    return found


def _files(files: Mapping[str, FileDigest]) -> list[dict[str, Any]]:
    return [{"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": file.sha256}]}
            for path, file in sorted(files.items())]  # fmt: skip


def _card(release: Release, datasets: list[str]) -> dict[str, Any]:
    shape, use = release.architecture, release.provider.intended_use
    told = {"architectureFamily": shape.family, "modelArchitecture": shape.name}
    approach = {"approach": {"type": APPROACHES[release.head.kind]}} if release.head.kind in APPROACHES else {}
    metrics: list[dict[str, Any]] = []
    for row in release.evaluation:
        bounds = dict(zip(("lowerBound", "upperBound"), map(str, row.interval or ()), strict=False))
        metrics.append({"type": row.metric, "value": str(row.value), "slice": row.task, "confidenceInterval": bounds})
    facts = {
        "parameters": shape.parameters,
        "context": shape.context,
        "dtypes": ", ".join(shape.dtypes),
        "energy": NOT_KNOWN,
    }
    return {
        "modelParameters": {
            **approach, "task": "text-generation", **{key: value for key, value in told.items() if value},
            "datasets": [{"ref": ref} for ref in datasets], "inputs": [{"format": "text"}], "outputs": [{"format": "text"}],
        },
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {"useCases": [use] if use else []},
        "properties": _properties(facts),
    }  # fmt: skip


def _dataset(ref: str, use: DataUse) -> dict[str, Any]:
    facts: dict[str, object] = {
        **use.model_dump(include={"source", "revision", "digest", "files", "bytes"}),
        **{f"licence-bytes:{name}": count for name, count in use.licences.items()},
        **{f"left-out:{reason}": count for reason, count in use.left_out.items()},
    }
    contents = [{"type": "dataset", "name": use.name, "contents": {"properties": _properties(facts)}}]
    licences = [{"license": {"name": name}} for name in sorted(use.licences)]
    return {"type": "data", "bom-ref": ref, "name": use.name, "licenses": licences, "data": contents}


def _workflow(lineage: Lineage) -> dict[str, Any]:
    """Return the stages as tasks, each with those it waited for and the data it read."""
    tasks, waits = [], []
    for record in in_order(lineage):
        ref, spent = f"stage:{record.id}", record.compute.model_dump(mode="json", exclude_none=True)
        facts = {"kind": record.kind, "recipe": record.recipe.hash, **{f"compute.{key}": spent[key] for key in spent}}
        tasks.append({
            "bom-ref": ref, "uid": record.id, "name": record.stage, "taskTypes": ["merge" if record.kind == "merge" else "build"],
            "timeStart": record.started, "timeEnd": record.finished, "properties": _properties(facts),
            "inputs": [{"resource": {"ref": each}} for each in dict.fromkeys(map(data_ref, record.data))],
        })  # fmt: skip
        waits.append(
            {"ref": ref, "dependsOn": sorted({f"stage:{edge.record}" for edge in record.parents if edge.record})}
        )
    return {"bom-ref": "stages", "uid": lineage.head, "taskTypes": ["build"], "tasks": tasks, "taskDependencies": waits}


def _properties(facts: Mapping[str, object]) -> list[dict[str, str]]:
    return [
        {"name": f"etude:{key}", "value": NOT_KNOWN if value is None else str(value)} for key, value in facts.items()
    ]
