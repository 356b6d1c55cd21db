"""The simulation of a cluster, on cases that can be worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etude.rl.state import State

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cluster_sim import Cluster, Engine, Episode, Simulation, Work

ALIKE = Work("alike", turns=4, tokens=10, trained=100, tool=0.5, score=3.0, sigma=0.0, hard=0.0)
# Two groups of 8 episodes: 4 turns of 10 tokens at 0.1 s and half a second of commands, then 3 s of scoring.
EPISODE = 4 * (10 * 0.1 + 0.5) + 3.0
ONE = Cluster(
    trainer=2, engines=4, sandboxes=16, groups=2, decode=((1.0, 0.1),), rate=100.0, publish=1.0, fetch=2.0, pause=0.0
)
TRAINING = 16 * 100 / (2 * 100.0)


def never_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every group be trained on, whatever was drawn."""
    real = State._end
    monkeypatch.setattr(State, "_end", lambda self, group: replace(real(self, group), fate="ready"))


def test_steps_of_a_synchronous_run_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, training, publishing and fetching come one after the other."""
    never_flat(monkeypatch)
    seen = Simulation(replace(ONE, mode="sync", staleness=1), ALIKE, tasks=100, seed=0).run(2, 7)
    step = EPISODE + TRAINING + 1.0 + 2.0
    assert seen["seconds"] == pytest.approx(5 * step)
    assert (seen["episodes"], seen["groups_batched"], seen["behind_0"], seen["groups_stale"]) == (80, 10, 10, 0)
    assert seen["tokens"] == pytest.approx(5 * 16 * 40)
    assert seen["training"] == pytest.approx(5 * TRAINING)
    assert seen["sandbox_seconds"] == pytest.approx(5 * 16 * EPISODE)
    assert seen["engine_seconds"] <= 5 * 4 * 4.0 + 1e-6  # each writes 4 seconds of an episode, if it has one
    assert seen["requests"] == pytest.approx(5 * 16 * 4)


@pytest.mark.parametrize("late", ["drop", "wait"])
def test_a_slow_trainer_of_an_asynchronous_run_is_never_idle(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    never_flat(monkeypatch)
    slow = replace(ONE, rate=20.0, late=late)
    seen = Simulation(slow, ALIKE, tasks=200, seed=0).run(3, 9)
    assert seen["seconds"] == pytest.approx(6 * (16 * 100 / (2 * 20.0) + 1.0))
    assert seen["groups_batched"] == 12
    assert seen["held"] == pytest.approx(0.0)


def test_a_fast_trainer_waits_for_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin and end together: a step for every round of episodes, whatever training takes below that."""
    never_flat(monkeypatch)
    seen = Simulation(replace(ONE, rate=1e4, publish=0.0, fetch=0.0), ALIKE, tasks=200, seed=0).run(2, 8)
    assert seen["seconds"] == pytest.approx(6 * EPISODE)
    assert seen["sandbox_seconds"] == pytest.approx(16 * seen["seconds"])


def test_requests_share_an_engine() -> None:
    """One alone gets 10 tokens a second, two 5 each: of 10 tokens each, the second begun after half a second.

    The first has 5 by then and needs 5 more at half the speed: 1.5 s. The second then has 5 as well, and ends at 2.0 s.
    """
    engine = Engine(((1.0, 0.1), (2.0, 0.2)))
    first, second = (Episode((0, each), 1.0, 0, 0) for each in range(2))
    engine.add(10.0, 1, first)
    assert engine.next_end() == pytest.approx(1.0)
    engine.advance(0.5)
    engine.add(10.0, 2, second)
    assert engine.next_end() == pytest.approx(1.5)
    engine.advance(1.5)
    assert engine.requests[0][2] is first
    engine.requests.pop(0)
    assert engine.next_end() == pytest.approx(2.0)
    engine.until = 1.75  # it stands still for new weights
    engine.advance(1.6)
    assert engine.next_end() == pytest.approx(2.25)
    assert engine.busy == pytest.approx(1.5)


@pytest.mark.parametrize(("requests", "seconds"), [(0, 1.0), (1, 1.0), (2, 1.5), (3, 2.0), (7, 4.0), (9, 5.0)])
def test_the_speed_of_an_engine_lies_on_the_lines_between_what_was_measured(requests: int, seconds: float) -> None:
    engine = Engine(((1.0, 1.0), (3.0, 2.0), (7.0, 4.0)))
    engine.requests = [(0.0, 0, Episode((0, 0), 1.0, 0, 0))] * requests
    assert engine.seconds() == pytest.approx(seconds)


def test_the_same_seed_is_the_same_run_and_faults_lose_nothing() -> None:
    work = replace(ALIKE, sigma=0.7, hard=0.2)
    faulty = replace(
        ONE, sandboxes=64, groups=4, restart=5.0, pause=0.2, faults={"engine": 0.05, "rank": 0.005, "pool": 0.02}
    )

    def run(seed: int) -> tuple[Simulation, dict[str, float]]:
        simulation = Simulation(faulty, work, tasks=300, seed=seed)
        seen = simulation.run(2, 30)
        return simulation, {name: value for name, value in seen.items() if name != "cpu"}

    simulation, seen = run(1)
    assert seen == run(1)[1] != run(2)[1]
    assert seen["failed"] > 0 < seen["again"]
    assert seen["waiting"] > 0
    counts, queues = simulation.state.counts, simulation.state.queues
    fates = sum(counts[each] for each in ("batched", "stale", "flat", "void"))
    assert counts["opened"] == fates + queues["open"] + queues["ready"]
    assert simulation.state.trained == 30
    assert set(simulation.playing) | set(simulation.idle) == set(simulation.state.wanted())
    assert not set(simulation.playing) & set(simulation.idle)


def test_a_lost_rank_costs_the_restart_and_the_steps_since_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    never_flat(monkeypatch)
    slow = replace(ONE, rate=20.0, restart=7.0)
    simulation = Simulation(slow, ALIKE, tasks=200, seed=0)
    plain = Simulation(slow, ALIKE, tasks=200, seed=0).run(3, 6)
    simulation.settle()
    while simulation.state.trained < 4 or not simulation.training:
        simulation.happen()
    simulation.after(0.0, lambda: simulation.fault("rank", 1e-9))
    start = simulation.now
    while simulation.state.trained < 5:
        simulation.happen()
    assert simulation.now - start == pytest.approx(plain["seconds"] / 3 + 7.0 + 4 * 40.0)
