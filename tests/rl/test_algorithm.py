"""Every algorithm against its objective as the paper writes it: plain loops in float64, differentiated by finite differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.rl.algorithm import ALGORITHMS, ratios
from etude.rl.settings import RlSettings
from etude.rl.trainer import Trainer
from tests.rl import made

GROUPS, SIZE, NORMALISER, TAU = 2, 3, 10, 0.05


@dataclass(frozen=True)
class Token:
    """One sampled token: which episode and branch it is of, its log-prob then, and whether it is learnt."""

    episode: int
    branch: int
    old: float
    learnt: bool


def some_batch(seed: int) -> tuple[list[Token], list[float], list[list[float]]]:
    """Return the tokens of a batch in order, their log-probs now, and the rewards of each group."""
    rng, tokens, branch = random.Random(seed), list[Token](), 0
    for episode in range(GROUPS * SIZE):
        for _ in range(rng.randrange(1, 3)):
            old = [rng.uniform(-4, -1) for _ in range(rng.randrange(2, 6))]
            tokens += [Token(episode, branch, each, rng.random() < 0.8) for each in old]
            branch += 1
    now = [token.old + rng.uniform(-1.2, 1.2) for token in tokens]
    return tokens, now, [[rng.random() for _ in range(SIZE)] for _ in range(GROUPS)]


def centred(rewards: list[float]) -> list[float]:
    return [reward - fmean(rewards) for reward in rewards]


def standardised(rewards: list[float]) -> list[float]:
    return [each / (pstdev(rewards) + 1e-6) for each in centred(rewards)]


def leave_one_out(rewards: list[float]) -> list[float]:
    return [reward - fmean([*rewards[:place], *rewards[place + 1 :]]) for place, reward in enumerate(rewards)]


def learnt_of(tokens: list[Token], **of: int) -> list[int]:
    return [place for place, token in enumerate(tokens)
            if token.learnt and all(getattr(token, name) == value for name, value in of.items())]  # fmt: skip


def by_episode(rewards: list[list[float]], rule: Callable[[list[float]], list[float]]) -> list[float]:
    return [gain for group in rewards for gain in rule(group)]


def clipped(rho: float, gain: float, low: float, high: float) -> float:
    return min(rho * gain, min(max(rho, low), high) * gain)


def reinforce(rule: Any) -> Any:
    """Composer 2 and RLOO: the correction is a constant, made of the log-probs as they were."""

    def objective(tokens: list[Token], now: list[float], start: list[float], rewards: Any, window: Any) -> float:
        gains, total = by_episode(rewards, rule), 0.0
        for place in learnt_of(tokens):
            rho = math.exp(start[place] - tokens[place].old)
            total += gains[tokens[place].episode] * (rho if window[0] <= rho <= window[1] else 0) * now[place]
        return total / (GROUPS * SIZE * NORMALISER)

    return objective


def grpo(tokens: list[Token], now: list[float], _: Any, rewards: Any, window: Any) -> float:
    gains, total = by_episode(rewards, standardised), 0.0
    for episode, gain in enumerate(gains):
        own = learnt_of(tokens, episode=episode)
        for place in own:
            total += clipped(math.exp(now[place] - tokens[place].old), gain, *window) / len(own)
    return total / (GROUPS * SIZE)


def gspo(tokens: list[Token], now: list[float], _: Any, rewards: Any, window: Any) -> float:
    gains, total = by_episode(rewards, standardised), 0.0
    for branch in range(tokens[-1].branch + 1):
        own = learnt_of(tokens, branch=branch)
        if own:
            episode = tokens[own[0]].episode
            ratio = math.exp(fmean([now[place] - tokens[place].old for place in own]))
            share = len(own) / len(learnt_of(tokens, episode=episode))
            total += share * clipped(ratio, gains[episode], *window)
    return total / (GROUPS * SIZE)


def icepop(tokens: list[Token], now: list[float], start: list[float], rewards: Any, window: Any) -> float:
    gains, total = by_episode(rewards, standardised), 0.0
    for place in learnt_of(tokens):
        rho, episode = math.exp(start[place] - tokens[place].old), tokens[place].episode
        if window[0] <= rho <= window[1]:
            total += gains[episode] * rho * now[place] / len(learnt_of(tokens, episode=episode))
    return total / (GROUPS * SIZE)


def kimi(tokens: list[Token], now: list[float], _: Any, rewards: Any, window: Any) -> float:
    gains, own = by_episode(rewards, centred), learnt_of(tokens)
    changes = {place: now[place] - tokens[place].old for place in own}
    terms = [
        min(max(math.exp(change), window[0]), window[1]) * gains[tokens[place].episode] - TAU * change**2
        for place, change in changes.items()
    ]
    return math.fsum(terms) / len(own)


BOUNDS = (0.6, 1.7)
MASK = {"correction": {"low": 0.6, "high": 1.7}, "normaliser": NORMALISER}
CASES: dict[str, tuple[Any, dict[str, Any], tuple[float, float]]] = {
    "composer2": (reinforce(centred), MASK, BOUNDS),
    "rloo": (reinforce(leave_one_out), MASK, BOUNDS),
    "grpo": (grpo, {"window": BOUNDS}, BOUNDS),
    "gspo": (gspo, {"window": (0.9, 1.2)}, (0.9, 1.2)),
    "icepop": (icepop, {}, (0.5, 5.0)),
    "kimi": (kimi, {"window": BOUNDS, "tau": TAU}, BOUNDS),
}


def settings(name: str, **more: Any) -> RlSettings:
    return RlSettings(tasks="none", groups=GROUPS, group_size=SIZE, algorithm=name, **more)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_papers_objective(name: str, seed: int) -> None:
    objective, more, window = CASES[name]
    tokens, now, rewards = some_batch(seed)
    algorithm = ALGORITHMS[name](settings(name, **more))
    counts = [len(learnt_of(tokens, episode=episode)) for episode in range(GROUPS * SIZE)]
    gains = by_episode(rewards, algorithm.advantages)
    weights = [gain * algorithm.share(count) for gain, count in zip(gains, counts, strict=True)]
    exact = {"dtype": torch.float64}
    learnt = torch.tensor([token.learnt for token in tokens])
    change = torch.tensor(now, **exact) - torch.tensor([token.old for token in tokens], **exact)
    advantages = torch.tensor([weights[token.episode] * token.learnt for token in tokens], **exact)
    terms = algorithm.weigh(change, advantages, learnt, torch.tensor([token.branch for token in tokens]))
    slopes = (terms.weights / algorithm.divisor(counts)).tolist()
    size = 1e-6
    for place, slope in enumerate(slopes):
        above, below = ([each + sign * size * (place == other) for other, each in enumerate(now)] for sign in (1, -1))
        difference = objective(tokens, above, now, rewards, window) - objective(tokens, below, now, rewards, window)
        assert slope == pytest.approx(difference / (2 * size), abs=1e-8), (place, tokens[place])
    assert terms.masked[learnt].any()  # the case tells something of the bounds
    assert not terms.masked[learnt].all()


def test_a_group_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.6]
    found = {name: ALGORITHMS[name](settings(name)).advantages(rewards) for name in ALGORITHMS}
    centre = [0.6, -0.4, -0.4, 0.2]
    deviation = math.sqrt(0.18)
    assert found["composer2"] == found["kimi"] == pytest.approx(centre)
    assert found["rloo"] == pytest.approx([1 - 0.2, -1.6 / 3, -1.6 / 3, 0.6 - 1 / 3])
    assert found["grpo"] == found["gspo"] == found["icepop"] == pytest.approx([e / deviation for e in centre], rel=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.floats(-5, 5), st.floats(0.1, 10))
def test_of_composer2_only_differences_count_and_they_count_as_they_are(
    rewards: list[float], shift: float, scale: float
) -> None:
    advantages = ALGORITHMS["composer2"](settings("composer2")).advantages
    plain = advantages(rewards)
    assert sum(plain) == pytest.approx(0, abs=1e-9)
    # Divided by the standard deviation, it would not grow with the rewards.
    changed = advantages([reward * scale + shift for reward in rewards])
    assert changed == pytest.approx([each * scale for each in plain], abs=1e-9)


positions = st.tuples(st.floats(-3, 3, width=32), st.booleans(), st.booleans())  # change, learnt, begins a branch


def by_hand(rows: list[tuple[float, bool, int]], level: str) -> list[float]:
    made_ = []
    for change, learnt, branch in rows:
        inside = [other for other, counts, where in rows if where == branch and counts]
        whole = {"token": change if learnt else 0.0, "sequence": sum(inside),
                 "geometric": sum(inside) / len(inside) if inside else 0.0}  # fmt: skip
        made_.append(math.exp(whole[level]))
    return made_


@pytest.mark.parametrize("mode", ["mask", "truncate", "off"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(st.lists(positions, min_size=1, max_size=12))
def test_composer2_corrects_at_every_level_and_in_every_mode(
    level: str, mode: str, given_: list[tuple[float, bool, bool]]
) -> None:
    branch = torch.tensor([begins for *_, begins in given_]).cumsum(0)
    branch = branch - branch[0]
    change, learnt = torch.tensor([each[0] for each in given_]), torch.tensor([each[1] for each in given_])
    own = settings("composer2", correction={"level": level, "mode": mode, "low": 0.5, "high": 2.0})
    terms = ALGORITHMS["composer2"](own).weigh(change, torch.ones(len(given_)), learnt, branch)
    rows = [(each, counts, where) for (each, counts, _), where in zip(given_, branch.tolist(), strict=True)]
    assert terms.ratios.tolist() == pytest.approx(by_hand(rows, level), rel=1e-4)
    for ratio, factor, masked in zip(*(each.tolist() for each in terms), strict=True):
        expected = {"mask": ratio if 0.5 <= ratio <= 2 else 0.0, "truncate": min(ratio, 2.0), "off": 1.0}[mode]
        assert factor == pytest.approx(expected)
        assert masked == {"mask": not 0.5 <= ratio <= 2, "truncate": ratio > 2, "off": False}[mode]


def test_a_product_too_large_to_be_a_number_is_no_trouble() -> None:
    change, learnt, branch = (
        torch.full((200,), 3.0),
        torch.ones(200, dtype=torch.bool),
        torch.zeros(200, dtype=torch.long),
    )
    assert ratios(change, learnt, branch, "sequence").isinf().all()
    for mode, expected in (("mask", 0.0), ("truncate", 8.0)):
        own = settings("composer2", correction={"level": "sequence", "mode": mode})
        assert ALGORITHMS["composer2"](own).weigh(change, torch.ones(200), learnt, branch).weights.eq(expected).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_model_learns_by_each(tiny_base: Path, tmp_path: Path, name: str) -> None:
    trainer = Trainer(tiny_base, made.settings(algorithm=name, **({} if "normaliser" in ALGORITHMS[name].uses else {"normaliser": 1024})), tmp_path)  # fmt: skip
    before = [weight.detach().clone() for weight in trainer.session.model.parameters()]
    metrics = made.step(trainer, made.batch(tmp_path, 1, made.usual(random.Random(1))), tmp_path)
    assert metrics["skipped"] == 0
    assert metrics["gradient"] > 0
    pairs = zip(before, trainer.session.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


@pytest.mark.parametrize(("name", "more", "message"), [
    ("grpo", {"correction": {"mode": "truncate"}}, "`correction` has no effect with the algorithm 'grpo'"),
    ("kimi", {"normaliser": 7}, "`normaliser` has no effect with the algorithm 'kimi'"),
    ("composer2", {"window": (0.8, 1.2)}, "`window` has no effect with the algorithm 'composer2'"),
    ("gspo", {"tau": 0.1}, "`tau` has no effect with the algorithm 'gspo'"),
    ("grpo", {"window": (1.2, 0.8)}, "the first bound must be below the second"),
    ("composer2", {"engine": "localhost:8000"}, "engine = 'localhost:8000' is no address"),
    ("grppo", {}, "unknown algorithm 'grppo'; did you mean 'grpo'"),
])  # fmt: skip
def test_settings_without_effect_are_refused(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(name, **more)


@pytest.mark.parametrize(("harness", "message"), [
    ({"top_p": 0.9}, "harness: top_p below 1 draws from a part of the tokens, and what is learnt from must have been drawn from all"),
    ({"temperature": 0.0}, "harness: temperature 0 draws nothing"),
])  # fmt: skip
def test_what_was_not_drawn_from_all_tokens_is_not_learnt_from(harness: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RlSettings(tasks="none", harness=harness)  # type: ignore[arg-type]
