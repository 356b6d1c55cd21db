"""The three estimators on policies small enough to be exact: every outcome is listed, nothing is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.rl.algorithm import divergence
from etude.rl.settings import KlSettings
from etude.rl.trainer import Reference
from etude.training.loop import Root

LOGITS, OTHERS = [0.3, -1.0, 2.0, 0.1], [1.0, 0.5, -0.5, 0.0]


def exact(logits: list[float]) -> Any:
    return torch.tensor(logits, dtype=torch.float64).log_softmax(0).numpy()


def true_divergence(policy: Any, reference: Any) -> float:
    return float(sum(np.exp(q) * (q - p) for q, p in zip(policy, reference, strict=True)))


def mean_and_variance(policy: Any, reference: Any, estimator: str) -> tuple[float, float]:
    values, chances = divergence(policy, reference, estimator), np.exp(policy)
    mean = float((chances * values).sum())
    return mean, float((chances * (values - mean) ** 2).sum())


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=6))
def test_k1_and_k3_are_right_on_average(logits: list[float]) -> None:
    policy, reference = exact(logits), exact(logits[::-1])
    for estimator in ("k1", "k3"):
        assert mean_and_variance(policy, reference, estimator)[0] == pytest.approx(true_divergence(policy, reference))


def test_k2_is_not() -> None:
    policy, reference = exact(LOGITS), exact(OTHERS)
    assert abs(mean_and_variance(policy, reference, "k2")[0] - true_divergence(policy, reference)) > 0.1


def test_one_token_by_hand() -> None:
    policy, reference = np.log([0.2]), np.log([0.5])
    assert divergence(policy, reference, "k1")[0] == pytest.approx(np.log(0.4))
    assert divergence(policy, reference, "k2")[0] == pytest.approx(np.log(2.5) ** 2 / 2)
    assert divergence(policy, reference, "k3")[0] == pytest.approx(1.5 - np.log(2.5))


def test_as_a_term_of_the_loss_k1_has_no_gradient_but_through_the_reward_it_has_the_right_one() -> None:
    logits, reference = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True), torch.tensor(exact(OTHERS))
    logs = logits.log_softmax(0)
    chances = logs.detach().exp()
    (right,) = torch.autograd.grad((logs.exp() * (logs - reference)).sum(), logits, retain_graph=True)
    (as_loss,) = torch.autograd.grad((chances * (logs - reference)).sum(), logits, retain_graph=True)
    penalty = torch.tensor(divergence(logs.detach().numpy(), reference.numpy(), "k1"))
    (as_reward,) = torch.autograd.grad((chances * penalty * logs).sum(), logits)
    assert right.abs().max() > 0.1
    assert as_loss.abs().max() < 1e-15
    torch.testing.assert_close(as_reward, right)


def test_the_variance_of_k3_explodes_where_policies_diverge_and_that_of_k1_does_not() -> None:
    variances = {name: [mean_and_variance(exact([0, -gap]), exact([0, 0]), name)[1] for gap in (1, 4, 8, 12)]
             for name in ("k1", "k3")}  # fmt: skip
    assert max(variances["k1"]) < 0.4
    assert [later / earlier > 10 for earlier, later in zip(variances["k3"], variances["k3"][1:], strict=False)] == [
        True
    ] * 3
    assert variances["k3"][-1] > 10_000


def test_an_average_follows_the_policy_and_a_start_does_not() -> None:
    for kind, expected in (("average", [0.9 * 0.9 * 1 + 0.9 * 0.1 * 2 + 0.1 * 4] * 3), ("start", [1.0] * 3)):
        model = torch.nn.Linear(1, 3, bias=False)
        torch.nn.init.ones_(model.weight)
        settings = KlSettings.model_validate({"coefficient": 0.1, "reference": kind, "decay": 0.9})
        reference = Reference(Root(torch.nn.Identity()), Root(model), settings, {"weight": model.weight})
        for value in (2.0, 4.0):
            reference.follow({"weight": torch.full((3, 1), value)})
        assert model.weight.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["start", "average"])
def test_with_adapters_the_policy_is_asked_with_those_of_the_reference_and_gets_its_own_back(kind: str) -> None:
    policy, apart = (torch.nn.Linear(1, 3, bias=False) for _ in range(2))
    for model in (policy, apart):
        torch.nn.init.ones_(model.weight)
    settings = KlSettings.model_validate({"coefficient": 0.1, "reference": kind, "decay": 0.9})
    exchanged = Reference(Root(policy), None, settings, {"weight": policy.weight})
    copied = Reference(Root(torch.nn.Identity()), Root(apart), settings, {"weight": apart.weight})
    rows = torch.full((1, 1), 2.0)
    for value in (2.0, 4.0):
        torch.nn.init.constant_(policy.weight, value)
        for reference in (exchanged, copied):
            reference.follow({"weight": policy.weight})
        assert exchanged.ask(lambda model, own: model(own), rows).equal(copied.ask(lambda model, own: model(own), rows))
        assert policy.weight.flatten().tolist() == [value] * 3


def test_the_policy_gets_its_adapters_back_from_a_question_that_fails() -> None:
    policy = torch.nn.Linear(1, 3, bias=False)
    reference = Reference(Root(policy), None, KlSettings(coefficient=0.1), {"weight": policy.weight})
    torch.nn.init.constant_(policy.weight, 7.0)
    with pytest.raises(ZeroDivisionError):
        reference.ask(lambda model, rows: 1 / 0, torch.ones(1, 1))
    assert policy.weight.flatten().tolist() == [7.0] * 3
