"""The release as an SPDX 3.0.1 document: one AI package a model of the tree, one dataset package a source of data.

SPDX has a field for energy and none for operations, so compute stands among the hyperparameters. Conformance is claimed with the
core, software and licensing profiles only: those for AI and datasets also want a place to download from, which a folder cannot know.
"""

from __future__ import annotations

import datetime
import itertools
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from etude.lineage.bom import data_ref, identity
from etude.lineage.card import LIMITS
from etude.lineage.release_facts import NOT_KNOWN, in_order, licence_terms, trained_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.lineage.record import DataUse, Parent, Record
    from etude.lineage.release_facts import Release


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
        provider = release.provider.name
        self.agent = self._add(model.Agent if provider else model.SoftwareAgent, "agent", name=provider or "Etude")
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
        uses = {data_ref(use): use for _, use in trained_on(lineage)}
        data = {ref: self._dataset(ref, use) for ref, use in uses.items()}
        for child, edge in [(record.id, edge) for record in records for edge in record.parents]:
            key = edge.record or edge.model_digest
            models[key] = other = models.get(key) or self._stranger(edge)
            if edge.role == "weights":
                self._relate(other, "ancestorOf", [models[child]])
            else:
                self._relate(models[child], "other", [other], comment=f"{edge.role}: {edge.name}")
        for record in in_order(lineage, "weights"):
            if refs := dict.fromkeys(map(data_ref, record.data)):
                self._relate(models[record.id], "trainedOn", [data[ref] for ref in refs])
        self._relate(top, "contains", [self._file(path) for path in sorted(release.files)])
        self._licence(top)
        profiles = [getattr(self.model.ProfileIdentifierType, name) for name in ("core", "software", "simpleLicensing")]
        self._add(
            self.model.SpdxDocument, "document", name=release.name, rootElement=[top], profileConformance=profiles
        )
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
        told = f"it carries no record; weights {edge.model_digest}"
        return self._add(self.model.ai_AIPackage, f"model-{edge.model_digest}", name=edge.name, comment=told)

    def _describe(self, top: Any) -> None:
        """Say of the released model what is not known of its ancestors."""
        release, provider = self.release, self.release.provider
        top.name, top.software_packageVersion = release.name, release.version
        top.ai_typeOfModel = [name for name in ("transformer", release.architecture.family) if name]
        top.ai_limitation = " ".join(LIMITS)
        top.ai_metric = [self._entry(f"{row.task}: {row.metric}", row.value) for row in release.evaluation]
        top.ai_informationAboutApplication = provider.intended_use or NOT_KNOWN
        if provider.name:
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
