from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.heldout import choose_heldout

SIZES = st.dictionaries(st.text(min_size=1, max_size=6), st.integers(1, 1000), max_size=12)
SHARES = st.floats(0.001, 0.99)
SEEDS = st.integers(0, 1000)
MANY = {f"package-{index}": 500 + 37 * index % 1000 for index in range(400)}


def held(sizes: dict[str, int], share: float, seed: int) -> set[str]:
    return choose_heldout({"code": sizes}, share, seed)


@given(SIZES, SIZES, SHARES, SEEDS)
def test_no_domain_loses_more_than_it_should(
    code: dict[str, int], docs: dict[str, int], share: float, seed: int
) -> None:
    """A repository may be small in one domain and most of another."""
    chosen = choose_heldout({"code": code, "docs": docs}, share, seed)
    for sizes in (code, docs):
        assert sum(sizes.get(name, 0) for name in chosen) <= 1.5 * share * sum(sizes.values())


@given(SIZES, SHARES, SEEDS)
def test_some_but_never_all(sizes: dict[str, int], share: float, seed: int) -> None:
    chosen = held(sizes, share, seed)
    assert chosen <= set(sizes)
    assert len(chosen) < max(len(sizes), 1)


@given(SIZES, SEEDS)
def test_a_share_of_nothing_holds_out_nothing(sizes: dict[str, int], seed: int) -> None:
    assert held(sizes, 0.0, seed) == set()


@given(SIZES, SHARES, SEEDS, st.randoms())
def test_the_order_they_come_in_does_not_matter(
    sizes: dict[str, int], share: float, seed: int, rng: random.Random
) -> None:
    names = list(sizes)
    rng.shuffle(names)
    assert held({name: sizes[name] for name in names}, share, seed) == held(sizes, share, seed)


@given(SIZES, SHARES, SEEDS)
def test_the_share_is_never_grossly_exceeded(sizes: dict[str, int], share: float, seed: int) -> None:
    chosen = held(sizes, share, seed)
    assert sum(sizes[name] for name in chosen) <= 1.5 * share * sum(sizes.values())


@given(SIZES, SHARES, SEEDS)
def test_none_only_if_every_repository_is_too_large(sizes: dict[str, int], share: float, seed: int) -> None:
    if len(sizes) >= 2 and min(sizes.values()) <= 1.5 * share * sum(sizes.values()):
        assert held(sizes, share, seed)


@pytest.mark.parametrize("share", [0.01, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_reaches_the_share_where_repositories_are_small(share: float, seed: int) -> None:
    reached = sum(MANY[name] for name in held(MANY, share, seed)) / sum(MANY.values())
    assert share <= reached < share + 1500 / sum(MANY.values())


@pytest.mark.parametrize("seed", range(20))
def test_a_repository_that_would_be_far_too_much_is_passed_over(seed: int) -> None:
    chosen = held({**MANY, "monolith": 10_000_000}, 0.01, seed)
    assert chosen
    assert "monolith" not in chosen


def test_if_all_are_too_large_none_is_held_out() -> None:
    assert held({"a": 100, "b": 90, "c": 110}, 0.001, 0) == set()


def test_an_empty_repository_is_not_held_out() -> None:
    assert held({"a": 100, "empty": 0}, 0.5, 0) == set()
    assert all(held({"a": 9, "b": 9, "empty": 0}, 0.5, seed) <= {"a", "b"} for seed in range(20))


@pytest.mark.parametrize("seed", range(10))
def test_one_repository_more_moves_hardly_any_other(seed: int) -> None:
    before = held(MANY, 0.1, seed)
    after = held({**MANY, "newcomer": 900}, 0.1, seed)
    assert len((before ^ after) - {"newcomer"}) <= 3


def test_the_seed_changes_the_choice_and_every_repository_gets_its_chance() -> None:
    chosen = [held(MANY, 0.1, seed) for seed in range(100)]
    assert len({frozenset(each) for each in chosen}) == 100
    assert set().union(*chosen) == set(MANY)


def test_the_choice_is_the_same_on_every_machine_and_release() -> None:
    sizes = dict.fromkeys("abcdefghij", 10)
    assert held(sizes, 0.3, 0) == {"c", "d", "f"}  # the first by `printf '0\\0c' | sha256sum`
