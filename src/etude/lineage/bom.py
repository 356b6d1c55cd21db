"""The bills of materials of a release: a CycloneDX 1.7 machine-learning BOM and an SPDX 3.0.1 document.

CycloneDX: `pedigree.ancestors` is the family tree, `formulation` the list of stages, data components are what they read. The JSON is
written by hand and validated by CycloneDX's own library: its object model has no model card, and drops one it reads without a word.
SPDX is written by hand, too, and read back by SPDX's own model in `spdx_errors`.

SPDX: one AI package a model of the tree, one dataset package a source of data. It has a field for energy and none for operations, so
compute stands among the hyperparameters. Conformance is claimed with the core, software and licensing profiles only: those for AI and
datasets also want a place to download from, which a folder cannot know.
"""

from __future__ import annotations

import datetime
import json
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from etude.files import canonical_json
from etude.lineage.card import LIMITS
from etude.lineage.facts import NOT_KNOWN, Release, edges, in_order, licence_terms, trained_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.lineage.record import DataUse, FileDigest, Lineage, Parent, Record

MODEL = "machine-learning-model"
MADE = "_:CreationInfo0"
APPROACHES = {
    "pretrain": "self-supervised", "cpt": "self-supervised", "extend": "self-supervised", "mtp": "self-supervised",
    "sft": "supervised", "rl": "reinforcement-learning",
}  # fmt: skip


def bom(release: Release) -> dict[str, Any]:
    """Return the bill of materials, `bom.cdx.json`."""
    uses = _datasets(release.lineage)
    others = {f"{edge.role}:{edge.model_digest}": edge for _, edge in edges(release.lineage, "teacher", "judge")}
    head, supplier = release.head, release.product.organisation.name
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{identity(release)}",
        "version": 1,
        "metadata": {
            "timestamp": head.finished,
            "tools": {"components": [{"type": "application", "name": "etude", "version": head.code.etude}]},
            **({"supplier": {"name": supplier}} if supplier else {}),
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

    errors = JsonStrictValidator(SchemaVersion.V1_7).validate_str(canonical_json(document), all_errors=True)
    return [str(error).splitlines()[0] for error in errors or ()]


def identity(release: Release) -> uuid.UUID:
    """Return the same identity for the same release whenever its documents are written."""
    return uuid.uuid5(uuid.NAMESPACE_OID, canonical_json([release.name, release.version, release.lineage.head]))


def _ref(use: DataUse) -> str:
    """Return how a dataset is referred to. Two sources may hold the same bytes."""
    return f"data:{use.name}:{use.digest}"


def _datasets(lineage: Lineage) -> dict[str, DataUse]:
    return {_ref(use): use for _, use in trained_on(lineage)}


def _model(release: Release, datasets: list[str]) -> dict[str, Any]:
    terms = licence_terms(release)
    compute = canonical_json(dict(release.compute)) if release.compute else NOT_KNOWN
    digest = release.head.model_digest
    facts = {"record": release.lineage.head, "model_digest": digest, "compute": compute, "audit": release.audited}
    return {
        "type": MODEL, "bom-ref": "model", "name": release.name, "version": release.version,
        "licenses": [{"expression": " AND ".join(terms)}] if terms else [],
        "pedigree": {"ancestors": _ancestors(release.lineage, release.head, set())},
        "modelCard": _card(release, datasets),
        "components": _files(release.files),
        "properties": _properties(facts),
    }  # fmt: skip


def _ancestors(lineage: Lineage, record: Record, seen: set[str]) -> list[dict[str, Any]]:
    """Return the parents whose weights were continued, each with its own. One that came before is only named again."""
    ancestors = []
    for edge in (edge for edge in record.parents if edge.role == "weights"):
        parent = lineage.records[edge.record] if edge.record else None
        name = parent.origin.name if parent and parent.origin else edge.name
        properties = _properties({"model_digest": edge.model_digest, "record": edge.record})
        about: dict[str, Any] = {"type": MODEL, "name": name, "properties": properties}
        if parent and edge.record not in seen:
            seen.add(parent.id)
            about["pedigree"] = {"ancestors": _ancestors(lineage, parent, seen), "notes": f"made by {parent.kind}"}
            about["components"] = _files(parent.weights)
        ancestors.append(about)
    return ancestors


def _files(files: Mapping[str, FileDigest]) -> list[dict[str, Any]]:
    return [{"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": file.sha256}]}
            for path, file in sorted(files.items())]  # fmt: skip


