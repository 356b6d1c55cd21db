from __future__ import annotations

import re

import pytest

from etude.lineage.europe import PERSON, model_documentation, training_summary
from etude.lineage.record import Lineage, Parent
from tests.lineage.records import full_record, three_generations
from tests.lineage.release_examples import bare_release, release


def _fields(text: str, heading: str) -> dict[str, str]:
    """Return the fields under a heading that starts so."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = (part for part in section if part.startswith(heading))
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("|")]
    return dict(rows[2:])


def test_the_summary_has_the_templates_sections_in_order() -> None:
    numbers = re.findall(r"^## (\d\.\d) ", training_summary(release()), flags=re.MULTILINE)
    assert numbers == ["1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "3.1", "3.2"]


def test_what_is_known_is_filled_in() -> None:
    text = training_summary(release())
    assert _fields(text, "1.1")["Name"] == "Ada Ltd"
    assert _fields(text, "1.2")["Model dependencies"].startswith("owner/tiny;")
    assert _fields(text, "1.3")["Latest date of data acquisition"].startswith("no later than 2026-11,")
    assert _fields(text, "2.5") == {
        "Used": "none recorded",
        "Models that wrote or judged it": "teacher-9b (teacher of cpt)",
    }
    assert _fields(text, "3.1")["Licences found in the data, in bytes"] == "MIT 99"  # read by three stages, told once
    assert _fields(text, "3.2")["Documents left out, by step"] == "empty 1"


@pytest.mark.parametrize(("source", "section"), [
    ("dataset owner/code at abc", "2.1"),
    ("package tiny==1", "2.1"),
    ("git git@host:code", "2.1"),
    ("sampled from the base, temperature 1", "2.5"),
    ("folder /code", "2.6"),
    ("jsonl *.jsonl", "2.6"),
])  # fmt: skip
def test_data_are_listed_by_the_kind_of_their_source(source: str, section: str) -> None:
    use = full_record().data[0].model_copy(update={"source": source})
    text = training_summary(release(Lineage.of(full_record(parents=[], data=[use]), [])))
    assert [each for each in ("2.1", "2.5", "2.6") if "code" in _fields(text, each)] == [section]
    assert _fields(text, section)["code"].startswith(source)


@pytest.mark.parametrize(("tokens", "size"), [
    ([10**9 - 1], "less than 1 billion tokens: 999,999,999 recorded, repeats included"),
    ([10**9], "1 billion to 10 trillion tokens: 1,000,000,000 recorded, repeats included"),
    ([10**13 - 5, 5], "more than 10 trillion tokens: 10,000,000,000,000 recorded, repeats included"),
    ([7, None], "less than 1 billion tokens: 7 recorded, repeats included, and 1 source(s) without a count"),
])  # fmt: skip
def test_the_size_is_a_range_of_the_template(tokens: list[int | None], size: str) -> None:
    uses = [full_record().data[0].model_copy(update={"tokens": count}) for count in tokens]
    made = release(Lineage.of(full_record(parents=[], data=uses), []))
    assert _fields(training_summary(made), "1.3")["Training data size"] == size


def test_the_latest_stage_that_read_data_bounds_their_age() -> None:
    old = full_record(parents=[], started="2025-03-01T00:00:00+00:00")
    edge = Parent(name="old", role="weights", record=old.id, model_digest=old.model_digest)
    lineage = Lineage.of(full_record(parents=[edge], origin=None), [Lineage.of(old, [])])
    assert _fields(training_summary(release(lineage)), "1.3")["Latest date of data acquisition"].startswith(
        "no later than 2026-11,"
    )


def test_episodes_are_synthetic_data_of_the_model_itself() -> None:
    text = training_summary(release(Lineage.of(full_record(parents=[], kind="rl", stage="practice"), [])))
    assert _fields(text, "2.5")["Models that wrote or judged it"] == "the model itself, episodes of practice"


def test_nothing_is_made_up() -> None:
    """A release that says nothing of its provider leaves those fields to a person."""
    summary, form = training_summary(bare_release()), model_documentation(bare_release())
    assert set(_fields(summary, "1.1").values()) == {PERSON}
    assert _fields(summary, "1.2")["Model dependencies"] == "N/A"
    assert _fields(form, "General")["Legal name of the provider"] == PERSON
    assert _fields(form, "Energy") == {"Used for training": "not known", "Used for inference": "not known"}
    assert _fields(form, "Computational")["Amount of computation"] == "not known"
    assert _fields(form, "Methods")["Licences, all of which apply"] == "not known"


def test_the_form_tells_hash_parameters_stages_and_compute() -> None:
    form = model_documentation(release())
    lineage, records = three_generations()
    assert lineage.head in _fields(form, "General")["Model authenticity"]
    assert records[-1].model_digest in _fields(form, "General")["Model authenticity"]
    assert _fields(form, "Model properties")["Total parameters"] == "1,234 (BF16)"
    assert [name for name in _fields(form, "Training process") if name.startswith("Stage")] == [
        "Stage 1",
        "Stage 2",
        "Stage 3",
    ]
    assert _fields(form, "Computational")["Training time"] == "183 device-seconds recorded on gpu"
    assert _fields(form, "Computational")["Amount of computation"] == "own share 0.1% [0.05%, 0.2%]"
