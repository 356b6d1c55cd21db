from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from etude.lineage.card import _table, card_disagreements, counted, hub_metadata, model_card
from etude.lineage.record import FileDigest, Lineage, Parent
from tests.lineage.records import child_of, full_record, three_generations
from tests.lineage.release_examples import bare_release, merged, release


def test_the_hubs_own_parser_reads_what_the_lineage_says() -> None:
    card = ModelCard(model_card(release()))
    told = card.data.to_dict()
    for name in told["base_model"]:
        validate_repo_id(name)
    assert told["base_model"] == ["owner/tiny"]
    assert told["base_model_relation"] == "finetune"
    assert told["license"] == "mit"
    assert (told["pipeline_tag"], told["library_name"]) == ("text-generation", "transformers")
    assert [(each.dataset_name, each.metric_type, each.metric_value) for each in card.data.eval_results] == [
        ("quick | tasks", "avg@5", 0.25), ("mine", "pass@1", 0.0),
    ]  # fmt: skip
    assert ModelCard(str(card)).data.to_dict() == told


def test_the_text_tells_stages_data_compute_evaluation_and_duties() -> None:
    text = model_card(release())
    lineage, records = three_generations()
    for record in records:
        assert f"`{record.id[:12]}`" in text
    for told in ("teacher `teacher-9b`", "MIT 99", "own share 0.1%", "0.125 to 0.5", "**Kimi K2.5**", "“Kimi K2.5” or “K2.5”", "How many?",
                 "`product.monthly_users`", "weights: against tiny: evidence of shared initialisation.", "Ada Ltd", "Release date: 2026-12-01", lineage.head):  # fmt: skip
        assert told in text
    assert "tree.svg" not in text  # only if the folder has one
    assert "](tree.svg)" in model_card(release(files={"tree.svg": FileDigest(sha256="0" * 64, bytes=1)}))


def test_what_is_not_known_is_said() -> None:
    text = model_card(bare_release())
    told = ModelCard(text).data.to_dict()
    assert told["license"] == "unknown"
    assert {"base_model", "base_model_relation", "datasets", "model-index"}.isdisjoint(told)
    for missing in ("trained from scratch", "Shares of compute: not known", "No evaluation was given", "weights: compared with no known base",
                    "Intended use: not stated", "context not known", "No stage read data"):  # fmt: skip
        assert missing in text
    assert "What `tiny` learned from before is in no record here: not known." in model_card(release())


def test_several_parents_are_a_merge_and_several_licences_are_other() -> None:
    told = ModelCard(model_card(release(merged()[0]))).data.to_dict()
    assert (told["base_model"], told["base_model_relation"]) == (["owner/tiny", "stranger"], "merge")
    assert told["license"] == "other"
    assert told["license_name"] == "unidentified-888888888888-and-mit"
    assert told["license_link"] == "LICENSES/stranger/LICENSE"


def test_two_parents_are_enough_and_two_known_licences_too() -> None:
    base = child_of(None, "base")
    again = Parent(name="again", role="weights", record=base.id, model_digest=base.model_digest)
    lineage = Lineage.of(child_of(base, "even", again), [Lineage.of(base, [])])
    files = {"LICENSE": FileDigest(sha256="0" * 64, bytes=1)}
    told = ModelCard(model_card(release(lineage, licence="Apache-2.0", files=files))).data.to_dict()
    assert told["base_model_relation"] == "merge"
    assert (told["license"], told["license_name"], told["license_link"]) == ("other", "apache-2.0-and-mit", "LICENSE")


def test_data_under_ones_own_terms_leave_the_licence_to_the_owner() -> None:
    base = child_of(None, "base")
    use = full_record().data[0].model_copy(update={"licences": {"LicenseRef-Mine": 9}})
    lineage = Lineage.of(child_of(base, "child").model_copy(update={"data": [use]}), [Lineage.of(base, [])])
    told = ModelCard(model_card(release(lineage))).data.to_dict()
    assert (told["license"], told["license_name"]) == ("other", "undecided-for-data-under-mine-and-mit")
    files = {"LICENSE": FileDigest(sha256="0" * 64, bytes=1)}
    told = ModelCard(model_card(release(lineage, licence="Apache-2.0", files=files))).data.to_dict()
    assert told["license_name"] == "apache-2.0-and-mit"


def test_an_unchanged_base_claims_no_relation_and_hub_data_are_named() -> None:
    use = full_record().data[0].model_copy(update={"source": "dataset owner/code at main"})
    base = full_record(parents=[], data=[use, use])
    told = hub_metadata(Lineage.of(base, []))
    assert told["datasets"] == ["owner/code"]
    assert told["base_model"] == ["owner/tiny"]
    assert "base_model_relation" not in told


@pytest.mark.parametrize(("old", "new", "line"), [
    ("owner/tiny", "owner/giant", "base_model is ['owner/giant'], the lineage says ['owner/tiny']"),
    ("finetune", "quantized", "base_model_relation is 'quantized', the lineage says 'finetune'"),
    ("etude_record: ", "etude_record: 0", "etude_record is '0"),
    ("pipeline_tag:", "datasets: [other/data]\npipeline_tag:", "datasets is ['other/data'], the lineage says None"),
    ("base_model:", "base_model: [", "its metadata cannot be read"),
])  # fmt: skip
def test_a_card_that_says_something_else_is_found_out(old: str, new: str, line: str) -> None:
    text = model_card(release())
    lineage = three_generations()[0]
    assert card_disagreements(text, lineage) == []
    found = card_disagreements(text.replace(old, new, 1), lineage)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_a_card_without_metadata_disagrees_in_all_of_them() -> None:
    assert len(card_disagreements("# A model", three_generations()[0])) == 4


def test_counts_are_told_largest_first() -> None:
    assert counted({"a": 1, "b": 3000, "c": 2, "d": 1}, most=3) == "b 3,000, c 2, a 1, 1 more"
    assert counted({}) == ""


def test_a_table_survives_what_is_in_its_cells() -> None:
    table = _table(["a", "b"], [["x | y\nz", None], ["<script>", 3000]])
    assert table.splitlines()[2:] == ["| x \\| y z | not known |", "| &lt;script> | 3,000 |"]
