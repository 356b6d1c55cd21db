from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.lineage.compute import (
    LORA,
    USUAL,
    Amount,
    Attention,
    ComputeShape,
    Known,
    compute_shares,
    not_known,
    percent,
    since_base,
    training_flops,
)
from etude.lineage.record import Compute, Lineage, load_lineage
from etude.models.bases import ancestors, known_bases, resolve
from tests.lineage.families import NOTHING, base, family, flops, merged, stage
from tests.lineage.records import full_record

K2 = ancestors()


def of_base(name: str, own: float) -> Lineage:
    """Return a model of a known base, made with so much compute of one's own."""
    known = known_bases()[name]
    root = base(name, known.pretraining, continues=known.continues)
    return family(stage("cpt", flops(own), root), root)


def test_composers_three_quarters_under_both_conventions() -> None:
    """The published "a quarter of the compute is the base's" fits K2 and K2.5 with 1.8e25 of one's own (provenance.md, 4.2)."""
    found = compute_shares(of_base("kimi-k2.5", 1.757e25), K2)
    k2, k25 = 6 * 32e9 * 15.5e12, 6 * 32e9 * 15e12
    assert found.total.value == pytest.approx(k2 + k25 + 1.757e25)
    cumulative, immediate, hours = found.shares
    assert cumulative.own_share is not None
    assert immediate.own_share is not None
    assert (
        cumulative.own_share.value == pytest.approx(1.757e25 / (k2 + k25 + 1.757e25)) == pytest.approx(0.75, abs=0.001)
    )
    assert immediate.own_share.value == pytest.approx(1.757e25 / (k25 + 1.757e25)) == pytest.approx(0.859, abs=0.001)
    assert cumulative.own_share.low == pytest.approx(0.9 * 1.757e25 / (0.9 * 1.757e25 + 2 * (k2 + k25)))
    assert cumulative.own_share.high == pytest.approx(1.1 * 1.757e25 / (1.1 * 1.757e25 + 0.7 * (k2 + k25)))
    assert hours.own_share is None
    assert hours.base.unknown == ("pretraining of kimi-k2.5", "pretraining of Kimi-K2-Base")
    assert {each.rule: each.verdict for each in found.standings} == {
        "a third of the base, cumulative": "above",
        "a third of the base, immediate": "above",
        "general-purpose model, 1e23 FLOP": "above",
        "systemic risk, 1e25 FLOP": "above",
    }


def test_an_hour_of_one_gpu_is_next_to_nothing_and_said_to_be() -> None:
    found = compute_shares(of_base("smollm2-135m", 1.1e18), K2)
    own = found.shares[0].own_share
    assert own
    assert own.value == pytest.approx(1.1e18 / (6 * 134_515_008 * 2.097152e12 + 1.1e18))
    assert any(
        line.startswith("cumulative: own share 0.065 % (0.029 % to 0.10 %); base 1.69e+21 FLOP")
        for line in found.lines()
    )
    assert [each.verdict for each in found.standings] == ["below"] * 3


def test_what_a_base_continues_is_unknown_without_a_registry_and_makes_it_a_lower_bound() -> None:
    found = compute_shares(of_base("kimi-k2.5", 1e24))
    cumulative, immediate, _ = found.shares
    assert cumulative.base.unknown == ("pretraining of Kimi-K2-Base",)
    assert cumulative.base.high == math.inf
    assert cumulative.own_share is not None
    assert immediate.own_share is not None
    assert (cumulative.own_share.low, cumulative.own_share.high) == (0.0, immediate.own_share.high)
    assert not immediate.own_share.unknown
    assert (
        "cumulative: own share at most 35 %; base at least 2.02e+24 FLOP (not known: pretraining of Kimi-K2-Base)"
        in found.lines()
    )
    assert found.standings[0].verdict == "undecided"  # its third is somewhere above 6.7e23
    assert json.loads(json.dumps(found.to_json()))["total"]["high"] is None


def test_a_base_of_which_nothing_is_known_falls_back_to_a_third_of_the_threshold() -> None:
    root = base("mystery", None)
    found = compute_shares(family(stage("cpt", flops(1e23), root), root))
    assert [share.own_share for share in found.shares] == [None] * 3
    assert found.lines()[2] == "cumulative: no share known; base not known: pretraining of mystery; nothing is known"
    assert [each.verdict for each in found.standings] == ["above", "below", "undecided", "undecided"]
    assert "limit 3.33e+22" in found.standings[0].sentence
    assert "limit 3.33e+24" in found.standings[1].sentence


def test_a_model_from_nothing_is_all_its_makers_own() -> None:
    sprout = load_lineage(resolve("sprout").folder)
    found = compute_shares(sprout)
    assert (found.bases, found.own, found.total.value) == (
        (),
        found.total,
        sprout.records[sprout.head].compute.model_flops,
    )
    assert [share.own_share and share.own_share.value for share in found.shares] == [1.0, 1.0, 1.0]
    assert [each.rule for each in found.standings] == ["general-purpose model, 1e23 FLOP", "systemic risk, 1e25 FLOP"]
    assert found.lines()[0].startswith("own compute (it has no base): 6.39e+16 FLOP")


