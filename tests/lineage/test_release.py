from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import ModelCard

from etude.errors import UserError
from etude.files import read_json, write_json
from etude.lineage import signing
from etude.lineage.record import load_lineage
from etude.lineage.release import Order, RefusedError, make_release
from etude.lineage.verify import verify_release
from etude.progress import Reporter
from tests import tiny
from tests.lineage import releases
from tests.lineage.licence_texts import KIMI
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lineage.releases import Workshop

LICENCE = "LICENSES/tiny/LICENSE"


def failures(shop: Workshop, folder: Path, key: Path | None = None) -> dict[str, list[str]]:
    return {check.name: list(check.lines) for check in shop.verify(folder, key).failed}


def test_a_release_holds_everything_and_verifies_wherever_it_lies(shop: Workshop, whole: Path, folder: Path) -> None:
    names = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    documents = {"README.md", "NOTICE", LICENCE, "lineage.json", "bom.cdx.json", "spdx.json", "audit.json", "tree.svg", "tree.png",
                 "model.sig", "model.sig.pub"}  # fmt: skip
    attestations = {
        f"attestations/{number:02d}-{stage}.dsse.json" for number, stage in enumerate(["base", "one", "two"], 1)
    }
    assert names == documents | attestations | {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    found = shop.verify(folder)
    assert [check.outcome for check in found.checks] == ["ok"] * len(found.checks), found.checks
    assert {"signature", "files", "records", "weights", "licences", "attestations", "card", "duties", "base"} <= {
        check.name for check in found.checks
    }
    assert not list(whole.parent.glob(".*")), "nothing is left beside it"


def test_outside_programs_agree(whole: Path) -> None:
    words = ["verify", "key", whole, "--signature", whole / "model.sig", "--public_key", whole / "model.sig.pub"]
    said = subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert ModelCard.load(whole / "README.md").data.base_model in ("tiny", ["tiny"])


def test_a_release_shares_no_file_with_its_run(shop: Workshop, whole: Path) -> None:
    assert not (whole / "model.safetensors").samefile(shop.run / "two/model/model.safetensors")


def test_a_changed_byte(shop: Workshop, folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    found = failures(shop, folder)
    assert found["files"] == ["the weight file model.safetensors was changed after signing"]
    shop.sign_again(folder)
    assert failures(shop, folder) == {"weights": ["model.safetensors is not the file that was recorded"]}


def test_a_deleted_licence(shop: Workshop, folder: Path) -> None:
    (folder / LICENCE).unlink()
    found = failures(shop, folder)
    assert found["files"] == [f"the licence file {LICENCE} was deleted after signing"]
    shop.sign_again(folder)
    (told,) = failures(shop, folder)["licences"]
    assert told.startswith(f"{LICENCE} (unknown text, from tiny) is missing")


def test_an_altered_licence(shop: Workshop, folder: Path) -> None:
    (folder / LICENCE).write_text("Tiny Licence: do as we like.\n")
    assert failures(shop, folder)["files"] == [f"the licence file {LICENCE} was changed after signing"]
    shop.sign_again(folder)
    (told,) = failures(shop, folder)["licences"]
    assert told.startswith(f"{LICENCE} (unknown text, from tiny) was altered")


@pytest.mark.parametrize("stage", ["base", "one", "two"])
def test_an_edited_record(shop: Workshop, folder: Path, stage: str) -> None:
    releases.edit_record(folder, stage)
    found = failures(shop, folder)
    assert found["files"] == ["the file lineage.json was changed after signing"]
    shop.sign_again(folder)
    (told,) = failures(shop, folder)["records"]
    assert told.startswith(f"the record of stage {stage} was edited")
    assert [check.name for check in shop.verify(folder).checks if check.outcome == "open"] == ["the rest"]


def test_a_swapped_base_is_seen_in_the_weights_whatever_else_was_made_again(
    shop: Workshop, folder: Path, tmp_path: Path
) -> None:
    signing.make_key(tmp_path / "forger.pem")
    other = tiny.save_model(tmp_path / "other", seed=1) / "model.safetensors"
    releases.swap_weights(folder, other, tmp_path / "forger.pem")
    shop.sign_again(folder, tmp_path / "forger.pem")
    (told,) = failures(shop, folder).pop("base")
    assert told == "the claimed base tiny was not found in these weights: no evidence of shared initialisation"
    assert set(failures(shop, folder)) == {"base"}
    owner = tmp_path / "owner.pub"
    owner.write_bytes(signing.public_pem(shop.key))
    assert failures(shop, folder, owner)["signature"][0].startswith("model.sig is not a signature by key")


def test_a_record_rewritten_without_its_statement(shop: Workshop, folder: Path) -> None:
    lineage = releases.with_head(load_lineage(folder), started="2020-01-01T00:00:00+00:00")
    kept = (folder / "attestations/03-two.dsse.json").read_bytes()
    releases.rewrite(folder, shop.key, lineage)
    (folder / "attestations/03-two.dsse.json").write_bytes(kept)
    shop.sign_again(folder)
    assert failures(shop, folder) == {
        "attestations": [f"attestations/03-two.dsse.json does not say what record {lineage.head[:12]} (two) says"]
    }


def test_statements_that_are_missing_foreign_or_signed_by_another(shop: Workshop, folder: Path, tmp_path: Path) -> None:
    signing.make_key(tmp_path / "other.pem")
    at = folder / "attestations"
    envelope = read_json(at / "02-one.dsse.json")
    write_json(
        at / "02-one.dsse.json",
        signing.seal(signing.unseal(envelope, signing.public_pem(shop.key)), tmp_path / "other.pem"),
    )
    (at / "01-base.dsse.json").rename(at / "09-more.dsse.json")
    shop.sign_again(folder)
    assert failures(shop, folder) == {
        "attestations": [
            "attestations/01-base.dsse.json is missing: stage base is not attested",
            "attestations/02-one.dsse.json is not signed by this key, or was edited",
            "attestations/09-more.dsse.json attests no stage of this tree",
        ]
    }


def test_a_card_that_names_another_base(shop: Workshop, folder: Path) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text().replace("- tiny\n", "- huge\n", 1))
    shop.sign_again(folder)
    (told,) = failures(shop, folder)["card"]
    assert "base_model" in told
    assert "huge" in told


@pytest.mark.parametrize(("name", "old", "new", "said"), [
    ("README.md", "grown from `tiny`", "trained from scratch", "its section 'tiny-scaled' is not what"),
    ("README.md", "| one | scale |", "| one | distil |", "its section 'How it was made' is not what"),
    ("README.md", "   └─ base", "   └─ ours", "its section 'The family tree' is not what"),
    ("README.md", "| unknown text, read it |", "| MIT |", "its section 'Licences and attribution' is not what"),
    ("README.md", "## Limits", "## Warranty\n\nNone of the above holds.\n\n## Limits", "its section 'Warranty' is not known here"),
    ("README.md", "## Limits", "## Hopes", "its section 'Limits' is missing"),
    ("tree.svg", "tiny (base)", "ours (base)", "tree.svg draws another tree"),
])  # fmt: skip
def test_the_text_of_a_card_and_the_drawn_tree_are_held_against_the_records(
    shop: Workshop, folder: Path, name: str, old: str, new: str, said: str
) -> None:
    assert old in (folder / name).read_text()
    (folder / name).write_text((folder / name).read_text().replace(old, new))
    shop.sign_again(folder)
    assert said in failures(shop, folder)["card"][0]


def test_the_text_of_another_version_is_left_open(shop: Workshop, folder: Path) -> None:
    write_json(folder / "audit.json", read_json(folder / "audit.json") | {"etude": "0.0.1"})
    shop.sign_again(folder)
    found = shop.verify(folder)
    assert not found.failed
    assert [check.name for check in found.checks if check.outcome == "open"] == ["card"]


def test_scores_are_the_card_s_own(shop: Workshop, folder: Path) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text().replace("No evaluation was given to this release.", "It is good."))
    shop.sign_again(folder)
    assert not failures(shop, folder)  # nothing else in the folder has them: only the signature stands for them


