"""Drawing against exact chances, cutting against plain Python, numbers against the published generator."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.inference.sampler import Choice, draw, raw_logprobs, sample, sample_packed, truncated, uniform
from tests.inference.chances import SURE, surprise

MANY = 1 << 16


def evenly(count: int) -> torch.Tensor:
    """Return numbers that cover (0, 1) evenly, so that counts are exact but for rounding."""
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()


def choices(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, first_seed: int = 0) -> Choice:
    return Choice(
        torch.full((count,), temperature), torch.full((count,), top_p), torch.full((count,), top_k),
        torch.arange(first_seed, first_seed + count),
    )  # fmt: skip


# ---- random numbers


def test_numbers_are_those_of_splitmix64() -> None:
    # The first outputs of the published generator for the seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = [uniform(torch.tensor([1234567]), torch.tensor([0]), stream=stream).item() for stream in range(4)]
    assert got == [((each >> 41) + 0.5) / (1 << 23) for each in published]


@pytest.mark.parametrize("seed", [0, 1, (1 << 62) - 1, 123_456_789_012_345])
def test_numbers_are_inside_and_even_for_any_seed(seed: int) -> None:
    got = uniform(torch.tensor([seed]), torch.arange(MANY))
    assert got.dtype == torch.float32
    assert got.min() > 0
    assert got.max() < 1
    assert surprise((got * 64).long(), torch.ones(64)) > SURE


def test_places_seeds_and_streams_know_nothing_of_each_other() -> None:
    place = torch.arange(MANY)
    numbers = {
        (seed, ahead, stream): uniform(torch.tensor([seed]), place + ahead, stream)
        for seed, ahead, stream in [(7, 0, 0), (7, 0, 1), (7, 0, 2), (7, 1, 0), (7, 1, 1), (7, 4, 0), (8, 0, 0)]
    }
    seeds = uniform(torch.arange(MANY + 1), torch.tensor([0]))
    for one, other in [*itertools.combinations(numbers.values(), 2), (seeds[:-1], seeds[1:])]:
        assert surprise((one * 16).long() * 16 + (other * 16).long(), torch.ones(256)) > SURE


# ---- drawing

POWERS = 10.0 ** torch.arange(-30, 31, 0.5)
WEIGHTS = {
    "five": torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]),
    "one": torch.tensor([2.0]),
    "a block": torch.arange(128).float(),
    "a block and one": torch.cat([torch.zeros(128), torch.ones(1)]),
    "a block and a little": torch.cat([torch.rand(128, generator=torch.manual_seed(1)), torch.ones(3)]),
    "holes": torch.rand(6144, generator=torch.manual_seed(2)) * (torch.arange(6144) % 300 < 2),
    "last": torch.arange(6144).eq(6143).float(),
    "many": torch.randn(6144, generator=torch.manual_seed(3)).mul(3).exp(),
    "from 1e-30 to 1e30": POWERS,
    "tiny": torch.tensor([1e-30, 3e-30, 0.0]),
    "huge": torch.full((6144,), 1e30),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=list(WEIGHTS))
def test_tokens_are_drawn_as_often_as_they_weigh(weights: torch.Tensor) -> None:
    many = min(MANY, (1 << 24) // len(weights))
    table = weights.expand(many, -1)
    assert surprise(draw(table, uniform(torch.tensor([3]), torch.arange(many))), weights) > SURE
    counts = torch.bincount(draw(table, evenly(many)), minlength=len(weights))
    assert (counts - weights.double() / weights.double().sum() * many).abs().max() <= 1.1  # inverting is exact


@given(
    st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 1e-7, 0.3, 1.0, 1e30]), min_size=1, max_size=300).filter(any),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_no_number_draws_a_token_without_weight(weights: list[float], number: float) -> None:
    table = torch.tensor([weights])
    token = draw(table, torch.tensor([number])).item()
    assert table[0, int(token)] > 0


def test_a_running_sum_that_rises_where_there_is_nothing_draws_nothing_there() -> None:
    """As on a GPU, where each place of a running sum is rounded in its own way."""
    from etude.inference.sampler import _first_above

    weights, ends = torch.tensor([[1.0, 0.0, 2.0, 0.0]]), torch.tensor([[1.0, 1.0000001, 2.9999999, 3.0]])
    for goal, place in ((0.5, 0), (1.0, 2), (2.99999999, 2), (5.0, 2)):
        assert _first_above(torch.tensor([[goal]]), ends, weights).item() == place


# ---- cutting


def kept_by_hand(logits: list[float], top_k: int, top_p: float) -> tuple[set[int], float]:
    """Return which tokens stay, in plain float64, and how near a sum of chances came to `top_p`."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    weights = [math.exp(logits[token] - logits[order[0]]) for token in order]
    stay, before, nearest = set[int](), 0.0, 1.0
    for token, weight in zip(order, weights, strict=True):
        nearest = min(nearest, abs(before - top_p))
        if top_p < 1 and before >= top_p:
            break
        stay.add(token)
        before += weight / sum(weights)
    return stay, nearest


