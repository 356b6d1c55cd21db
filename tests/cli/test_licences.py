from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.lineage.licence_texts import KIMI, MINIMAX

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Etude


def test_the_duties_of_a_folder_with_and_without_a_product(etude: Etude, tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name, text in {"kimi": KIMI, "minimax": MINIMAX, "other": "Do as you like."}.items():
        (model / "LICENSES" / name).mkdir(parents=True)
        (model / "LICENSES" / name / "LICENSE").write_text(text, encoding="utf-8")
    (model / "config.json").write_text("{}")
    product = tmp_path / "product.toml"
    product.write_text("[product]\nmonthly_revenue = 30_000_000.0\ndistributed = false\n")
    said = etude("licences", model, "--product", product)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert "kimi (weights): Kimi-K2.5-Modified-MIT" in lines
    fires = [line for line in lines if line.startswith("  fires")]
    assert len(fires) == 1
    assert "display “Kimi K2.5”" in fires[0]
    assert "product.monthly_revenue = 30,000,000 (> 20,000,000)" in fires[0]
    assert "  asks   LICENSES/other/LICENSE: unknown text, read it" in lines
    assert "  product.yearly_recurring_revenue: What is the product's annual recurring revenue, in USD?" in lines
    assert sum(line.startswith("not met yet: Kimi-K2.5-Modified-MIT of kimi") for line in lines) == 1
    assert lines[-1] == "Facts for engineering, not legal advice."
    assert said.out.count("legal advice") == 1
    found = json.loads(etude("licences", model, "--json").out)
    assert [use["licence"] for use in found["licences"]] == ["Kimi-K2.5-Modified-MIT", "MiniMax-M2", None]
    display = next(duty for duty in found["duties"] if duty["kind"] == "display")
    assert (display["outcome"], display["words"]) == ("asks", ["Kimi K2.5"])
    assert {question["key"] for question in display["questions"]} >= {"product.monthly_revenue"}
    assert found["unmet"] == []


def test_a_known_base_that_is_not_here_is_as_listed(etude: Etude) -> None:
    said = etude("licences", "kimi-k2.5")
    assert said.code == 0, said.err
    assert "its text was not seen here, Kimi-K2.5-Modified-MIT is only listed for it" in said.out


def test_the_shipped_base_and_what_is_nothing(etude: Etude, tmp_path: Path) -> None:
    said = etude("licences", "sprout")
    assert "this model (weights): Apache-2.0" in said.out
    assert "data: 3 source(s)" in said.out
    assert etude("licences", tmp_path / "absent").code == 2
    assert etude("licences", "sprout", "--product", tmp_path / "absent.toml").err.count("\n") == 1
