from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from license_expression import get_spdx_licensing
from transformers import AutoModelForCausalLM

from etude.errors import UserError
from etude.lineage.facts import (
    base_names,
    carried,
    edges,
    in_order,
    licence_terms,
    read_architecture,
    roots,
    shown_source,
    trained_on,
    without_places,
)
from etude.lineage.record import FileDigest, Lineage, Origin
from tests.lineage.records import child_of, full_record, three_generations
from tests.lineage.release_examples import bare_release, merged, release
from tests.tiny import save_model


def test_parents_come_before_children_and_each_once() -> None:
    lineage, parts = merged()
    assert in_order(lineage) == parts
    assert in_order(three_generations()[0], "weights") == three_generations()[1]


def test_only_edges_of_the_asked_role_are_followed() -> None:
    base = child_of(None, "base")
    teacher = child_of(None, "teacher")
    edge = (
        three_generations()[1][1]
        .parents[1]
        .model_copy(update={"record": teacher.id, "model_digest": teacher.model_digest})
    )
    child = child_of(base, "sft", edge)
    lineage = Lineage.of(child, [Lineage.of(base, []), Lineage.of(teacher, [])])
    assert in_order(lineage, "weights") == [base, child]
    assert in_order(lineage) == [base, teacher, child]
    assert edges(lineage, "teacher") == [(child, edge)]
    assert [record.stage for record, _ in trained_on(lineage)] == [
        "base",
        "sft",
    ]  # what a teacher read is not in the weights


def test_the_root_is_the_oldest_known_origin() -> None:
    """A model of another run taken as a base has an origin too, but what it grew from is the answer."""
    made = child_of(None, "pretrain").model_copy(update={"origin": None})
    known = child_of(made, "base").model_copy(update={"origin": full_record().origin})
    again = child_of(known, "again").model_copy(update={"origin": full_record().origin})
    lineage = Lineage.of(again, [Lineage.of(known, [Lineage.of(made, [])])])
    assert [record for record, _ in roots(lineage)] == [known]
    assert roots(Lineage.of(made, [])) == []


def test_bases_are_called_by_their_hub_name_and_strangers_by_theirs() -> None:
    assert base_names(merged()[0]) == ["owner/tiny", "stranger"]
    origin = full_record().origin
    assert isinstance(origin, Origin)
    packaged = full_record(parents=[], origin=origin.model_copy(update={"source": "package tiny==1"}))
    assert base_names(Lineage.of(packaged, [])) == ["tiny"]
    assert base_names(bare_release().lineage) == []


def test_licences_of_the_whole_tree_apply_and_notices_are_no_licences() -> None:
    lineage, _ = merged()
    assert [each.file for each in carried(lineage)] == [
        "LICENSES/stranger/LICENSE",
        "LICENSES/stranger/NOTICE",
        "LICENSE",
    ]
    assert licence_terms(release(lineage)) == ["LicenseRef-unidentified-888888888888", "MIT"]


@pytest.mark.parametrize(("digest", "licence", "terms"), [
    ("6", None, ["MIT"]),  # the ancestor's own file at the top
    ("5", None, ["LicenseRef-unidentified-555555555555", "MIT"]),
    ("5", "Apache-2.0", ["Apache-2.0", "MIT"]),
    ("6", "MIT", ["MIT"]),
])  # fmt: skip
def test_our_own_licence_adds_to_the_ancestors(digest: str, licence: str | None, terms: list[str]) -> None:
    files = {"LICENSE": FileDigest(sha256=digest * 64, bytes=1)}
    assert licence_terms(release(files=files, licence=licence)) == terms
    get_spdx_licensing().parse(" AND ".join(terms))  # raises on what is no SPDX expression


def test_the_shape_is_read_from_files_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    shape = read_architecture(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    config = json.loads((folder / "config.json").read_text())
    assert (shape.family, shape.name, shape.context) == (
        "llama",
        config["architectures"][0],
        config["max_position_embeddings"],
    )
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="not a whole safetensors"):
        read_architecture(folder)


PLACES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="/\n\r"), min_size=1), min_size=1, max_size=5)


@given(
    PLACES, st.sampled_from(["", "folder ", "file ", "git ", "git file://", "made from file ", "parquet ", "jsonl "])
)
def test_of_a_path_on_this_machine_only_the_last_part_is_shown(parts: list[str], word: str) -> None:
    shown = shown_source(f"{word}/{'/'.join(parts)}")
    assert shown == f"{word.removesuffix('file://')}…/{parts[-1]}"
    assert shown_source(shown) == shown


@pytest.mark.parametrize(
    "source", ["git https://example.org/owner/name", "hub owner/name", "dataset owner/name", "package a==1", "folder src/x",
               "git …/name", "sampled from the base, temperature 1.0", "", "/"]
)  # fmt: skip
def test_what_is_no_path_on_this_machine_is_shown_whole(source: str) -> None:
    assert shown_source(source) == source


def test_paths_anywhere_in_a_record_are_cut() -> None:
    plain = full_record(
        recipe={"hash": "3" * 64, "stage": {"demos": {"tasks": ["/home/me/a b/t.jsonl"]}, "base": "~/x"}}
    )
    cut = without_places(plain.model_dump(mode="json"))
    assert cut["recipe"]["stage"] == {"demos": {"tasks": ["…/t.jsonl"]}, "base": "…/x"}
    assert cut["data"][0]["source"] == "folder …/code"
    assert cut["outputs"] == plain.model_dump(mode="json")["outputs"]
