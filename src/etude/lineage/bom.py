"""The bills of materials of a release: a CycloneDX 1.7 machine-learning BOM and an SPDX 3.0.1 document.

CycloneDX: `pedigree.ancestors` is the family tree, `formulation` the list of stages, data components are what they read. The JSON is
written by hand and validated by CycloneDX's own library: its object model has no model card, and drops one it reads without a word.

SPDX: one AI package a model of the tree, one dataset package a source of data. It has a field for energy and none for operations, so
compute stands among the hyperparameters. Conformance is claimed with the core, software and licensing profiles only: those for AI and
datasets also want a place to download from, which a folder cannot know.
"""

from __future__ import annotations

import datetime
import itertools
import json
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from etude.files import canonical_json
from etude.lineage.card import LIMITS
from etude.lineage.facts import NOT_KNOWN, edges, in_order, licence_terms, trained_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from etude.lineage.facts import Release
    from etude.lineage.record import DataUse, FileDigest, Lineage, Parent, Record

MODEL = "machine-learning-model"
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
        ref, spent = f"stage:{record.id}", record.compute.model_dump(mode="json", exclude_none=True)
        facts = {"kind": record.kind, "recipe": record.recipe.hash, **{f"compute.{key}": spent[key] for key in spent}}
        tasks.append({
            "bom-ref": ref, "uid": record.id, "name": record.stage, "taskTypes": ["merge" if record.kind == "merge" else "build"],
            "timeStart": record.started, "timeEnd": record.finished, "properties": _properties(facts),
            "inputs": [{"resource": {"ref": each}} for each in dict.fromkeys(map(_ref, record.data))],
        })  # fmt: skip
        parents = {f"stage:{edge.record}" for edge in record.parents if edge.record}
        waits.append({"ref": ref, "dependsOn": sorted(parents)})
    return {"bom-ref": "stages", "uid": lineage.head, "taskTypes": ["build"], "tasks": tasks, "taskDependencies": waits}


def _properties(facts: Mapping[str, object]) -> list[dict[str, str]]:
    words = {key: NOT_KNOWN if value is None else str(value) for key, value in facts.items()}
    return [{"name": f"etude:{key}", "value": value} for key, value in words.items()]


def spdx(release: Release) -> str:
    """Return the document, `spdx.json`, as JSON-LD."""
    from spdx_python_model import v3_0_1 as model

    return json.dumps(model.JSONLDSerializer().serialize_data(_Writer(release).written()), indent=1) + "\n"


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