def _card(release: Release, datasets: list[str]) -> dict[str, Any]:
    shape, use, kind = release.architecture, release.product.intended_use, APPROACHES.get(release.head.kind)
    approach = kind and {"type": kind}
    optional = {"approach": approach, "architectureFamily": shape.family, "modelArchitecture": shape.name}
    metrics: list[dict[str, Any]] = []
    for row in release.evaluation:
        bounds = dict(zip(("lowerBound", "upperBound"), map(str, row.interval or ()), strict=False))
        metrics.append({"type": row.metric, "value": str(row.value), "slice": row.task, "confidenceInterval": bounds})
    facts = {"parameters": shape.parameters, "context": shape.context, "dtypes": ", ".join(shape.dtypes)}
    return {
        "modelParameters": {
            "task": "text-generation", **{key: value for key, value in optional.items() if value},
            "datasets": [{"ref": ref} for ref in datasets], "inputs": [{"format": "text"}], "outputs": [{"format": "text"}],
        },
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {"useCases": [use] if use else []},
        "properties": _properties({**facts, "energy": NOT_KNOWN}),
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
        ref, facts = f"stage:{record.id}", {"kind": record.kind, "recipe": record.recipe.hash, **_spent(record)}
        tasks.append({
            "bom-ref": ref, "uid": record.id, "name": record.stage, "taskTypes": ["merge" if record.kind == "merge" else "build"],
            "timeStart": record.started, "timeEnd": record.finished, "properties": _properties(facts),
            "inputs": [{"resource": {"ref": each}} for each in dict.fromkeys(map(_ref, record.data))],
        })  # fmt: skip
        above = {*(edge.record for edge in record.parents), record.corpus} & lineage.records.keys()
        parents = {f"stage:{key}" for key in above}
        waits.append({"ref": ref, "dependsOn": sorted(parents)})
    return {"bom-ref": "stages", "uid": lineage.head, "taskTypes": ["build"], "tasks": tasks, "taskDependencies": waits}


def _spent(record: Record) -> dict[str, Any]:
    spent = record.compute.model_dump(mode="json", exclude_none=True)
    return {f"compute.{key}": value for key, value in spent.items()}


def _properties(facts: Mapping[str, object]) -> list[dict[str, str]]:
    words = {key: NOT_KNOWN if value is None else str(value) for key, value in facts.items()}
    return [{"name": f"etude:{key}", "value": value} for key, value in words.items()]


def spdx_errors(text: str) -> list[str]:
    """Return what SPDX's own model finds wrong: what it cannot read, at most a line, and what refers to nothing."""
    from spdx_python_model import LoadError, load_data

    try:
        model, objects = load_data(json.loads(text))
        unknown = objects.link()
        model.JSONLDSerializer().serialize_data(objects)
    except (LoadError, ValueError, TypeError, KeyError, IndexError) as error:
        return [str(error).splitlines()[0]]
    return [f"{name} is referred to and not in the document" for name in sorted(unknown)]


def spdx(release: Release) -> str:
    """Return the document, `spdx.json`, as JSON-LD."""
    graph, lineage, supplier = _Graph(release), release.lineage, release.product.organisation.name
    agent = graph.add("Agent" if supplier else "SoftwareAgent", "agent", name=supplier or "Etude")
    tool = graph.add("Tool", "etude", name=f"Etude {release.head.code.etude}")
    records = [record for record in in_order(lineage) if record.id not in lineage.corpora]
    data = {ref: _spdx_dataset(graph, ref, use) for ref, use in _datasets(lineage).items()}
    models = {record.id: _spdx_model(graph, record) for record in records}
    top = models[lineage.head]
    graph.elements[top] |= _spdx_top(release) | ({"suppliedBy": agent} if supplier else {})
    for record in records:
        for edge in record.parents:
            _spdx_edge(graph, models, record, edge)
    for record in in_order(lineage, "weights"):
        if refs := dict.fromkeys(map(_ref, record.data)):
            graph.relate(models[record.id], "trainedOn", [data[ref] for ref in refs])
    graph.relate(top, "contains", [
        graph.add("software_File", f"file-{path}", name=path,
                  verifiedUsing=[{"type": "Hash", "algorithm": "sha256", "hashValue": file.sha256}])
        for path, file in sorted(release.files.items())
    ])  # fmt: skip
    graph.relate(top, "hasConcludedLicense", [_spdx_licence(graph, release)])
    profiles = ["core", "software", "simpleLicensing"]
    graph.add("SpdxDocument", "document", name=release.name, rootElement=[top], profileConformance=profiles)
    made = {"type": "CreationInfo", "@id": MADE, "created": _time(release.head.finished), "createdBy": [agent],
            "createdUsing": [tool], "specVersion": "3.0.1"}  # fmt: skip
    elements = [made, *(graph.elements[address] for address in sorted(graph.elements))]
    context = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
    return json.dumps({"@context": context, "@graph": elements}, indent=1) + "\n"


class _Graph:
    """Collects the elements of a document, each with an address of its own."""

    def __init__(self, release: Release) -> None:
        self.start = f"urn:uuid:{identity(release)}#"
        self.elements: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, address: str, **fields: Any) -> str:
        """Add an element without its empty fields, and return how others refer to it."""
        name = self.start + quote(address)
        said = {key: value for key, value in fields.items() if value != []}
        self.elements[name] = {"type": kind, "spdxId": name, "creationInfo": MADE, **said}
        return name

    def relate(self, start: str, how: str, ends: Sequence[str], **more: str) -> None:
        """Say how an element stands to others."""
        fields = {"from": start, "relationshipType": how, "to": list(ends), **more}
        self.add("Relationship", f"relationship-{len(self.elements)}", **fields)