@pytest.mark.parametrize(("name", "check"), [("bom.cdx.json", "bills of materials"), ("spdx.json", "bills of materials"),
                                             ("README.md", "card"), ("audit.json", "duties"), ("lineage.json", "records"),
                                             ("config.json", "weights"), ("tokenizer.json", "weights")])  # fmt: skip
@pytest.mark.parametrize("how", ["emptied", "garbage", "deleted"])
def test_any_document_that_is_spoilt_and_signed_again(
    shop: Workshop, folder: Path, name: str, check: str, how: str
) -> None:
    (folder / name).unlink()
    if how != "deleted":
        (folder / name).write_text("" if how == "emptied" else "[1, {")
    shop.sign_again(folder)
    found = failures(shop, folder)
    assert check in found
    assert all("\n" not in line for lines in found.values() for line in lines)


def test_a_bill_of_materials_of_another_model(shop: Workshop, folder: Path) -> None:
    digest = load_lineage(folder).records[load_lineage(folder).head].model_digest
    for name in ("bom.cdx.json", "spdx.json"):
        (folder / name).write_text((folder / name).read_text().replace(digest, "0" * 64))
    shop.sign_again(folder)
    assert failures(shop, folder)["bills of materials"] == [
        f"{name} is not about these weights" for name in ("bom.cdx.json", "spdx.json")
    ]


