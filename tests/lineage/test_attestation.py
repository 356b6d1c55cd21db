from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Message

from etude.files import canonical_json
from etude.lineage.facts import in_order
from etude.lineage.record import Lineage
from etude.lineage.signing import statement, statement_errors
from tests.lineage.records import full_record, three_generations
from tests.lineage.release_examples import merged, sprout_release


@pytest.mark.parametrize("lineage", [three_generations()[0], merged()[0], sprout_release().lineage])
def test_in_toto_accepts_the_statement_of_every_stage(lineage: Lineage) -> None:
    for record in in_order(lineage):
        document = statement(record, lineage)
        assert statement_errors(document) == []
        assert json.loads(canonical_json(document)) == document
        Statement.copy_from_pb(ParseDict(document, Message())).validate()
        provenance = ParseDict(document["predicate"], Provenance())
        assert provenance.run_details.metadata.invocation_id == record.id
        assert provenance.run_details.metadata.finished_on.ToJsonString() == record.finished.replace("+00:00", "Z")


def test_subjects_are_the_weights_and_dependencies_what_they_were_made_from() -> None:
    lineage, (base, middle, _) = three_generations()
    document = statement(middle, lineage)
    assert document["subject"] == [{"name": "model.safetensors", "digest": {"sha256": "c" * 64}}]
    used = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [(each["name"], each.get("digest")) for each in used] == [
        ("base/model.safetensors", {"sha256": "b" * 64}),
        ("teacher-9b", {"etudeModel": "e" * 64}),
        ("code", {"etudeData": "2" * 64}),
        ("corpus/manifest.json", {"sha256": "8" * 64}),
        ("etude", {"gitCommit": "9" * 40}),
    ]
    (corpus,) = lineage.corpora.values()
    assert used[3]["annotations"] == {"role": "corpus", "record": corpus.id}
    assert statement(corpus, lineage)["subject"] == [{"name": "manifest.json", "digest": {"sha256": "8" * 64}}]
    assert used[0]["annotations"] == {"role": "weights", "record": base.id, "etudeModel": base.model_digest}
    assert document["predicate"]["buildDefinition"]["buildType"] == "urn:etude:stage:cpt:3"


def test_files_of_a_base_as_received_are_dependencies() -> None:
    base = full_record(parents=[], data=[])
    used = statement(base, Lineage.of(base, []))["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [each["name"] for each in used] == ["tiny/tiny.gguf", "etude"]


def test_compute_and_other_outputs_are_byproducts() -> None:
    record = full_record(parents=[])
    made = statement(record, Lineage.of(record, []))["predicate"]["runDetails"]["byproducts"]
    assert made[0] == {"name": "record", "digest": {"etudeRecord": record.id}}
    assert made[1]["annotations"]["model_flops"] == 8.9e12
    assert made[-1] == {"name": "report.json", "digest": {"sha256": "5" * 64}}


def _changed(*path: str, value: Any) -> dict[str, Any]:
    lineage, records = three_generations()
    document = copy.deepcopy(statement(records[0], lineage))
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return document


@pytest.mark.parametrize(("document", "told"), [
    (_changed("_type", value="https://in-toto.io/Statement/v0.1"), "Wrong statement type"),
    (_changed("subject", value=[]), "At least one subject"),
    (_changed("subject", value=[{"name": "model.safetensors"}]), "At least one digest"),
    (_changed("predicate", value={}), "Predicate object required"),
    (_changed("predicate", "buildDefinition", "surprise", value=1), "surprise"),
    (_changed("predicate", "runDetails", "metadata", "startedOn", value="yesterday"), "startedOn"),
])  # fmt: skip
def test_what_in_toto_refuses_is_one_line(document: dict[str, Any], told: str) -> None:
    (line,) = statement_errors(document)
    assert told in line
