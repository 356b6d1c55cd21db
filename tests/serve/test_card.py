"""What `/v1/models` says of a model."""

from __future__ import annotations

import json
from pathlib import Path

from etude.lineage.licences import obligations
from etude.models.bases import resolve
from etude.serve.card import card_of, stop_tokens_of, to_display


def test_a_model_made_by_etude_tells_its_tree() -> None:
    folder = resolve("sprout").folder
    card = card_of("sprout", folder, None)
    assert card.lineage["records"] == json.loads((folder / "lineage.json").read_text())["records"]
    assert card.lineage["record"] in card.lineage["records"]
    assert card.lineage["tree"][0] == "sprout"
    assert card.display == []  # Apache-2.0 wants nothing shown
    assert card.stop_tokens == {0}
    assert json.dumps(card.told(7))


def test_a_model_of_others_says_that_it_has_no_record(tiny_base: Path) -> None:
    card = card_of("tiny", tiny_base, None)
    assert card.lineage == {"record": None, "told": "it was not made by Etude and carries no record", "origin": None}


def test_texts_to_display() -> None:
    assert to_display({"Apache-2.0", "MIT", None}) == []
    (always,) = to_display({"Llama-4-Community"} & {licence["id"] for licence in obligations()} or {"Llama-4"})
    assert (always["any_of"], always["always"]) == (["Built with Llama"], True)
    (either,) = to_display({"Qwen-2024"})
    assert either["any_of"] == ["Built with Qwen", "Improved using Qwen"]
    (gated,) = to_display({"Kimi-K2-Modified-MIT"})
    assert (gated["any_of"], gated["always"], gated["where"]) == (["Kimi K2"], False, "user_interface")
    assert gated["duty"] == "display “Kimi K2” if monthly active users > 100,000,000 or revenue > 20,000,000 USD"


def test_every_display_duty_that_is_known_can_be_told() -> None:
    wanted = [clause for licence in obligations() for when in ("unconditional", "conditional")
              for clause in licence.get(when, []) if clause["duty"] == "display"]  # fmt: skip
    assert len(to_display({licence["id"] for licence in obligations()})) == len(wanted) > 5


def test_the_tokens_a_model_ends_with(tmp_path: Path) -> None:
    assert stop_tokens_of(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert stop_tokens_of(tmp_path) == {5, 7, 9}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_tokens_of(tmp_path) == {7, 9}
