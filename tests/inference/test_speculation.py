"""SpeculationSpeed ahead must not change what is written: not the greedy tokens, not the distribution of the sampled ones."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference import sampler
from etude.inference.sampler import Choice, distribution, draft, sample, truncated
from tests.inference.chances import SURE, surprise

MANY = 1 << 15


class Round(NamedTuple):
    tokens_Rk1: torch.Tensor  # noqa: N815 - as in the sampler
    logprobs_Rk1: torch.Tensor  # noqa: N815 - as in the sampler
    accepted_R: torch.Tensor  # noqa: N815 - as in the sampler


def judge(*given: Any) -> Round:
    return Round(*sampler.judge(*given))


def same(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Choice:
    """Return a choice for many requests that differ in their seeds only."""
    settings = torch.full((count,), temperature), torch.full((count,), top_p), torch.full((count,), top_k)
    return Choice(*settings, torch.arange(count) * 977)


def logs(*chances: float) -> torch.Tensor:
    return torch.tensor(chances).log()


PAIRS = {  # what the model says, what the head says
    "alike": (logs(0.5, 0.3, 0.1, 0.1), logs(0.4, 0.3, 0.2, 0.1)),
    "the same": (logs(0.5, 0.3, 0.1, 0.1), logs(0.5, 0.3, 0.1, 0.1)),
    "far off": (logs(0.9, 0.05, 0.04, 0.01), logs(0.01, 0.04, 0.05, 0.9)),
    "nothing in common": (logs(0.5, 0.5, 0.0, 0.0), logs(0.0, 0.0, 0.3, 0.7)),
    "sure of the wrong one": (logs(0.25, 0.25, 0.25, 0.25), logs(0.0, 1.0, 0.0, 0.0)),
    "sure, and right": (logs(0.0, 0.0, 1.0, 0.0), logs(0.1, 0.2, 0.3, 0.4)),
    "the model cut": (truncated(logs(0.4, 0.3, 0.2, 0.1)[None], same(1, top_p=0.6))[0], logs(0.1, 0.2, 0.3, 0.4)),
    "both cut": (logs(0.6, 0.4, 0.0, 0.0), logs(0.0, 0.5, 0.5, 0.0)),
}


@pytest.mark.parametrize(("model", "head"), PAIRS.values(), ids=list(PAIRS))
def test_a_token_is_distributed_as_the_models_own(model: torch.Tensor, head: torch.Tensor) -> None:
    after = logs(0.1, 0.2, 0.3, 0.4)
    choice, position = same(MANY), torch.full((MANY,), 12)
    drafts = draft(head.expand(MANY, -1), choice, position)
    assert surprise(drafts, head.exp()) > SURE
    done = judge(
        torch.stack([model, after]).expand(MANY, -1, -1), head.expand(MANY, 1, -1), drafts[:, None], choice, position
    )
    assert surprise(done.tokens_Rk1[:, 0], model.exp()) > SURE
    kept = done.accepted_R == 1
    overlap = round(float(torch.minimum(model.softmax(-1), head.softmax(-1)).sum()), 6)
    assert surprise(kept.long(), torch.tensor([1 - overlap, overlap])) > SURE
    assert torch.equal(done.tokens_Rk1[kept, 0], drafts[kept])
    assert surprise(done.tokens_Rk1[kept, 1], after.exp()) > SURE
    drawn_from = torch.stack([model, after]).log_softmax(-1)
    expected = drawn_from[torch.arange(2), done.tokens_Rk1]
    torch.testing.assert_close(done.logprobs_Rk1[:, 0], expected[:, 0])
    torch.testing.assert_close(done.logprobs_Rk1[kept, 1], expected[kept, 1])


class Chain:
    """A model and a head for which the next token depends on the last two: chances of whole texts can be worked out."""

    def __init__(self, seed: int, apart: float) -> None:
        torch.manual_seed(seed)
        self.model = torch.randn(3, 3, 3) * 1.5
        self.head = self.model + torch.randn(3, 3, 3) * apart

    def chances(self, length: int, choice: Choice) -> torch.Tensor:
        """Return the chance of every text of some tokens after 0, 0, in order."""
        found = []
        for text in itertools.product(range(3), repeat=length):
            whole, chance = (0, 0, *text), 1.0
            for place, token in enumerate(text):
                logits = distribution(self.model[whole[place], whole[place + 1]][None], choice.rows(slice(1)), cut=True)
                chance *= float(logits.softmax(-1)[0, token])
            found.append(chance)
        return torch.tensor(found)

    def write(self, choice: Choice, drafts: int, length: int) -> torch.Tensor:
        """Return texts written in rounds, as the engine does it: [R, length]."""
        count = len(choice.seed)
        text = torch.zeros(count, length + 2 * drafts + 4, dtype=torch.int64)
        rows, position = torch.arange(count), torch.full((count,), 2)  # where the next token goes

        def scaled(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return distribution(table[text[rows, at - 2], text[rows, at - 1]], choice, cut=True)

        while int(position.min()) < length + 2:
            position = position.clamp(max=length + 2)
            heads = []
            for ahead in range(drafts):
                heads.append(scaled(self.head, position + ahead))
                text[rows, position + ahead] = draft(heads[-1], choice, position + ahead)
            models = [scaled(self.model, position + ahead) for ahead in range(drafts + 1)]
            drafted = text[rows[:, None], position[:, None] + torch.arange(drafts)]
            done = judge(torch.stack(models, 1), torch.stack(heads, 1), drafted, choice, position)
            text[rows[:, None], position[:, None] + torch.arange(drafts + 1)] = done.tokens_Rk1
            position = position + done.accepted_R + 1
        return text[:, 2 : length + 2]


SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {}), (3, {}), (2, {"temperature": 0.6}), (2, {"top_p": 0.8}), (3, {"top_k": 2, "temperature": 1.4}),
]  # fmt: skip


@pytest.mark.parametrize(("drafts", "settings"), SETTINGS, ids=str)
def test_whole_texts_are_distributed_as_the_models_own(drafts: int, settings: dict[str, Any]) -> None:
    chain, choice = Chain(5, apart=1.5), same(8_000, **settings)
    text = chain.write(choice, drafts, length=3)
    number = (text * torch.tensor([9, 3, 1])).sum(1)
    assert surprise(number, chain.chances(3, choice)) > SURE


@given(st.integers(0, 1 << 30), st.integers(1, 4), st.integers(2, 40))
def test_greedy_text_is_the_models_own(seed: int, drafts: int, vocabulary: int) -> None:
    torch.manual_seed(seed)
    rows = 6
    raw = (torch.randn(rows, drafts + 1, vocabulary) * 3).round() / 2  # with ties
    choice = same(rows, temperature=0.0)
    repeated = Choice(*(each.repeat_interleave(drafts + 1) for each in choice))
    model = distribution(raw.flatten(0, 1), repeated, cut=False).unflatten(0, (rows, -1))
    plain = sample(raw.flatten(0, 1), repeated, torch.arange(rows * (drafts + 1)), cut=False)[0].view(rows, -1)
    drafted = torch.where(torch.rand(rows, drafts) < 0.7, plain[:, :-1], torch.randint(0, vocabulary, (rows, drafts)))
    done = judge(model, torch.randn(rows, drafts, vocabulary), drafted, choice, torch.arange(rows))
    for row in range(rows):
        right = (drafted[row] == plain[row, :-1]).tolist()
        kept = right.index(False) if False in right else drafts
        assert done.accepted_R[row] == kept
        assert done.tokens_Rk1[row, : kept + 1].tolist() == plain[row, : kept + 1].tolist()
    assert (done.logprobs_Rk1 == 0).all()


def test_greedy_is_the_models_own_where_two_logits_are_next_to_each_other() -> None:
    """Scaled by next to nothing they would be one, and the first of them the likeliest."""
    low = torch.rand(4000) * 20 + 1
    raw = torch.stack([low, torch.nextafter(low, torch.tensor(100.0))], 1)
    choice = same(4000, temperature=0.0)
    model = distribution(raw, choice, cut=False)
    done = judge(
        model[:, None].expand(-1, 2, -1),
        model[:, None],
        torch.ones(4000, 1, dtype=torch.int64),
        choice,
        torch.zeros(4000, dtype=torch.int64),
    )
    assert (done.accepted_R == 1).all()
    assert (done.tokens_Rk1 == 1).all()


def test_a_greedy_guess_is_the_heads_likeliest() -> None:
    logits = torch.randn(50, 30)
    assert torch.equal(draft(logits, same(50, temperature=0.0), torch.arange(50)), logits.argmax(-1))


def test_a_guess_is_the_same_in_any_batch() -> None:
    logits, choice, position = torch.randn(20, 300), same(20), torch.arange(20)
    whole = draft(logits, choice, position)
    for row in range(20):
        here = slice(row, row + 1)
        assert draft(logits[here], choice.rows(here), position[here]) == whole[row]
    judged = judge(logits[:, None].repeat(1, 2, 1), logits.flip(0)[:, None], whole[:, None], choice, position)
    for row in range(20):
        here = slice(row, row + 1)
        alone = judge(
            logits[here, None].repeat(1, 2, 1),
            logits.flip(0)[here, None],
            whole[here, None],
            choice.rows(here),
            position[here],
        )
        assert torch.equal(alone.tokens_Rk1[0], judged.tokens_Rk1[row])
