from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from etude.lineage.bom import bom, bom_errors
from etude.lineage.facts import Release
from etude.lineage.record import Lineage
from tests.lineage.records import full_record, three_generations
from tests.lineage.release_examples import bare_release, merged, release, sprout_release

RELEASES = pytest.mark.parametrize("made", [release(), release(merged()[0]), bare_release(), sprout_release()])


def _values(node: Any, key: str) -> Iterator[Any]:
    """Yield all values of a key, wherever it stands."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if name == key:
            yield value
        yield from _values(value, key)


@RELEASES
def test_cyclonedx_accepts_it_strictly(made: Release) -> None:
    document = bom(made)
    assert bom_errors(document) == []
    assert json.loads(json.dumps(document)) == document
    assert bom(made) == document  # no clock and no chance in it


@RELEASES
def test_every_reference_has_its_one_target(made: Release) -> None:
    """The schema cannot say this, so the validator does not see it."""
    document = bom(made)
    named = list(_values(document, "bom-ref"))
    assert len(named) == len(set(named))
    used = {*_values(document, "ref"), *(name for names in _values(document, "dependsOn") for name in names)}
    assert used <= set(named)


def test_the_strict_validator_is_asked() -> None:
    wrong = bom(release()) | {"surprise": 1}
    assert len(bom_errors(wrong)) == 1
    assert "surprise" in bom_errors(wrong)[0]
    assert bom_errors(bom(release()) | {"bomFormat": "SPDX"})


def test_pedigree_is_the_tree() -> None:
    _, (base, middle, _) = three_generations()
    (parent,) = bom(release())["metadata"]["component"]["pedigree"]["ancestors"]
    (grandparent,) = parent["pedigree"]["ancestors"]
    assert (parent["name"], grandparent["name"]) == ("cpt", "tiny")
    assert [list(_values(each["properties"], "value")) for each in (parent, grandparent)] == [
        [middle.model_digest, middle.id], [base.model_digest, base.id],
    ]  # fmt: skip
    assert grandparent["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    assert grandparent["pedigree"]["ancestors"] == []


def test_an_ancestor_reached_on_two_ways_is_told_once_and_named_twice() -> None:
    left, right, stranger = bom(release(merged()[0]))["metadata"]["component"]["pedigree"]["ancestors"]
    assert "pedigree" in left["pedigree"]["ancestors"][0]
    assert right["pedigree"]["ancestors"][0]["name"] == "tiny"
    assert "pedigree" not in right["pedigree"]["ancestors"][0]
    assert stranger["name"] == "stranger"


def test_data_and_teachers_are_what_it_depends_on() -> None:
    document = bom(release())
    data, teacher = document["components"]
    assert document["dependencies"] == [{"ref": "model", "dependsOn": [data["bom-ref"], teacher["bom-ref"]]}]
    assert (data["name"], data["licenses"]) == ("code", [{"license": {"name": "MIT"}}])
    assert (teacher["name"], teacher["description"]) == ("teacher-9b", "teacher")


def test_stages_depend_on_each_other_and_read_their_data() -> None:
    lineage, (base, middle, last) = three_generations()
    (corpus,) = lineage.corpora.values()
    (workflow,) = bom(release())["formulation"][0]["workflows"]
    assert [task["uid"] for task in workflow["tasks"]] == [record.id for record in (base, corpus, middle, last)]
    assert [each["dependsOn"] for each in workflow["taskDependencies"]] == [
        [], [], sorted([f"stage:{base.id}", f"stage:{corpus.id}"]), [f"stage:{middle.id}"],
    ]  # fmt: skip
    assert workflow["tasks"][0]["inputs"] == [{"resource": {"ref": f"data:code:{'2' * 64}"}}]


def test_the_card_in_it_has_metrics_datasets_and_the_way_it_learned() -> None:
    rl = Lineage.of(full_record(kind="rl", parents=[]), [])
    card = bom(release(rl))["metadata"]["component"]["modelCard"]
    assert card["modelParameters"]["approach"] == {"type": "reinforcement-learning"}
    assert card["modelParameters"]["datasets"] == [{"ref": f"data:code:{'2' * 64}"}]
    first, second = card["quantitativeAnalysis"]["performanceMetrics"]
    assert (first["value"], first["confidenceInterval"]) == ("0.25", {"lowerBound": "0.125", "upperBound": "0.5"})
    assert second["confidenceInterval"] == {}
