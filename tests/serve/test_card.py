"""What `/v1/models` says of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.lineage.duties import LicenceUse, Product, evaluate
from etude.lineage.licences import obligations
from etude.lineage.record import load_lineage
from etude.models.bases import resolve
from etude.serve.process import card_of, stop_tokens_of, to_display
from tests.lineage.licence_texts import KIMI


def test_a_model_made_by_etude_tells_its_tree() -> None:
    folder = resolve("sprout").folder
    card = card_of("sprout", folder, None)
    assert card.lineage["records"] == load_lineage(folder).model_dump(mode="json")["records"]
    assert card.lineage["record"] in card.lineage["records"]
    assert card.lineage["tree"][0] == "sprout"
    assert card.display == []  # Apache-2.0 wants nothing shown
    assert card.stop_tokens == {0}
    assert json.dumps(card.as_dict())


def test_a_model_of_others_says_that_it_has_no_record(tiny_base: Path) -> None:
    card = card_of("tiny", tiny_base, None)
    assert card.lineage == {"record": None, "told": "it was not made by Etude and carries no record", "origin": None}


def displayed(*licences: str | None) -> list[dict[str, Any]]:
    """What is to be shown by somebody who serves a model with these licences."""
    return to_display(evaluate([LicenceUse("base", "weights", licence) for licence in licences], Product(hosted=True)))


def test_texts_to_display() -> None:
    assert displayed("Apache-2.0", "MIT", None) == []
    (always,) = displayed("Llama-4-Community")
    assert (always["any_of"], always["always"]) == (["Built with Llama"], True)
    (either,) = displayed("Qwen-2024")
    assert either["any_of"] == ["Built with Qwen", "Improved using Qwen"]
    (gated,) = displayed("Kimi-K2-Modified-MIT")
    assert (gated["any_of"], gated["always"], gated["where"]) == (["Kimi K2"], False, "user_interface")
    wanted = "commercial use and (monthly active users > 100,000,000 or revenue > 20,000,000 USD)"
    assert gated["duty"] == f"display “Kimi K2” if {wanted}"


def test_every_display_duty_that_is_known_can_be_told() -> None:
    wanted = [clause for licence in obligations() for when in ("unconditional", "conditional")
              for clause in licence.get(when, []) if clause["duty"] == "display"]  # fmt: skip
    assert len(displayed(*(licence["id"] for licence in obligations()))) == len(wanted) > 5


def test_a_carried_licence_is_read_below_its_ancestor(tmp_path: Path) -> None:
    (tmp_path / "LICENSES/kimi").mkdir(parents=True)
    (tmp_path / "LICENSES/kimi/LICENSE").write_text(KIMI)
    assert [duty["any_of"] for duty in card_of("mine", tmp_path, None).display] == [["Kimi K2.5"]]


def test_the_tokens_a_model_ends_with(tmp_path: Path) -> None:
    assert stop_tokens_of(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_tokens_of(tmp_path) == {5, 7, 9}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_tokens_of(tmp_path) == {7, 9}