class _Writer:
    """Collects the elements of one document; every element needs an address and says who made it, and when."""

    def __init__(self, release: Release) -> None:
        from spdx_python_model import v3_0_1 as model

        self.model, self.release, self.objects = model, release, model.SHACLObjectSet()
        self.relationships = itertools.count()
        self.made = model.CreationInfo(specVersion="3.0.1", created=_time(release.head.finished))
        self.supplier = release.product.organisation.name
        agent = model.Agent if self.supplier else model.SoftwareAgent
        self.agent = self._add(agent, "agent", name=self.supplier or "Etude")
        self.made.createdBy = [self.agent]
        self.made.createdUsing = [self._add(model.Tool, "etude", name=f"Etude {release.head.code.etude}")]
        self.objects.add(self.made)

    def written(self) -> Any:
        """Write the whole document."""
        release, lineage = self.release, self.release.lineage
        records = in_order(lineage)
        models = {record.id: self._model(record) for record in records}
        top = models[lineage.head]
        self._describe(top)
        data = {ref: self._dataset(ref, use) for ref, use in _datasets(lineage).items()}
        for child, edge in [(record.id, edge) for record in records for edge in record.parents]:
            key = edge.record or edge.model_digest
            models[key] = other = models.get(key) or self._stranger(edge)
            if edge.role == "weights":
                self._relate(other, "ancestorOf", [models[child]])
            else:
                self._relate(models[child], "other", [other], comment=f"{edge.role}: {edge.name}")
        for record in in_order(lineage, "weights"):
            if refs := dict.fromkeys(map(_ref, record.data)):
                self._relate(models[record.id], "trainedOn", [data[ref] for ref in refs])
        self._relate(top, "contains", [self._file(path) for path in sorted(release.files)])
        self._licence(top)
        profiles = [getattr(self.model.ProfileIdentifierType, name) for name in ("core", "software", "simpleLicensing")]
        about = {"name": release.name, "rootElement": [top], "profileConformance": profiles}
        self._add(self.model.SpdxDocument, "document", **about)
        return self.objects

    def _iri(self, address: str) -> str:
        return f"urn:uuid:{identity(self.release)}#{quote(address)}"

    def _add(self, kind: Any, address: str, **fields: Any) -> Any:
        element = kind(_id=self._iri(address), creationInfo=self.made, **fields)
        self.objects.add(element)
        return element

    def _relate(self, start: Any, how: str, ends: Sequence[Any], **more: str) -> None:
        kind = getattr(self.model.RelationshipType, how)
        address = f"relationship-{next(self.relationships)}"
        self._add(self.model.Relationship, address, from_=start, relationshipType=kind, to=list(ends), **more)

    def _entry(self, key: str, value: object) -> Any:
        return self.model.DictionaryEntry(key=key, value=str(value))

    def _model(self, record: Record) -> Any:
        spent = record.compute.model_dump(mode="json", exclude_none=True)
        return self._add(
            self.model.ai_AIPackage, f"model-{record.id}", name=record.origin.name if record.origin else record.stage,
            software_primaryPurpose=self.model.software_SoftwarePurpose.model, builtTime=_time(record.finished),
            ai_informationAboutTraining=f"{record.kind}; record {record.id}; weights {record.model_digest}",
            ai_hyperparameter=[self._entry(f"compute.{key}", value) for key, value in spent.items()],
            ai_useSensitivePersonalInformation=self.model.PresenceType.noAssertion,
        )  # fmt: skip

    def _stranger(self, edge: Parent) -> Any:
        """Return a model of which nothing is known but its name and the digest of its weights."""
        comment = f"it carries no record; weights {edge.model_digest}"
        return self._add(self.model.ai_AIPackage, f"model-{edge.model_digest}", name=edge.name, comment=comment)

    def _describe(self, top: Any) -> None:
        """Say of the released model what is not known of its ancestors."""
        release = self.release
        top.name, top.software_packageVersion = release.name, release.version
        top.ai_typeOfModel = [name for name in ("transformer", release.architecture.family) if name]
        top.ai_limitation = " ".join(LIMITS)
        top.ai_metric = [self._entry(f"{row.task}: {row.metric}", row.value) for row in release.evaluation]
        top.ai_informationAboutApplication = release.product.intended_use or NOT_KNOWN
        if self.supplier:
            top.suppliedBy = self.agent

    def _dataset(self, ref: str, use: DataUse) -> Any:
        licences = ", ".join(f"{name}: {count} bytes" for name, count in sorted(use.licences.items()))
        return self._add(
            self.model.dataset_DatasetPackage, ref, name=use.name, software_sourceInfo=use.source,
            comment=f"digest {use.digest}; licences: {licences or NOT_KNOWN}",
            software_primaryPurpose=self.model.software_SoftwarePurpose.data,
            dataset_datasetSize=use.bytes, dataset_datasetType=[self.model.dataset_DatasetType.text],
            dataset_dataPreprocessing=[f"left out, {reason}: {count}" for reason, count in sorted(use.left_out.items())],
            dataset_hasSensitivePersonalInformation=self.model.PresenceType.noAssertion,
        )  # fmt: skip

    def _file(self, path: str) -> Any:
        digest = self.model.Hash(algorithm=self.model.HashAlgorithm.sha256, hashValue=self.release.files[path].sha256)
        return self._add(self.model.software_File, f"file-{path}", name=path, verifiedUsing=[digest])

    def _licence(self, top: Any) -> None:
        """State the terms of all ancestors together, and where a text lies that has no SPDX name."""
        terms = licence_terms(self.release)
        custom = [term for term in terms if term.startswith("LicenseRef-")]
        text = "The text lies in the release, see LICENSE, NOTICE and LICENSES/."
        for term in custom:
            self._add(self.model.simplelicensing_SimpleLicensingText, term, simplelicensing_licenseText=text)
        licence = self._add(
            self.model.simplelicensing_LicenseExpression, "licence",
            simplelicensing_licenseExpression=" AND ".join(terms) or "NOASSERTION",
            simplelicensing_customIdToUri=[self._entry(term, self._iri(term)) for term in custom],
        )  # fmt: skip
        self._relate(top, "hasConcludedLicense", [licence])


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
