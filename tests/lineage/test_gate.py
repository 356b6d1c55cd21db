from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.lineage import release
from etude.lineage.duties import LicenceUse, Product, evaluate
from etude.lineage.facts import Claim, claims
from etude.lineage.record import CarriedLicence, Lineage, Parent
from etude.lineage.release import Match, compare_claims
from tests.lineage.audit import relatives
from tests.lineage.records import child_of, full_record, three_generations
from tests.lineage.releases import sketch_of

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter

LINEAGE, (BASE, MIDDLE, LAST) = three_generations()
TINY = BASE.model_digest


def match(
    name: str, *, derived: bool = True, closeness: float = 0.5, digest: str | None = None, sketch: bool = True
) -> Match:
    return Match(name, digest, "sketch" if sketch else "weights", derived, closeness, "some sentence")


def reasons(*matches: Match, lineage: Lineage = LINEAGE) -> list[str]:
    return [refusal.what for refusal in release.base_refusals(lineage, matches)]


def test_the_claims_of_a_tree_are_its_root_and_parents_without_a_record() -> None:
    assert claims(LINEAGE) == [Claim("tiny", TINY)]
    foreign = Parent(name="foreign", role="weights", record=None, model_digest="0" * 64)
    merged = child_of(LAST, "merge", foreign, Parent(name="judge", role="judge", record=None, model_digest="1" * 64))
    assert claims(Lineage.of(merged, [LINEAGE])) == [Claim("tiny", TINY), Claim("foreign", "0" * 64)]
    from_nothing = full_record(kind="pretrain", parents=[], origin=None)
    assert claims(Lineage.of(from_nothing, [])) == []


@pytest.mark.parametrize("found", [match("tiny"), match("another name", digest=TINY), match("tiny", sketch=False)])
def test_a_claim_that_the_weights_bear_out_is_let_through(found: Match) -> None:
    assert not release.unchecked(LINEAGE, [found])
    assert not reasons(found, match("stranger", derived=False, closeness=0.99))


def test_a_claim_that_the_weights_do_not_bear_out_is_refused() -> None:
    (what,) = reasons(match("tiny", derived=False))
    assert "claimed base tiny was not found in these weights: some sentence" in what


def test_whole_weights_decide_where_a_sketch_finds_nothing() -> None:
    assert not reasons(match("tiny", sketch=False), match("tiny", derived=False))


def test_a_claim_that_nobody_looked_into_names_both_ways_to_do_so() -> None:
    (refusal,) = release.unchecked_refusals(LINEAGE, [match("stranger", derived=False)])
    assert "tiny could not be compared" in refusal.what
    assert "--base" in refusal.fix
    assert "etude library add" in refusal.fix


def test_another_base_is_refused_only_if_it_matches_better() -> None:
    for near in (0.5, 0.54):  # so far from both, chance decides
        assert not reasons(match("tiny", closeness=0.5), match("sibling", closeness=near))
    assert reasons(match("tiny", closeness=0.99), match("sibling", closeness=0.992))
    (what,) = reasons(match("tiny", closeness=0.5), match("sibling", closeness=0.56))
    assert what.startswith("sibling is not in the tree")
    assert len(reasons(match("tiny", derived=False), match("other", closeness=0.2))) == 2


def test_a_model_far_from_its_base_is_not_refused_for_a_sibling_of_the_base(tmp_path: Path, quiet: Reporter) -> None:
    for seed in range(2):
        base = relatives.llama(seed)
        made = {
            "tiny": base,
            "sibling": relatives.drifted(base, 0.01, seed=50 + seed),
            "own": relatives.drifted(base, 2.0, seed=100 + seed),
        }
        at = {name: relatives.save(tmp_path / f"{name}-{seed}", each) for name, each in made.items()}
        known = [sketch_of(at[name], name) for name in ("tiny", "sibling")]
        matches = [found for found, _ in compare_claims(at["own"], "own", {}, known, quiet)]
        assert all(found.derived for found in matches)
        assert not reasons(*matches)


def test_whole_weights_are_not_ranked_against_sketches() -> None:
    weights = match("tiny", closeness=1.0, sketch=False)
    assert reasons(weights, match("tiny", closeness=0.5), match("sibling", closeness=0.56))
    assert not reasons(weights, match("sibling", closeness=0.56)), (
        "without a sketch of the claimed base they are all there is"
    )


@pytest.mark.parametrize(
    "known", [match("tinier", closeness=0.99), match("x", closeness=0.99, digest=MIDDLE.model_digest)]
)
def test_what_a_base_continues_and_any_ancestor_is_in_the_tree(known: Match) -> None:
    assert release.in_tree(known, LINEAGE)
    assert not reasons(match("tiny"), known)


def test_a_model_made_from_nothing_may_match_no_known_base_but_itself() -> None:
    made = full_record(kind="pretrain", parents=[], origin=None)
    lineage = Lineage.of(made, [])
    assert not reasons(match("itself", digest=made.model_digest), lineage=lineage)
    assert reasons(match("somebody else's"), lineage=lineage)


LICENCES = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)


@given(LICENCES, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_every_licence_that_is_not_there_as_received_is_named_once(
    carried: list[str], gone: set[str], altered: set[str]
) -> None:
    files = {
        name: CarriedLicence(file=f"LICENSES/{name}/LICENSE", sha256=name * 64, licence=None, inherited_from=name)
        for name in carried
    }
    parent = full_record(parents=[], licences=list(files.values()))
    head = full_record(
        parents=[Parent(name="p", role="weights", record=parent.id, model_digest=parent.model_digest)], licences=[]
    )
    present = {
        file.file: "0" * 64 if name in altered else file.sha256 for name, file in files.items() if name not in gone
    }
    told = [refusal.what for refusal in release.licence_refusals(Lineage.of(head, [Lineage.of(parent, [])]), present)]
    expected = {f"LICENSES/{name}/LICENSE (unknown text, from {name}) is missing" for name in set(carried) & gone}
    expected |= {
        f"LICENSES/{name}/LICENSE (unknown text, from {name}) was altered" for name in set(carried) & altered - gone
    }
    assert sorted(told) == sorted(expected)


def test_a_licence_may_lie_elsewhere_if_it_is_whole() -> None:
    carried = LAST.licences[0]
    assert not release.licence_refusals(LINEAGE, {"LICENSES/tiny/LICENSE": carried.sha256})


def test_unknown_and_proprietary_data_must_be_acknowledged() -> None:
    licences = {"chats of sft": None, "pages of cpt": None, "tasks": "LicenseRef-proprietary", "both": "LicenseRef-proprietary AND MIT",
                "either": "LicenseRef-proprietary OR MIT", "open": "MIT"}  # fmt: skip
    duties = evaluate([LicenceUse(name, "data", licence) for name, licence in licences.items()], None)
    unknown, own = release.data_refusals(duties, [])
    assert "chats of sft; pages of cpt;" in str(unknown)
    assert "--acknowledge unknown-data" in str(unknown)
    assert "proprietary data went in: tasks; both;" in str(own)
    assert "--acknowledge proprietary" in str(own)
    assert release.data_refusals(duties, ["unknown-data"]) == [own]
    assert not release.data_refusals(duties, ["unknown-data", "proprietary"])
    agreed = Product(data_acknowledged=["tasks", "both", "chats of sft", "pages of cpt"])
    assert not release.data_refusals(evaluate([LicenceUse("tasks", "data", licences["tasks"])], agreed), [])