def test_files_that_were_added(shop: Workshop, folder: Path) -> None:
    (folder / "more.md").write_text("trust me")
    assert failures(shop, folder) == {"files": ["more.md was added after signing"]}
    shutil.copy(folder / "model.safetensors", folder / "extra.safetensors")
    assert "extra.safetensors is in no record" in failures(shop, folder)["weights"]


def test_a_base_that_is_in_no_library_is_left_open(shop: Workshop, folder: Path) -> None:
    found = verify_release(folder, None, [], shop.quiet)
    assert not found.failed
    (left,) = [check for check in found.checks if check.outcome == "open"]
    assert left.name == "base"
    assert "tiny is not in your library" in left.lines[0]
    told = json.loads(json.dumps(found.to_json()))
    assert told["verified"] is True
    assert told["key"]["given"] is False


def test_what_is_no_release(shop: Workshop, folder: Path, tmp_path: Path) -> None:
    (folder / "model.sig.pub").unlink()
    with pytest.raises(UserError, match=one_line("model.sig.pub", "--key")):
        shop.verify(folder)
    with pytest.raises(UserError, match=one_line(tmp_path, "no model.sig")):
        shop.verify(tmp_path)


def refused(shop: Workshop, run: Path, out: Path, **wishes: object) -> list[str]:
    """Return why a release is refused, after seeing that nothing was left of it."""
    with pytest.raises(RefusedError) as found:
        make_release(run, out, Order(out.name, shop.key, **wishes), shop.sketches, {}, shop.quiet)  # type: ignore[arg-type]
    assert list(out.parent.glob(f"*{out.name}*")) == []
    deep = out.parent / "a" / "b" / out.name
    with pytest.raises(RefusedError):
        make_release(run, deep, Order(out.name, shop.key, **wishes), shop.sketches, {}, shop.quiet)  # type: ignore[arg-type]
    assert not (out.parent / "a").exists()
    return [f"{refusal.reason}: {refusal}" for refusal in found.value.refusals]


@pytest.fixture
def run(tmp_path: Path, shop: Workshop) -> Path:
    """A copy of the run, a test's own."""
    return shutil.copytree(shop.run, tmp_path / "run")


