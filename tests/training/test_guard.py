"""Steps that would do harm: which ones are skipped, what is remembered of them, and what a whole training makes of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.training.loop import Guard
from etude.training.objectives import Loss
from etude.training.settings import GuardSettings
from tests.training import sessions

NAN, INFINITE = float("nan"), float("inf")
USUAL = [1.0, 3.0] * 4  # mean 2, deviation 1


def full(**settings: Any) -> Guard:
    """Return a guard that has seen what is usual, eight times."""
    guard = Guard(GuardSettings(window=8, **settings))
    for step, value in enumerate(USUAL):
        assert guard.objection(step, loss=value, gradient=value) is None
    return guard


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_from_the_first_step(name: str, value: float) -> None:
    guard = Guard(GuardSettings())
    assert guard.objection(1, **{"loss": 1.0, "gradient": 1.0, name: value}) == f"{name} is not finite"


def test_an_outlier_is_more_than_so_many_deviations_above() -> None:
    assert full(sigmas=6.0).objection(9, loss=7.99, gradient=2.0) is None
    assert full(sigmas=6.0).objection(9, loss=8.01, gradient=2.0) == "loss 8.01 is far above 2"
    assert full(sigmas=6.0).objection(9, loss=2.0, gradient=9.0) == "gradient 9 is far above 2"
    assert full(sigmas=6.0).objection(9, loss=-100.0, gradient=0.0) is None  # below is no harm
    assert full(sigmas=20.0).objection(9, loss=8.01, gradient=2.0) is None


def test_there_are_no_outliers_before_the_window_is_full() -> None:
    guard = Guard(GuardSettings(window=8))
    for step, value in enumerate([*USUAL[:6], 1e9]):
        assert guard.objection(step, loss=value) is None


def test_a_skipped_value_does_not_excuse_the_next() -> None:
    guard = full()
    before = guard.state()["recent"]
    for step in range(20):
        assert guard.objection(step, loss=50.0, gradient=2.0)
        assert guard.objection(step, loss=2.0, gradient=NAN)
    assert guard.state()["recent"] == before
    assert guard.objection(40, loss=2.0, gradient=2.0) is None
    assert guard.state()["recent"]["loss"] == [*USUAL[1:], 2.0]  # the oldest has made room


def test_patience_ends_and_begins_again_after_a_good_step() -> None:
    guard = full(patience=3)
    for _ in range(2):
        for step in range(3):
            assert guard.objection(step, loss=NAN)
        assert guard.objection(4, loss=2.0) is None
    for step in range(3):
        guard.objection(step, loss=NAN)
    with pytest.raises(
        UserError, match=r"^training stopped at step 77: 4 steps in a row were skipped \(loss is not finite\)"
    ):
        guard.objection(77, loss=NAN)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(NAN), max_size=40), st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_its_state_goes_through_json(first: list[float], then: list[float]) -> None:
    settings = GuardSettings(window=8, patience=100, sigmas=2.0)
    guard, other = Guard(settings), Guard(settings)
    for step, value in enumerate(first):
        guard.objection(step, loss=value)
    other.load_state(json.loads(json.dumps(guard.state(), allow_nan=False)))
    for step, value in enumerate(then):
        assert guard.objection(step, loss=value) == other.objection(step, loss=value)
    assert guard.state() == other.state()


@given(st.lists(st.floats(-1e3, 1e3), min_size=9, max_size=40), st.floats(0.5, 4))
def test_against_a_plain_definition(values: list[float], sigmas: float) -> None:
    guard = Guard(GuardSettings(window=8, sigmas=sigmas, patience=1000))
    accepted: list[float] = []
    for step, value in enumerate(values):
        last = accepted[-8:]
        outlier = len(last) == 8 and value > statistics.fmean(last) + sigmas * statistics.pstdev(last)
        assert bool(guard.objection(step, loss=value)) == outlier
        if not outlier:
            accepted.append(value)


class Poisoned:
    """An objective whose result is spoilt at one step."""

    def __init__(self, plain: Any, at: int, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._plain, self._at, self._spoil, self._calls = plain, at, spoil, 0

    def weight(self, rows: Any) -> float:
        return self._plain.weight(rows)  # type: ignore[no-any-return]

    def flops(self, shape: Any, length: int) -> int:
        return self._plain.flops(shape, length)  # type: ignore[no-any-return]

    def nats(self, model: Any, rows: Any) -> torch.Tensor:
        return self._plain.nats(model, rows)

    def loss(self, model: Any, rows: Any) -> Loss:
        self._calls += 1
        found = self._plain.loss(model, rows)
        total = self._spoil(found.sum) if self._calls == self._at else found.sum
        return Loss(total, {"spoilt": total.detach()})


def nan_gradient(total: torch.Tensor) -> torch.Tensor:
    """Return the same loss with a gradient that is none: sqrt has an infinite slope at 0, times 0."""
    return total + (total * 0).sqrt()


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("spoil", "why", "loss_known"),
    [
        (lambda total: total * NAN, "loss is not finite", False),
        (nan_gradient, "gradient is not finite", True),
        (lambda total: total * 1e4, "loss", True),
    ],
)
def test_a_training_skips_the_step_and_goes_on(
    tmp_path: Path, spoil: Any, why: str, loss_known: bool, optimiser: str
) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    chosen = sessions.settings(guard={"window": 8}, optimiser={"lr": 3e-3, "name": optimiser})
    with sessions.session(corpus, tmp_path / "run", chosen) as training:
        training.session.loop.objective = Poisoned(training.session.loop.objective, 10, spoil)
        seen = []
        for step in training.session.loop.steps(12):
            training._write(step)
            seen.append(sessions.weights(training.session.model))
        notes = training.notes()
    for number in range(1, 12):
        moved = any(not torch.equal(seen[number][name], seen[number - 1][name]) for name in seen[0])
        # Of the last step the rate is 0.
        assert moved == (number not in {9, 11}), number + 1
    assert all(bool(torch.isfinite(weight).all()) for weight in seen[-1].values())
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as metrics:
        rows = list(metrics.rows("train/"))
    assert [row["key"] for row in rows if row.get("skipped")] == ["train/00000010"]
    assert rows[9]["skipped"].startswith(why)
    assert (rows[9]["loss"] is not None) == loss_known
    assert all(math.isfinite(row["loss"]) for row in rows if row is not rows[9])
    assert "steps skipped: 1; steps done again after an interruption: 0" in notes


def test_a_training_that_only_skips_ends_with_an_error(tmp_path: Path) -> None:
    corpus = sessions.write_corpus(tmp_path / "corpus")
    with sessions.session(corpus, tmp_path / "run", sessions.settings(guard={"patience": 2})) as training:
        before = sessions.weights(training.session.model)
        training.evaluate = lambda _: {}
        with torch.no_grad():
            training.session.model.model.norm.weight.fill_(NAN)  # as after an update that went wrong
        with pytest.raises(UserError, match="3 steps in a row were skipped"):
            training.run()
        for name, weight in training.session.model.named_parameters():
            assert name == "model.norm.weight" or torch.equal(weight, before[name])
