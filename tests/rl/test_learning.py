"""Does it learn? A game with a behaviour that can be learnt in seconds, and the same game with rewards that say nothing."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

import etude
from etude.models.load import load_tokeniser
from etude.rl.ledger import Batched, Finished, Ledger
from tests.rl.toy import Toy, play, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")

SPROUT = Path(etude.__file__).parent / "models" / "sprout"
STEPS, ENDS = 8, 2  # steps; of these, how many make the beginning and the end
SEEDS = (1, 2, 3)
T_95 = 4.303  # Student's t with two degrees of freedom
MARGIN = 0.1  # share of liked tokens; untrained it is a quarter


def rise(folder: Path, seed: int, *, shuffled: bool) -> float:
    """Return how much larger the share of liked tokens is in the last steps than in the first.

    Synchronous, so that a seed decides it all: three controls must not depend on how busy the machine is.
    """
    settings = settings_of(
        steps=STEPS, groups=3, group_size=8, mode="sync", length=32, optimiser={"lr": 7e-4}, checkpoint_every=STEPS
    )  # fmt: skip
    toy = Toy(load_tokeniser(SPROUT), tasks=36, tokens=8, group_size=8, shuffled=shuffled)
    play(SPROUT, folder / f"{seed}-{shuffled}", settings, toy, seed=seed)
    events, _ = Ledger(folder / f"{seed}-{shuffled}" / "ledger.jsonl").read()
    step_of = {group: event.step for event in events if isinstance(event, Batched) for group in event.groups}
    shares: dict[int, list[float]] = {
        step: [] for step in sorted(set(step_of.values()))
    }  # all, or until none had more to learn
    for event in events:
        if isinstance(event, Finished) and event.group in step_of:
            shares[step_of[event.group]].append(event.behaviour["share"])
    assert len(shares) > 2 * ENDS
    mean = [fmean(each) for each in shares.values()]
    return fmean(mean[-ENDS:]) - fmean(mean[:ENDS])


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% interval of a mean by Student's t."""
    assert len(values) == 3
    half = T_95 * stdev(values) / math.sqrt(3)
    return fmean(values) - half, fmean(values) + half


def test_the_reward_rises_with_every_seed_and_not_when_it_says_nothing(tmp_path: Path) -> None:
    learnt = [rise(tmp_path, seed, shuffled=False) for seed in SEEDS]
    control = [rise(tmp_path, seed, shuffled=True) for seed in SEEDS]
    assert interval(learnt)[0] > MARGIN, f"learnt {learnt}"
    assert interval(control)[0] < 0, f"control {control}"
    assert fmean(control) < MARGIN, f"control {control}"