def test_rollouts_and_sandboxes_are_told_apart_and_a_base_reached_twice_counts_once() -> None:
    lineage, _ = merged()
    found = compute_shares(lineage, K2)
    assert found.own.value == pytest.approx(2e20 + 5e20 + 1e20 + 1e19)
    assert found.own.low == pytest.approx(0.9 * found.own.value)
    assert [(item.name, item.generation) for item in found.items if item.generation] == [
        ("somebody-7b, which carries no record", 1), ("pretraining of kimi-k2.5", 1), ("pretraining of Kimi-K2-Base", 2),
    ]  # fmt: skip
    assert (found.sampling_flops, found.sandbox_seconds) == (4e20, 7200.0)
    assert found.lines()[1] == "of it sampling 4.00e+20 FLOP, kept or not, and learning 4.10e+20; sandboxes 2.00 hours"
    assert set(found.bases) == {"kimi-k2.5", "somebody-7b"}
    assert any(note.startswith("teacher-9b wrote or scored what was learnt from (rl)") for note in found.notes)
    own, _ = since_base(lineage)
    assert sorted(record.stage for record in own) == ["cpt", "merge", "mtp", "rl", "sft"]


def test_a_base_that_two_runs_recorded_is_one_base() -> None:
    first, second = base("one", flops(7e20)), base("one", flops(7e20), started="2026-02-02T00:00:00+00:00")
    left, right = stage("left", flops(1e18), first), stage("right", flops(1e18), second)
    found = compute_shares(family(stage("merge", NOTHING, left, right), left, right, first, second))
    assert first.id != second.id
    assert found.total.value == 7e20 + 2e18


def test_immediate_goes_back_to_the_base_of_the_base_and_no_further() -> None:
    """A run on the model of another run, whose base was taken over from a third as it was."""
    pretrain = stage("pretrain", flops(100e15))
    shipped = base("sprout", None, pretrain)
    copied = base("copy", None, shipped, weights=shipped.weights)
    cpt = stage("cpt", flops(30e15), copied)
    mine = base("cpt", None, cpt)
    sft = stage("sft", flops(10e15), mine)
    found = compute_shares(family(sft, mine, cpt, copied, shipped, pretrain))
    assert {item.name: item.generation for item in found.items} == {"sft": 0, "cpt": 1, "pretrain": 2}
    assert [share.own_share and share.own_share.value for share in found.shares] == [10 / 140, 10 / 40, 1 / 3]
    assert found.bases == ("cpt",)


def test_hours_of_different_devices_are_not_compared() -> None:
    pretrain = stage("pretrain", flops(1e18, device="NVIDIA H200"))
    root = base("sprout", None, pretrain)
    found = compute_shares(family(stage("sft", flops(1e15, device="CPU, 2 cores"), root), root, pretrain)).shares[2]
    assert (found.own_share, found.own.value, found.base.value) == (None, 1.0, 1.0)
    assert (
        found.why == "1.00 hours on NVIDIA H200, 1.00 hours on CPU, 2 cores; hours of different devices do not compare"
    )


def test_a_record_may_bring_its_own_interval_and_lora_widens_the_usual_one() -> None:
    root = base("one", flops(1e20, method="disclosed", low=5e19, high=6e20))
    tuned = stage(
        "sft", flops(3e18), root, recipe=full_record().recipe.model_copy(update={"stage": {"lora": {"rank": 8}}})
    )
    found = {item.name: item.flops for item in compute_shares(family(tuned, root)).items}
    assert found["pretraining of one"] == Amount(1e20, 5e19, 6e20)
    assert found["sft"].low == pytest.approx(3e18 * 0.9 * LORA)
    assert found["sft"].high == pytest.approx(3e18 * 1.1)


def test_an_old_record_of_rl_says_that_its_sampling_was_not_counted_apart() -> None:
    root = base("one", flops(1e20))
    found = compute_shares(family(stage("rl", flops(1e18), root), root))
    assert found.sampling_flops is None
    assert found.lines()[1] == "sampling is not counted separately: this rl was recorded before it was"


@pytest.mark.parametrize(
    ("parameters", "length", "attention"),
    [(134_515_008, 2048, (Attention(9, 64, 64),) * 30), (8_030_261_248, 8192, (Attention(32, 128, 128),) * 32)],
    ids=["SmolLM2-135M", "Llama-3.1-8B"],
)
def test_the_usual_interval_of_6nd_holds_what_the_shape_says(
    parameters: int, length: int, attention: tuple[Attention, ...]
) -> None:
    exact = training_flops(ComputeShape(parameters, attention), length)
    below, above = USUAL["imputed"]
    assert below < exact / (6 * parameters * length) < above


amounts = st.tuples(st.floats(1, 1e25), st.floats(0.1, 1), st.floats(1, 10)).map(
    lambda a: Amount(a[0], a[0] * a[1], a[0] * a[2])
)


@given(amounts, amounts, st.floats(0, 1), st.floats(0, 1))
def test_a_share_holds_every_case_that_its_intervals_allow(own: Amount, other: Amount, at: float, there: float) -> None:
    share = own.share_of_sum(other)
    mine, theirs = (each.low + place * (each.high - each.low) for each, place in ((own, at), (other, there)))
    assert share.low * (1 - 1e-9) <= mine / (mine + theirs) <= share.high * (1 + 1e-9)
    assert share.low <= share.value <= share.high
    wider = own.share_of_sum(other + not_known("something"))
    assert (wider.low, wider.high, wider.unknown) == (0.0, share.high, ("something",))


@given(st.floats(1e-9, 1 - 1e-9))
def test_a_percentage_is_never_rounded_to_none_or_all(share: float) -> None:
    told = float(percent(share).removesuffix(" %"))
    assert 0 < told < 100
    assert told / 100 == pytest.approx(share, abs=0.06 * min(share, 1 - share))


def test_everything_in_json_is_plain() -> None:
    lineage, _ = merged()
    found = compute_shares(lineage, {"Kimi-K2-Base": Known(None, None)}).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["items"][0]["compute"] == Compute.model_validate(found["items"][0]["compute"]).model_dump(mode="json")
