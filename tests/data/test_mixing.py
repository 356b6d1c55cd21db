from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.loader import Mixer, _mixed, shares, shuffled
from etude.errors import UserError

TOKENS = {"a": 600, "b": 200, "c": 100, "d": 100}
DOMAINS = {"a": "code", "b": "code", "c": "docs", "d": "general"}
SOURCES = st.sampled_from("abcdefg")


def test_without_wishes_a_source_counts_by_its_tokens() -> None:
    assert shares(TOKENS, DOMAINS, {}, {}, None) == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.1, "d": 0.1})


def test_weights_say_how_often_a_token_counts() -> None:
    assert shares(TOKENS, DOMAINS, {"b": 3.0, "c": 4.0}, {}, None) == pytest.approx(
        {"a": 6 / 17, "b": 6 / 17, "c": 4 / 17, "d": 1 / 17}
    )


def test_a_domain_gets_its_stated_share_and_the_others_split_the_rest() -> None:
    got = shares(TOKENS, DOMAINS, {"b": 3.0, "d": 3.0}, {"code": 0.2}, None)
    assert got == pytest.approx({"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.6})


def test_replay_gets_its_share_of_everything_and_stated_domains_keep_theirs() -> None:
    got = shares(TOKENS, DOMAINS, {}, {"code": 0.4}, ("d", 0.1))
    assert got == pytest.approx({"a": 0.3, "b": 0.1, "c": 0.5, "d": 0.1})


def test_replay_does_not_count_to_its_domain() -> None:
    got = shares(TOKENS, {**DOMAINS, "d": "docs"}, {}, {"docs": 0.25}, ("d", 0.5))
    assert got == pytest.approx({"a": 0.1875, "b": 0.0625, "c": 0.25, "d": 0.5})


def test_without_domain_shares_replay_scales_the_others() -> None:
    got = shares(TOKENS, DOMAINS, {}, {}, ("d", 0.55))
    assert got == pytest.approx({"a": 0.3, "b": 0.1, "c": 0.05, "d": 0.55})


def test_an_empty_source_gets_nothing_and_takes_nothing_away() -> None:
    got = shares({**TOKENS, "e": 0}, {**DOMAINS, "e": "docs"}, {"e": 9.0}, {"docs": 0.5}, None)
    assert got["e"] == 0
    assert got["c"] == 0.5


def test_thirds_as_people_write_them_leave_no_rest() -> None:
    got = shares(TOKENS, DOMAINS, {}, {"code": 0.3333333333, "docs": 0.3333333333}, ("d", 0.3333333333))
    assert got == pytest.approx({"a": 0.25, "b": 1 / 12, "c": 1 / 3, "d": 1 / 3})


@pytest.mark.parametrize(
    ("tokens", "domain_shares", "replay", "named"),
    [
        ({**TOKENS, "c": 0}, {"docs": 0.1}, None, "the domain 'docs' is to be 0.1"),
        (TOKENS, {"general": 0.1}, ("d", 0.1), "the domain 'general' is to be 0.1"),
        ({**TOKENS, "d": 0}, {}, ("d", 0.1), "replay of 'd' is to be 0.1"),
        (TOKENS, {}, ("self", 0.1), "replay of 'self' is to be 0.1"),
        (TOKENS, {"code": 0.5, "docs": 0.2, "general": 0.2}, None, "all that has no stated share is to be 0.1"),
        ({"a": 0}, {}, None, "all that has no stated share is to be 1"),
    ],
)
def test_a_share_of_nothing_is_refused(
    tokens: dict[str, int], domain_shares: dict[str, float], replay: tuple[str, float] | None, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        shares(tokens, DOMAINS, {}, domain_shares, replay)


def _ordinary(share: float) -> bool:
    return share == 0 or share > 1e-6


@given(
    st.dictionaries(SOURCES, st.integers(0, 10_000), min_size=1),
    st.dictionaries(SOURCES, st.floats(0.01, 100)),
    st.dictionaries(st.sampled_from("xy"), st.floats(0, 0.4).filter(_ordinary)),
    st.none() | st.tuples(SOURCES, st.floats(0, 0.19).filter(_ordinary)),
)
def test_shares_add_up_and_wishes_are_met(
    tokens: dict[str, int],
    weights: dict[str, float],
    domain_shares: dict[str, float],
    replay: tuple[str, float] | None,
) -> None:
    domains = {source: "xyz"[index % 3] for index, source in enumerate("abcdefg")}
    mixed = [source for source, count in tokens.items() if count and (not replay or source != replay[0])]
    filled = {domains[source] for source in mixed}
    if (
        any(share and domain not in filled for domain, share in domain_shares.items())
        or (replay and replay[1] and not tokens.get(replay[0]))
        or filled <= set(domain_shares)  # they and replay are less than 1 together
    ):
        with pytest.raises(UserError, match="change the shares or the sources"):
            shares(tokens, domains, weights, domain_shares, replay)
        return
    got = shares(tokens, domains, weights, domain_shares, replay)
    assert sum(got.values()) == pytest.approx(1)
    assert list(got) == list(tokens)
    assert all(share >= 0 and (share == 0 or tokens[source]) for source, share in got.items())
    for domain, share in domain_shares.items():
        assert sum(got[source] for source in mixed if domains[source] == domain) == pytest.approx(share)
    if replay:
        assert got.get(replay[0], 0) == pytest.approx(replay[1])


WISHES = st.lists(st.integers(1, 1000), min_size=1, max_size=9).map(
    lambda parts: {f"s{index}": part / sum(parts) for index, part in enumerate(parts)}
)
LENGTH = 64


@given(WISHES, st.lists(st.integers(1, LENGTH), min_size=1, max_size=300))
def test_no_source_is_ever_far_from_its_share(wishes: dict[str, float], rows: list[int]) -> None:
    mixer = Mixer(wishes, LENGTH)
    sources = len(wishes)
    behind = sum(1 / number for number in range(2, sources + 1))
    for tokens in rows:
        mixer.take(mixer.turn(), tokens)
        total = sum(mixer.taken.values())
        for source, share in wishes.items():
            ahead = (mixer.taken[source] - share * total) / LENGTH
            assert -behind - 1e-9 <= ahead <= 1 - 1 / sources + 1e-9


@given(WISHES, st.lists(st.integers(1, LENGTH), min_size=2, max_size=60), st.data())
def test_the_counts_are_the_whole_state(wishes: dict[str, float], rows: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(rows)))
    whole, first, second = (Mixer(wishes, LENGTH) for _ in range(3))
    expected = []
    for tokens in rows:
        expected.append(whole.turn())
        whole.take(expected[-1], tokens)
    for tokens in rows[:stop]:
        first.take(first.turn(), tokens)
    second.taken = json.loads(json.dumps(first.taken))
    got = []
    for tokens in rows[stop:]:
        got.append(second.turn())
        second.take(got[-1], tokens)
    assert got == expected[stop:]


def test_turns_of_full_rows_worked_by_hand() -> None:
    mixer = Mixer({"large": 0.75, "small": 0.25, "never": 0.0}, 4)
    turns = []
    for _ in range(8):
        turns.append(mixer.turn())
        mixer.take(turns[-1], 4)
    assert turns == ["large", "large", "small", "large"] * 2


def test_equal_sources_take_turns_by_name_however_they_are_listed() -> None:
    assert Mixer({"b": 0.5, "a": 0.5}, 4).turn() == Mixer({"a": 0.5, "b": 0.5}, 4).turn() == "a"


def test_shares_that_do_not_add_up_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"0\.9"):
        Mixer({"a": 0.9}, 4)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_shuffling_is_a_bijection(size: int, key: int) -> None:
    assert sorted(shuffled(position, size, key) for position in range(size)) == list(range(size))


def test_shuffling_is_a_bijection_for_every_small_size() -> None:
    for size in range(1, 400):
        assert {shuffled(position, size, size) for position in range(size)} == set(range(size))


@pytest.mark.parametrize("size", [2**31 - 1, 2**40, 10**12 + 39])
def test_shuffling_a_large_range_stays_inside_and_repeats_nothing(size: int) -> None:
    got = [shuffled(position, size, 5) for position in [*range(2000), *range(size - 2000, size)]]
    assert len(set(got)) == 4000
    assert 0 <= min(got) < size / 100
    assert size * 0.99 < max(got) < size


def test_a_bijection_of_a_large_range() -> None:
    size = 50_021
    assert len({shuffled(position, size, 9) for position in range(size)}) == size


def test_every_place_is_equally_likely() -> None:
    """Chi-squared of where each of 7 elements lands, over 7,000 keys: 36 degrees of freedom, mean 36, deviation 8.5."""
    landed = Counter(
        (position, shuffled(position, 7, key * 0x9E3779B9)) for position in range(7) for key in range(7000)
    )
    assert len(landed) == 49
    assert sum((count - 1000) ** 2 / 1000 for count in landed.values()) < 36 + 5 * 8.5


def test_the_order_is_the_same_on_every_machine_and_release() -> None:
    assert [shuffled(position, 10, 2**64 - 1) for position in range(10)] == [2, 5, 7, 6, 4, 1, 0, 8, 9, 3]
    assert [_mixed(step) for step in (1, 2)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ]  # as SplitMix64 from 0 is published


def test_neighbours_do_not_stay_together() -> None:
    size = 10_000
    order = [shuffled(position, size, 3) for position in range(size)]
    near = sum(abs(left - right) < size / 100 for left, right in itertools.pairwise(order))
    assert 150 < near < 250  # a random order has 2 % of them: 199, deviation 14
