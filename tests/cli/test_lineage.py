from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from etude.models.bases import known_bases
from tests.lineage.families import base, family, flops, stage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Etude


def test_compute_knows_what_a_known_base_was_itself_made_from(etude: Etude, tmp_path: Path) -> None:
    known = known_bases()["kimi-k2.5"]
    root = base("kimi-k2.5", known.pretraining, continues=known.continues)
    family(stage("rl", flops(1e24, sampling_flops=8e23), root), root).save(tmp_path)
    found = json.loads(etude("lineage", "compute", tmp_path, "--json").out)
    assert [(item["name"], item["generation"]) for item in found["items"]] == [
        ("rl", 0), ("pretraining of kimi-k2.5", 1), ("pretraining of Kimi-K2-Base", 2),
    ]  # fmt: skip
    assert found["shares"][0]["own_share"]["unknown"] == []
    said = etude("lineage", "compute", tmp_path).out
    assert "of it sampling 8.00e+23 FLOP, kept or not, and learning 2.00e+23" in said
    assert "cumulative: own share 15 % (7.1 % to 21 %); base 5.86e+24 FLOP (4.1e+24 to 1.2e+25)" in said
    assert "EU, a third of the base, immediate: undecided" in said


def test_a_tree_is_drawn_into_the_file_that_is_asked_for(etude: Etude, tmp_path: Path) -> None:
    root = base("one", None)
    family(stage("sft", flops(1e15), root), root).save(tmp_path)
    drawn = etude("lineage", "draw", tmp_path, tmp_path / "pictures" / "tree.svg", "--title", "mine")
    assert drawn.code == 0, drawn.err
    svg = ElementTree.parse(tmp_path / "pictures" / "tree.svg").getroot()
    assert next(each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")) == "mine"
    assert etude("lineage", "draw", tmp_path, tmp_path / "tree.png").code == 0
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    refused = etude("lineage", "draw", tmp_path, tmp_path / "tree.pdf")
    assert (refused.code, "must end in .svg or .png" in refused.err) == (2, True)
