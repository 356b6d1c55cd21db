"""Forged releases: somebody with a key of his own rewrites weights, records and documents, and signs everything again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from etude.files import read_json, sha256_file, write_json
from etude.lineage.record import load_lineage
from tests import tiny
from tests.lineage import releases

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lineage.releases import Workshop


def failures(shop: Workshop, folder: Path) -> dict[str, list[str]]:
    return {check.name: list(check.lines) for check in shop.verify(folder).failed}


@pytest.mark.parametrize("how", ["fused", "experts", "aside", "embedding"])
def test_a_claimed_base_that_is_only_a_decoy_in_the_file(
    shop: Workshop, folder: Path, tiny_base: Path, tmp_path: Path, how: str
) -> None:
    other = tiny.save_model(tmp_path / "other", seed=1) / "model.safetensors"
    releases.with_decoy(other, tiny_base / "model.safetensors", how)
    releases.swap_weights(folder, other, shop.key)
    shop.sign_again(folder)
    (told,) = failures(shop, folder).pop("base")
    assert ("cannot both be in use" if how in {"fused", "experts"} else "which is the model's cannot be told") in told
    assert set(failures(shop, folder)) == {"base"}


def test_weights_that_are_audited_but_not_loaded(shop: Workshop, folder: Path, tmp_path: Path) -> None:
    """transformers loads model.safetensors; an index beside it leads the audit to others."""
    other = tiny.save_model(tmp_path / "other", seed=1) / "model.safetensors"
    (folder / "model.safetensors").rename(folder / "shown.safetensors")
    shutil.copy(other, folder / "model.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "shown.safetensors"}})
    files = {path.name: path for path in folder.glob("*.safetensors")}
    told = {name: {"sha256": sha256_file(path), "bytes": path.stat().st_size} for name, path in files.items()}
    lineage = load_lineage(folder)
    shown = lineage.records[lineage.head].weights["model.safetensors"].sha256
    changed = releases.with_head(lineage, weights=told)
    releases.rewrite(folder, shop.key, changed)
    for name in ("bom.cdx.json", "spdx.json"):
        (folder / name).write_text((folder / name).read_text().replace(shown, sha256_file(other)))
    shop.sign_again(folder)
    assert set(failures(shop, folder)) == {"base"}


def test_a_release_of_one_name_whose_card_has_another(shop: Workshop, folder: Path) -> None:
    write_json(folder / "audit.json", read_json(folder / "audit.json") | {"release": "Llama-tiny"})
    shop.sign_again(folder)
    (told,) = failures(shop, folder).pop("duties")
    assert told.startswith("audit.json calls the model 'Llama-tiny', the card another name")


def test_a_record_that_is_of_no_ancestor(shop: Workshop, folder: Path) -> None:
    lineage = load_lineage(folder)
    stranger = releases.with_head(lineage, stage="stranger")
    records = {**lineage.records, stranger.head: stranger.records[stranger.head]}
    lineage.model_copy(update={"records": records}).save(folder)
    shop.sign_again(folder)
    assert failures(shop, folder) == {"records": ["the record of stage stranger is of no ancestor of this model"]}


def test_a_known_base_under_another_name_is_called_by_its_own(shop: Workshop, folder: Path) -> None:
    known = replace(shop.sketches[0], facts=shop.sketches[0].facts.model_copy(update={"name": "its true name"}))
    (base,) = [each for each in replace(shop, sketches=[known]).verify(folder).checks if each.name == "base"]
    assert base.lines == ("measured from the weights: tiny, which your library knows as its true name",)


def test_a_base_without_the_licence_that_the_library_knows_it_under(shop: Workshop, folder: Path) -> None:
    """Records can be emptied and LICENSES/ deleted; the weights still say which base it is."""
    facts = shop.sketches[0].facts.model_copy(update={"licence": "Kimi-K2.5-Modified-MIT"})
    knowing = replace(shop, sketches=[replace(shop.sketches[0], facts=facts)])
    told = "tiny is under Kimi-K2.5-Modified-MIT, and no text of that licence is here"
    assert failures(knowing, folder) == {"base": [told]}
