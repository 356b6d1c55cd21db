from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.trace import Node, Trace
from etude.lineage.compute import Attention, ComputeShape, forward_flops
from etude.rl.exchange import Report
from etude.rl.ledger import Batched, Closed, Failed, Opened, Stale, Trained, Weighted
from etude.rl.metrics import StepMetrics, sampling_flops, slug, starting
from tests.agent.traces import traces
from tests.rl.runs import WEIGHTS, Clock, finished

SHAPE = ComputeShape(1000, (Attention(4, 8, 8), Attention(2, 8, 4, window=3)))


def test_a_row_holds_what_happened_since_the_step_before() -> None:
    clock = Clock()
    step_metrics = StepMetrics(clock)
    for event in (
        Weighted(WEIGHTS, 1), Opened(0, "a", 0), Opened(1, "b", 0),
        finished(0, 0, passed=True, calls=2.0), finished(0, 1, passed=False, length=-0.75, calls=4.0, lint=1.0),
        Failed(1, 0, "sandbox: 3", final=False), Failed(1, 0, "sandbox: 4", final=True), finished(1, 1, passed=False),
        Closed(0, "ready", {0: 1.0, 1: 0.0}), Closed(1, "void"), Stale(0), Batched(1, (0,)),
    ):  # fmt: skip
        step_metrics.apply(event)
    step_metrics.trained(
        Report(
            1, 5, {"tokens": 60.0, "flops": 7e9, "seconds": 3.0, "lr": 1.5e-7, "kl": 0.0123456789, "staleness_0": 1.0}
        )
    )
    step_metrics.swapped({"bytes": 100.0, "seconds": 0.5, "paused": 0.01})
    step_metrics.swapped({"bytes": 300.0, "seconds": 1.5, "paused": 0.03})
    held = Trace("", "", [Node(None, "opening", [1] * 5, "")], made_by={"sandbox": "bwrap"})
    for trace, seconds in ((held, 3.5), (held, 1.25), (replace(held, made_by={}), 9.0)):
        step_metrics.sampled(trace, SHAPE, seconds)
    sampling = 3 * forward_flops(SHAPE, 5)
    assert step_metrics.unwritten() == {"flops": 7e9 + sampling, "sampling_flops": sampling, "sandbox_seconds": 4.75}
    clock.now += 4.0
    row = step_metrics.row(1, {"open": 2, "ready": 1})
    assert row == step_metrics.row(1, {"open": 2, "ready": 1})
    assert row == {
        "step": 1, "tokens": 60, "flops": 7_000_000_000 + sampling, "device_seconds": 4.0,
        "sampling_flops": sampling, "sandbox_seconds": 4.75,
        "episodes": 3, "reward": pytest.approx(1 / 3 - 0.5 * 1.25 / 3, rel=1e-5), "solved": pytest.approx(1 / 3, rel=1e-5),
        "best_of_group": 0.5, "sampled_tokens": 30, "episode_tokens": 10.0, "turns": 2.0, "episode_seconds": 3.0,
        "reward_outcome": pytest.approx(1 / 3, rel=1e-5), "reward_length": pytest.approx(-0.5 * 1.25 / 3, rel=1e-5),
        "part_outcome": pytest.approx(1 / 3, rel=1e-5), "part_length": pytest.approx(-1.25 / 3, rel=1e-5),
        "behaviour_calls": 3.0, "behaviour_lint": 1.0,
        "lr": 1.5e-7, "kl": 0.0123457, "staleness_0": 1.0,
        "invalid_sandbox": 2, "lost": 1, "groups_ready": 1, "groups_void": 1, "groups_stale": 1, "seconds_stale": 3.0,
        "sampled_per_second": 7.5, "trained_per_second": 15.0, "idle_sampling": 1.0, "idle_scoring": 1.0, "idle_training": 0.25,
        "queue_open": 2, "queue_ready": 1, "weight_outcome": 1.0, "weight_length": 0.5,
        "swaps": 2, "swap_bytes": 200.0, "swap_seconds": 1.0, "swap_paused": 0.02,
    }  # fmt: skip
    assert starting(row, "behaviour_") == {"calls": 3.0, "lint": 1.0}


def test_how_long_episodes_took_is_told_by_what_became_of_their_groups() -> None:
    """A flat group says nothing; of two that were ready the slow one came too late."""
    step_metrics = StepMetrics(Clock())
    step_metrics.apply(Weighted(WEIGHTS, 1))
    for group, seconds in ((0, 2.0), (1, 12.0), (2, 50.0)):
        step_metrics.apply(replace(finished(group, 0, passed=True), seconds=seconds))
        step_metrics.apply(replace(finished(group, 1, passed=False), seconds=seconds + 2))
        step_metrics.apply(Closed(group, "flat" if group == 2 else "ready"))
    for event in (Stale(1), Batched(1, (0,))):
        step_metrics.apply(event)
    row = step_metrics.row(1, {})
    assert starting(row, "seconds_") == {"stale": 13.0, "trained": 3.0}
    step_metrics.apply(Trained(1, 1))
    assert starting(step_metrics.row(2, {}), "seconds_") == {}