def _spdx_model(graph: _Graph, record: Record) -> str:
    return graph.add(
        "ai_AIPackage", f"model-{record.id}", name=record.origin.name if record.origin else record.stage,
        software_primaryPurpose="model", builtTime=_time(record.finished),
        ai_informationAboutTraining=f"{record.kind}; record {record.id}; weights {record.model_digest}",
        ai_hyperparameter=_entries(_spent(record)), ai_useSensitivePersonalInformation="noAssertion",
    )  # fmt: skip


def _spdx_top(release: Release) -> dict[str, Any]:
    """Return what is known of the released model and not of its ancestors."""
    scores = {f"{row.task}: {row.metric}": row.value for row in release.evaluation}
    return {
        "name": release.name, "software_packageVersion": release.version, "ai_limitation": " ".join(LIMITS),
        "ai_typeOfModel": [name for name in ("transformer", release.architecture.family) if name],
        "ai_informationAboutApplication": release.product.intended_use or NOT_KNOWN,
        **({"ai_metric": _entries(scores)} if scores else {}),
    }  # fmt: skip


def _spdx_edge(graph: _Graph, models: dict[str, str], record: Record, edge: Parent) -> None:
    key = edge.record or edge.model_digest
    if key not in models:  # of which nothing is known but its name and the digest of its weights
        comment = f"it carries no record; weights {edge.model_digest}"
        models[key] = graph.add("ai_AIPackage", f"model-{edge.model_digest}", name=edge.name, comment=comment)
    if edge.role == "weights":
        graph.relate(models[key], "ancestorOf", [models[record.id]])
    else:
        graph.relate(models[record.id], "other", [models[key]], comment=f"{edge.role}: {edge.name}")


def _spdx_dataset(graph: _Graph, ref: str, use: DataUse) -> str:
    licences = ", ".join(f"{name}: {count} bytes" for name, count in sorted(use.licences.items()))
    return graph.add(
        "dataset_DatasetPackage", ref, name=use.name, software_sourceInfo=use.source,
        comment=f"digest {use.digest}; licences: {licences or NOT_KNOWN}", software_primaryPurpose="data",
        dataset_datasetSize=use.bytes, dataset_datasetType=["text"],
        dataset_dataPreprocessing=[f"left out, {reason}: {count}" for reason, count in sorted(use.left_out.items())],
        dataset_hasSensitivePersonalInformation="noAssertion",
    )  # fmt: skip


def _spdx_licence(graph: _Graph, release: Release) -> str:
    """State the terms of all ancestors together, and where a text lies that has no SPDX name."""
    terms, text = licence_terms(release), "The text lies in the release, see LICENSE, NOTICE and LICENSES/."
    custom = {
        term: graph.add("simplelicensing_SimpleLicensingText", term, simplelicensing_licenseText=text)
        for term in terms if term.startswith("LicenseRef-")
    }  # fmt: skip
    expression = " AND ".join(terms) or "NOASSERTION"
    return graph.add("simplelicensing_LicenseExpression", "licence", simplelicensing_licenseExpression=expression,
                     simplelicensing_customIdToUri=_entries(custom))  # fmt: skip


def _entries(facts: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"type": "DictionaryEntry", "key": key, "value": str(value)} for key, value in facts.items()]


def _time(text: str) -> str:
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