@given(
    st.lists(st.integers(-24, 24).map(lambda each: each / 4), min_size=1, max_size=40),  # many ties
    st.integers(0, 60), st.sampled_from([1.0, 1e-9]) | st.floats(0.01, 0.9999),
)  # fmt: skip
def test_cutting_is_what_plain_python_does(logits: list[float], top_k: int, top_p: float) -> None:
    stay, nearest = kept_by_hand(logits, top_k, top_p)
    assume(top_p == 1 or nearest > 1e-5 or nearest == top_p)
    given = torch.tensor([logits])
    got = truncated(given, choices(1, top_p=top_p, top_k=top_k))[0]
    assert set(torch.isfinite(got).nonzero()[:, 0].tolist()) == stay
    assert torch.equal(got[got.isfinite()], given[0][got.isfinite()])


@pytest.mark.parametrize(("top_p", "stay"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_as_many_stay_as_top_p_needs_and_no_more(top_p: float, stay: int) -> None:
    assert truncated(torch.zeros(1, 4), choices(1, top_p=top_p))[0].isfinite().tolist() == [True] * stay + [False] * (
        4 - stay
    )


def test_a_row_that_asks_for_nothing_is_left_alone_beside_one_that_is_cut() -> None:
    logits = torch.cat([torch.randn(2, 50), torch.full((2, 1), -200.0)], 1)  # the last underflows, but stays
    both = Choice(torch.ones(2), torch.tensor([1.0, 0.1]), torch.tensor([0, 3]), torch.tensor([1, 2]))
    got = truncated(logits, both)
    assert torch.equal(got[0], logits[0])
    assert got[1].isfinite().sum() < 4


# ---- sampling


@given(st.integers(1, 300), st.floats(0.05, 3), st.integers(0, 20), st.floats(0.1, 1), st.integers(0, 1 << 30))
def test_logprobs_are_those_of_the_distribution_drawn_from(
    vocabulary: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.manual_seed(seed)) * 4
    token, logprob, raw_logprob = sample(logits, choices(7, temperature, top_p, top_k), torch.arange(7), cut=True)
    scaled = truncated(logits / temperature, choices(7, temperature, top_p, top_k)).double()
    rows = torch.arange(7)
    expected, raw = (each.log_softmax(-1)[rows, token] for each in (scaled, logits.double()))
    assert expected.isfinite().all()  # nothing that was cut off was drawn
    torch.testing.assert_close(logprob.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(raw_logprob.double(), raw, rtol=0, atol=2e-5)


def test_temperature_0_takes_the_likeliest_whatever_else_is_asked() -> None:
    logits = torch.randn(64, 500) * 100
    logits[0, 7] = logits[0, 400] = logits.max() + 1
    for top_p, top_k in ((1.0, 0), (0.01, 0), (0.9, 5)):
        token, logprob, raw_logprob = sample(logits, choices(64, 0.0, top_p, top_k), torch.arange(64), cut=True)
        assert torch.equal(token, logits.argmax(-1))
        assert (logprob == 0).all()
        assert torch.equal(raw_logprob, raw_logprobs(logits, token))


def test_a_temperature_near_0_is_nearly_greedy_and_finite() -> None:
    logits = torch.randn(64, 500) * 100
    token, logprob, _ = sample(logits, choices(64, 1e-30), torch.arange(64), cut=False)
    assert torch.equal(token, logits.argmax(-1))
    assert logprob.isfinite().all()


def test_a_request_gets_the_same_alone_in_any_batch_and_in_any_order() -> None:
    torch.manual_seed(4)
    count, position = 24, torch.randint(0, 4000, (24,))
    logits = torch.randn(count, 6144) * 5
    choice = Choice(
        torch.rand(count) * 1.5 * (torch.arange(count) % 5 > 0), torch.rand(count).clamp(min=0.3) ** (torch.arange(count) % 2),
        torch.randint(0, 50, (count,)) * (torch.arange(count) % 3 == 0), torch.randint(0, 1 << 62, (count,)),
    )  # fmt: skip
    together = sample_packed(logits, choice, position, cut=True)
    order = torch.randperm(count)
    mixed = sample_packed(logits[order], choice.rows(order), position[order], cut=True)
    assert torch.equal(mixed, together[:, order])
    for row in range(count):
        here = slice(row, row + 1)
        cut = bool(choice.top_p[row] < 1 or choice.top_k[row] > 0)
        alone = sample_packed(logits[here], choice.rows(here), position[here], cut=cut)
        assert torch.equal(alone, together[:, here])


def test_a_token_of_a_large_vocabulary_survives_being_packed() -> None:
    logits = torch.zeros(1, 300_000)
    logits[0, 299_999] = 50
    assert sample_packed(logits, choices(1), torch.tensor([0]), cut=False)[0].long().item() == 299_999


@pytest.mark.parametrize(("top_p", "top_k", "temperature"), [(1.0, 0, 0.7), (0.8, 0, 1.0), (1.0, 3, 2.0)])
def test_a_long_text_is_sampled_in_proportion(top_p: float, top_k: int, temperature: float) -> None:
    logits = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5])
    one = choices(1, temperature, top_p, top_k, first_seed=5)
    token, _, _ = sample(
        logits.expand(MANY, -1),
        Choice(*(each.expand(MANY) for each in one)),
        torch.arange(MANY),
        cut=True,
    )
    assert surprise(token, truncated(logits[None] / temperature, one)[0].double().softmax(-1)) > SURE