def test_the_time_in_which_sampling_was_held_back_is_counted() -> None:
    clock = Clock()
    step_metrics = StepMetrics(clock)
    assert "held_back" not in step_metrics.row(1, {})  # late = "drop": nothing ever is
    for held, seconds in ((False, 1.0), (True, 2.0), (True, 1.0), (False, 4.0)):
        step_metrics.pace(held_back=held)
        clock.now += seconds
    row = step_metrics.row(1, {})
    assert row["held_back"] == 3.0 / 8.0
    assert starting(row, "at_once_") == {}


def test_trained_begins_a_new_row_and_keeps_what_outlives_steps() -> None:
    clock = Clock()
    step_metrics = StepMetrics(clock)
    step_metrics.apply(Weighted(WEIGHTS, 1))
    step_metrics.apply(finished(0, 0, passed=True))  # its group closes in the next step
    step_metrics.apply(Trained(1, 1))
    clock.now += 1.0
    assert step_metrics.row(2, {}) == {
        "step": 2, "tokens": 0, "flops": 0, "device_seconds": 1.0, "sampling_flops": 0, "sandbox_seconds": 0.0, "episodes": 0, "sampled_per_second": 0.0,
        "trained_per_second": 0.0, "idle_sampling": 1.0, "idle_scoring": 1.0, "idle_training": 1.0,
        "weight_outcome": 1.0, "weight_length": 0.5, "swaps": 0,
    }  # fmt: skip
    step_metrics.apply(finished(0, 1, passed=False))
    step_metrics.apply(Closed(0, "ready"))
    assert step_metrics.row(2, {})["best_of_group"] == 1.0


def test_episodes_of_an_earlier_session_count_but_not_as_speed() -> None:
    clock = Clock()
    step_metrics = StepMetrics(clock)
    for event in (Weighted(WEIGHTS, 1), finished(0, 0, passed=True)):
        step_metrics.apply(event)
    clock.now += 50.0
    step_metrics.resumed()
    clock.now += 5.0
    step_metrics.apply(finished(0, 1, passed=False))
    row = step_metrics.row(1, {})
    assert (row["episodes"], row["sampled_per_second"], row["device_seconds"]) == (2, 2.0, 5.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=8), st.integers(0, 10))
def test_busy_time_is_that_of_the_union_of_what_overlaps(spans: list[tuple[int, int]], begins: int) -> None:
    """Against counting second by second; `begins` cuts off what an earlier row told."""
    clock, end = Clock(), 40
    step_metrics = StepMetrics(clock)
    at = sorted(
        [(start, 1, n) for n, (start, _) in enumerate(spans)]
        + [(start + long, -1, n) for n, (start, long) in enumerate(spans)]
    )
    bodies = [step_metrics.busy("sampling") for _ in spans]
    events = [*((when, by, n) for when, by, n in at), (begins, 0, -1)]
    for when, by, n in sorted(events, key=lambda event: event[0]):
        clock.now = 100.0 + when
        if by == 0:
            step_metrics.apply(Trained(1, 1))
        elif by > 0:
            bodies[n].__enter__()
        else:
            bodies[n].__exit__(None, None, None)
    clock.now = 100.0 + end
    depths = [sum(start <= second < start + long for start, long in spans) for second in range(begins, end)]
    row = step_metrics.row(2, {})
    assert row["idle_sampling"] == pytest.approx(1 - sum(map(bool, depths)) / len(depths), rel=1e-5, abs=1e-5)
    assert row.get("at_once_sampling", 0.0) == pytest.approx(sum(depths) / len(depths), rel=1e-5, abs=1e-5)


@given(traces())
def test_sampling_costs_each_token_once_at_its_place(trace: Trace) -> None:
    """Token by token, each after those before it."""
    brute = 0
    for place, node in enumerate(trace.nodes):
        before = len(trace.context(place)) - len(node.tokens)
        brute += sum(forward_flops(SHAPE, 1, before + offset) for offset in range(len(node.tokens)))
    assert sampling_flops(trace, SHAPE) == brute


def test_an_episode_without_branches_costs_one_forward_pass() -> None:
    sizes = [random.Random(0).randrange(1, 9) for _ in range(5)]
    nodes = [Node(place - 1 if place else None, "note", [1] * size, "") for place, size in enumerate(sizes)]
    assert sampling_flops(Trace("", "", nodes), SHAPE) == forward_flops(SHAPE, sum(sizes))


@pytest.mark.parametrize(("cause", "name"), [
    ("timed out: 900 s", "timed_out"), ("Sandbox did not start", "sandbox_did_not_start"), ("", "unknown"), (": x", "unknown"),
    ("é" * 9, "unknown"), ("a" * 99, "a" * 40),
])  # fmt: skip
def test_causes_become_names(cause: str, name: str) -> None:
    assert slug(cause) == name