def test_the_gate_refuses_weights_that_are_not_the_recorded_ones(shop: Workshop, run: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other", seed=1) / "model.safetensors"
    (run / "two/model/model.safetensors").write_bytes(other.read_bytes())
    (run / "two/model/config.json").unlink()
    told = refused(shop, run, tmp_path / "made")
    assert [line.split(";")[0] for line in told] == [
        "record: config.json is missing",
        "record: model.safetensors is not the file that was recorded",
    ]


def test_the_gate_refuses_a_lost_and_an_altered_licence(shop: Workshop, run: Path, tmp_path: Path) -> None:
    (run / "two/model" / LICENCE).write_text("all rights reserved")
    (told,) = refused(shop, run, tmp_path / "made")
    assert told.startswith(f"licence: {LICENCE} (unknown text, from tiny) was altered; put it back")
    (run / "two/model" / LICENCE).unlink()
    (told,) = refused(shop, run, tmp_path / "made")
    assert "is missing" in told


def test_the_gate_refuses_a_base_that_the_weights_do_not_show(shop: Workshop, run: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other", seed=1) / "model.safetensors"
    releases.put_weights(run / "two/model", other).save(run / "two/model")
    (told,) = refused(shop, run, tmp_path / "made")
    assert told.startswith("base: the claimed base tiny was not found in these weights")


def test_the_gate_refuses_a_tree_that_leaves_out_a_nearer_base(
    shop: Workshop, run: Path, tiny_base: Path, tmp_path: Path
) -> None:
    hidden = releases.relative(tiny_base, tmp_path / "hidden", noise=0.1, seed=1)
    known = [*shop.sketches, releases.sketch_of(hidden, "hidden")]
    make_release(run, tmp_path / "honest", Order("honest", shop.key), known, {}, shop.quiet)
    grown = releases.relative(hidden, tmp_path / "grown", noise=0.05, seed=2) / "model.safetensors"
    releases.put_weights(run / "two/model", grown).save(run / "two/model")
    with pytest.raises(
        RefusedError, match=one_line("hidden is not in the tree", "better", "name it as the base")
    ) as found:
        make_release(run, tmp_path / "made", Order("made", shop.key), known, {}, shop.quiet)
    assert len(found.value.refusals) == 1


def test_a_base_is_compared_by_sketch_by_its_run_or_by_a_folder(
    shop: Workshop, run: Path, tiny_base: Path, tmp_path: Path
) -> None:
    order = Order("made", shop.key)
    make_release(run, tmp_path / "in the run", order, [], {}, shop.quiet)
    shutil.rmtree(run / "base")
    with pytest.raises(RefusedError, match=one_line("tiny could not be compared", "--base")):
        make_release(run, tmp_path / "nowhere", order, [], {}, shop.quiet)
    given = Order("made", shop.key, bases=[tiny_base])
    make_release(run, tmp_path / "given", given, [], {}, shop.quiet)
    make_release(run, tmp_path / "sketch", order, shop.sketches, {}, shop.quiet)
    against = [
        [finding["against"] for finding in read_json(tmp_path / name / "audit.json")["findings"]]
        for name in ("in the run", "given", "sketch")
    ]
    assert against == [["weights"], ["weights"], ["sketch"]]
    other = Order("made", shop.key, bases=[tiny.save_model(tmp_path / "other", seed=1)])
    with pytest.raises(UserError, match=one_line("--base", "no base of this model", "tiny")):
        make_release(run, tmp_path / "wrong", other, [], {}, shop.quiet)
    with pytest.raises(UserError, match=one_line("--base", tmp_path / "none", "holds no safetensors")):
        make_release(run, tmp_path / "wrong", Order("made", shop.key, bases=[tmp_path / "none"]), [], {}, shop.quiet)


def test_a_stage_cannot_write_outside_the_release(shop: Workshop, run: Path, tmp_path: Path) -> None:
    releases.with_head(load_lineage(run / "two/model"), stage="../../../../escaped").save(run / "two/model")
    made = shop.release_of(run, tmp_path / "deep/made")
    assert not list(tmp_path.rglob("escaped*"))
    assert not shop.verify(made).failed


def test_files_that_no_record_names_are_left_out_and_told(
    shop: Workshop, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "two/model/mine.txt").write_text("mine")
    make_release(run, tmp_path / "made", Order("made", shop.key), shop.sketches, {}, Reporter())
    assert "no record names them: mine.txt\n" in capsys.readouterr().err
    assert not (tmp_path / "made/mine.txt").exists()


def test_a_duty_that_fires_must_be_met_before_and_after(tmp_path: Path, quiet: Reporter) -> None:
    base = tiny.save_model(tmp_path / "tiny")
    (base / "LICENSE").write_text(KIMI)
    shop = releases.workshop(tmp_path / "shop", base, quiet)
    product = tmp_path / "product.toml"
    product.write_text("[product]\nmonthly_revenue = 30e6\n")
    (told,) = refused(shop, shop.run, tmp_path / "made", product=product)
    assert told.startswith("duty: Kimi-K2.5-Modified-MIT of tiny")
    assert "product.interface" in told
    product.write_text('[product]\nmonthly_revenue = 30e6\ninterface = ["Made with Kimi K2.5"]\n')
    made = shop.release(tmp_path / "made", product=product)
    assert "**Kimi K2.5**" in (made / "README.md").read_text()
    assert not shop.verify(made).failed
    (made / "README.md").write_text((made / "README.md").read_text().replace("Kimi K2.5", "it"))
    shop.sign_again(made)
    (told,) = failures(shop, made)["duties"]
    assert "the model card does not say it" in told


def test_our_own_licence_and_product_go_in(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("Mine: ask me.\n")
    (tmp_path / "product.toml").write_text('[product]\ncommercial = false\n[organisation]\nname = "Tiny Works"\n')
    made = shop.release(tmp_path / "made", licence=tmp_path / "mine.txt", product=tmp_path / "product.toml")
    assert (made / "LICENSE").read_text() == "Mine: ask me.\n"
    assert "Provider: Tiny Works" in (made / "README.md").read_text()
    assert (made / "product.toml").read_text() == (tmp_path / "product.toml").read_text()
    assert not shop.verify(made).failed


def test_a_release_is_never_changed_and_wrong_wishes_are_refused(shop: Workshop, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(whole, "exists")):
        shop.release(whole)
    for wish in ({"licence": tmp_path / "none"}, {"product": tmp_path / "none"}):
        with pytest.raises(UserError, match=one_line(tmp_path / "none")):
            shop.release(tmp_path / "made", **wish)
    for name in ("two\nlines", "caf\udce9", " "):
        with pytest.raises(UserError, match=one_line("is no name for a model", "--name")):
            make_release(shop.run, tmp_path / "made", Order(name, shop.key), shop.sketches, {}, shop.quiet)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_release_left_is_removed(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / ".made.part/made").mkdir(parents=True)
    (tmp_path / ".made.part/made/half.bin").write_text("half")
    assert not shop.verify(shop.release(tmp_path / "made")).failed
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
