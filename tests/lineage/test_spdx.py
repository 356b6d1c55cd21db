from __future__ import annotations

import json
from typing import Any

import pytest
from spdx_python_model import load_data

from etude.lineage.bom import spdx, spdx_errors
from etude.lineage.facts import Release
from tests.lineage.records import three_generations
from tests.lineage.release_examples import bare_release, merged, release, sprout_release


def _relations(made: Release) -> list[tuple[str, str, list[str]]]:
    """Read a document with SPDX's own model and return its edges by the names of their ends."""
    model, objects = load_data(json.loads(spdx(made)))
    objects.link()
    found = [
        (each.from_.name, each.relationshipType.rsplit("/", 1)[1], sorted(end.name or "-" for end in each.to))
        for each in objects.foreach_type(model.Relationship)
    ]
    return sorted(found)


@pytest.mark.parametrize("made", [release(), release(merged()[0]), bare_release(), sprout_release()])
def test_spdxs_own_model_reads_it_and_writes_the_same(made: Release) -> None:
    text = spdx(made)
    assert spdx_errors(text) == []
    model, objects = load_data(json.loads(text))
    assert model.JSONLDSerializer().serialize_data(objects) == json.loads(text)
    assert spdx(made) == text  # no clock and no chance in it
    names = [each.get("spdxId") for each in json.loads(text)["@graph"] if "spdxId" in each]
    assert len(names) == len(set(names))
    assert not any(" " in name for name in names)  # they are IRIs


def test_the_tree_the_data_and_the_teacher_are_relationships() -> None:
    assert _relations(release()) == [
        ("Sprout-Mine", "contains", ["LICENSES/a b/LICENSE", "model.safetensors"]),
        ("Sprout-Mine", "hasConcludedLicense", ["-"]),
        ("Sprout-Mine", "trainedOn", ["code"]),
        ("cpt", "ancestorOf", ["Sprout-Mine"]),
        ("cpt", "other", ["teacher-9b"]),
        ("cpt", "trainedOn", ["code"]),
        ("tiny", "ancestorOf", ["cpt"]),
        ("tiny", "trainedOn", ["code"]),
    ]


def test_a_merge_has_all_its_parents() -> None:
    found = _relations(release(merged()[0]))
    parents = {start for start, how, ends in found if how == "ancestorOf" and ends == ["Sprout-Mine"]}
    assert parents == {"c-left", "d-right", "stranger"}
    assert [each for each in found if each[1] == "other"] == [
        (stage, "other", ["judge 1"]) for stage in ("c-left", "d-right")
    ]


def test_facts_of_the_model_and_of_its_files() -> None:
    graph = json.loads(spdx(release()))["@graph"]
    (top,) = (each for each in graph if each.get("name") == "Sprout-Mine" and each["type"] == "ai_AIPackage")
    assert {entry["key"]: entry["value"] for entry in top["ai_metric"]} == {
        "quick | tasks: avg@5": "0.25",
        "mine: pass@1": "0.0",
    }
    assert {"type": "DictionaryEntry", "key": "compute.model_flops", "value": "8900000000000.0"} in top[
        "ai_hyperparameter"
    ]
    assert top["ai_typeOfModel"] == ["transformer", "llama"]
    (file,) = (each for each in graph if each.get("name") == "model.safetensors")
    assert file["verifiedUsing"] == [{"type": "Hash", "algorithm": "sha256", "hashValue": "4" * 64}]


def test_a_licence_without_a_name_is_mapped_to_an_element() -> None:
    graph = json.loads(spdx(release(merged()[0])))["@graph"]
    (licence,) = (each for each in graph if each["type"] == "simplelicensing_LicenseExpression")
    assert licence["simplelicensing_licenseExpression"] == "LicenseRef-unidentified-888888888888 AND MIT"
    (entry,) = licence["simplelicensing_customIdToUri"]
    assert entry["value"] in {each.get("spdxId") for each in graph}
    nothing = json.loads(spdx(bare_release()))["@graph"]
    assert "NOASSERTION" in {each.get("simplelicensing_licenseExpression") for each in nothing}


def _without(key: str, kind: str) -> str:
    document: dict[str, Any] = json.loads(spdx(release()))
    for each in document["@graph"]:
        if each["type"] == kind:
            each.pop(key)
    return json.dumps(document)


@pytest.mark.parametrize(("text", "told"), [
    ("[]", "dictionary"),
    ("{", "Expecting property name"),
    ("{}", "@context"),
    (_without("created", "CreationInfo"), "created"),
    (_without("relationshipType", "Relationship"), "relationshipType"),
    (spdx(release()).replace('"ancestorOf"', '"cousinOf"'), "cousinOf"),
])  # fmt: skip
def test_what_the_model_cannot_read_is_one_line(text: str, told: str) -> None:
    (line,) = spdx_errors(text)
    assert told in line
    assert "\n" not in line


def test_a_reference_to_nothing_is_found() -> None:
    address = f"model-{three_generations()[1][0].id}"
    text = spdx(release()).replace(
        f'{address}"', 'nowhere"', 1
    )  # the element itself has another name, its references have not
    assert [address in line or "nowhere" in line for line in spdx_errors(text)] == [True]
