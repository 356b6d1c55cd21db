"""The whole loss against one that was written apart from it: plain loops over episodes, branches and tokens, one branch at a time,
softmax by hand, in float64. And its gradient against finite differences of that."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from etude.agent.trace import Trace
from etude.models.load import load_model
from etude.rl.settings import RlSettings
from etude.rl.trainer import Trainer
from tests import tiny
from tests.rl import made

Groups = list[list[tuple[Trace, float]]]
BOUNDS = {"low": 0.7, "high": 1.5}
WIDE = {"low": 0.05, "high": 20.0}  # for products


def in_float64(model: Any) -> Any:
    """Return a copy that computes in float64 throughout; transformers' norms would go down to float32."""
    exact = copy.deepcopy(model).double()
    for name, part in list(exact.named_modules()):
        if type(part).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(len(part.weight), eps=part.variance_epsilon)
            norm.weight = part.weight
            exact.set_submodule(name, norm)
    exact.set_attn_implementation("sdpa")
    return exact


def log_probs(model: Any, tokens: list[int], settings: RlSettings) -> list[float]:
    """Return log p of every token but the first, as it is sampled."""
    with torch.no_grad():
        rows = (model(torch.tensor([tokens])).logits[0] / settings.harness.temperature).tolist()
    return [row[token] - math.log(sum(math.exp(each) for each in row)) for row, token in zip(rows, tokens[1:], strict=False)]  # fmt: skip


def own_tokens(trace: Trace) -> list[tuple[list[int], list[tuple[int, float, bool]]]]:
    """Return for each leaf the tokens of its path and, of nodes met for the first time, (place, sampled log-prob, whether of a summary)."""
    found, met = [], set[int]()
    for leaf, _ in enumerate(trace.nodes):
        if any(node.parent == leaf for node in trace.nodes):
            continue
        path = [leaf]
        while (parent := trace.nodes[path[0]].parent) is not None:
            path.insert(0, parent)
        tokens: list[int] = []
        own = []
        for place in path:
            node = trace.nodes[place]
            for index, token in enumerate(node.tokens):
                if node.sampled and place not in met:
                    own.append((len(tokens), node.logprobs[index], node.kind == "summary"))
                tokens.append(token)
        met.update(path)
        found.append((tokens, own))
    return found


def penalty(sampled: float, reference: float, estimator: str) -> float:
    r = math.exp(reference) / math.exp(sampled)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[estimator]


def held(
    model: Any, reference: Any, groups: Groups, settings: RlSettings
) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Return for every branch its tokens and, of every learnt place, what log π is multiplied with there: A · w."""
    kl, made_ = settings.kl, []
    for group in groups:
        rewards = []
        for trace, reward in group:
            far = 0.0
            for tokens, own in own_tokens(trace):
                if kl.coefficient:
                    there = log_probs(reference, tokens, settings)
                    far += sum(penalty(sampled, there[place - 1], kl.estimator) for place, sampled, _ in own)
            rewards.append(reward - kl.coefficient * far)
        for (trace, _), reward in zip(group, rewards, strict=True):
            advantage = reward - sum(rewards) / len(rewards)
            for tokens, own in own_tokens(trace):
                learnt = [(place, old) for place, old, summary in own if settings.train_summaries or not summary]
                if learnt:
                    now = log_probs(model, tokens, settings)
                    changes = [now[place - 1] - old for place, old in learnt]
                    made_.append((tokens, [(place, advantage * weight(change, changes, settings))
                                           for (place, _), change in zip(learnt, changes, strict=True)]))  # fmt: skip
    return made_


def weight(change: float, changes: list[float], settings: RlSettings) -> float:
    chosen = settings.correction
    if chosen.mode == "off":
        return 1.0
    product = math.exp(sum(changes))
    mean = math.exp(sum(changes) / len(changes))
    ratio = {"token": math.exp(change), "sequence": product, "geometric": mean}[chosen.level]
    if chosen.mode == "truncate":
        return min(ratio, chosen.high)
    return ratio if chosen.low <= ratio <= chosen.high else 0.0


def loss(model: Any, fixed: list[tuple[list[int], list[tuple[int, float]]]], settings: RlSettings) -> float:
    """Return the loss of a model, with what the gradient takes for constant given."""
    total = 0.0
    for tokens, places in fixed:
        now = log_probs(model, tokens, settings)
        for place, factor in places:
            total -= factor * now[place - 1]
    return total / (settings.groups * settings.group_size * settings.normaliser)


def moved(trainer: Trainer) -> None:
    """Make the policy another than its reference."""
    torch.manual_seed(5)
    with torch.no_grad():
        for each in trainer.session.model.parameters():
            each.add_(torch.randn_like(each), alpha=0.05)


def check(base: Path, folder: Path, settings: RlSettings, groups: Groups) -> dict[str, float]:
    trainer = Trainer(base, settings, folder / "trainer")
    moved(trainer)
    exact, reference = in_float64(trainer.session.model), in_float64(load_model(base, torch.device("cpu")))
    fixed = held(exact, reference, groups, settings)
    told = made.gradient(trainer, made.batch(folder, 1, groups), folder)
    assert told["loss"] == pytest.approx(loss(exact, fixed, settings), rel=1e-5, abs=1e-7)
    weights = dict(exact.named_parameters())
    gradients = {name: master.grad.double() for name, master in trainer.session.weights.masters.items()}
    size = 1e-5
    for seed in range(2):
        torch.manual_seed(seed)
        ways = {name: torch.randn_like(each) for name, each in weights.items()}
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, each in weights.items():
                    each.add_(ways[name], alpha=sign * size)
                found.append(loss(exact, fixed, settings))
                for name, each in weights.items():
                    each.sub_(ways[name], alpha=sign * size)
        slope = sum(float((gradients[name] * way).sum()) for name, way in ways.items())
        scale = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
        assert slope == pytest.approx((found[0] - found[1]) / (2 * size), rel=1e-3, abs=1e-4 * scale)
    return told


CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"level": level, "mode": mode, **(WIDE if level == "sequence" else BOUNDS)}, {"coefficient": kl and 0.05, "estimator": kl or "k1"}, summaries)
    for level, mode, kl, summaries in [
        ("token", "mask", None, True), ("token", "truncate", "k1", True), ("token", "off", "k2", False),
        ("sequence", "mask", "k3", True), ("sequence", "truncate", "k1", False), ("sequence", "off", None, False),
        ("geometric", "mask", "k1", False), ("geometric", "truncate", "k2", True), ("geometric", "off", "k3", True),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("correction", "kl", "summaries"), CASES, ids=[f"{c['level']}-{c['mode']}" for c, _, _ in CASES]
)
def test_it_is_the_brute_force_loss_and_has_its_gradient(
    tiny_base: Path, tmp_path: Path, correction: dict[str, Any], kl: dict[str, Any], summaries: bool
) -> None:
    kl = {**kl, "coefficient": kl["coefficient"] or 0.0}
    settings = made.settings(correction=correction, kl=kl, train_summaries=summaries)
    told = check(tiny_base, tmp_path, settings, made.usual(random.Random(7)))
    assert told["trained"] < told["sampled"] or summaries
    if correction["mode"] == "mask":
        assert 0 < told["masked"] < 1  # the case tells something of the bounds


def test_rows_of_several_branches_worked_on_in_parts_change_nothing(tiny_base: Path, tmp_path: Path) -> None:
    settings = made.settings(correction={"level": "sequence", "mode": "truncate", **BOUNDS}, micro=1, length=64)
    told = check(tiny_base, tmp_path, settings, made.usual(random.Random(8)))
    assert told["padding"] < 0.5


def test_a_model_that_scales_its_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    common = dict(tiny._COMMON, num_key_value_heads=2, logits_scaling=0.3, tie_word_embeddings=False)
    GraniteForCausalLM(GraniteConfig(**common)).save_pretrained(tmp_path / "base")
    both = {"correction": {"mode": "truncate", **BOUNDS}, "kl": {"coefficient": 0.05}}
    settings = made.settings(**both, harness={"temperature": 0.7})
    check(tmp_path / "base", tmp_path, settings, made.usual(random.Random(9)))


def test_an_episode_of_many_branches_weighs_as_one(tiny_base: Path, tmp_path: Path) -> None:
    """Its advantage is against the mean over episodes, not over branches; the divisor knows neither branches nor lengths."""
    rng, settings = random.Random(10), made.settings(groups=1, correction={"mode": "off"})
    split, plain = made.episode(rng, made.TREE), made.episode(rng, made.LINE)
    told = check(tiny_base, tmp_path, settings, [[(split, 1.0), (plain, 0.0)]])
    assert told["advantage"] == 0.5  # with three branches of it in the mean, the two would be 0.25 and 0.75
    assert told["trained"] == sum(len(node.tokens) for trace in (split, plain) for node in trace.nodes if node.sampled)


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_the_policy_is_what_is_sampled_at_its_temperature(tiny_base: Path, tmp_path: Path, temperature: float) -> None:
    settings = made.settings(harness={"temperature": temperature}, correction=BOUNDS, kl={"coefficient": 0.05})
    assert 0 < check(tiny_base, tmp_path, settings, made.usual(random.Random(11)))["masked"] < 1


def test_where_rewards_are_alike_the_penalty_still_acts(tiny_base: Path, tmp_path: Path) -> None:
    groups = [[(trace, 1.0) for trace, _ in group] for group in made.usual(random.Random(12))]
    told = check(tiny_base, tmp_path, made.settings(kl={"coefficient": 0.05}, correction={"mode": "off"}), groups)
    assert told["advantage"] > 0.01


@pytest.mark.parametrize("algorithm", ["composer2", "grpo"])
def test_where_they_are_alike_after_it_nothing_is_learnt(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    """GRPO would divide rounding by its own size."""
    groups = [
        [(trace, 0.5 + 1e-9 * place) for place, (trace, _) in enumerate(group)]
        for group in made.usual(random.Random(13))
    ]
    trainer = Trainer(
        tiny_base,
        made.settings(**{"algorithm": algorithm} | ({"normaliser": 1024} if algorithm == "grpo" else {})),
        tmp_path,
    )
    assert made.gradient(trainer, made.batch(tmp_path, 1, groups), tmp_path)["advantage"] == 0


def test_other_log_probs_than_those_drawn_with_are_no_part_of_it(tiny_base: Path, tmp_path: Path) -> None:
    groups, told = made.usual(random.Random(11)), []
    for times in (1.0, 3.0):
        for group in groups:
            for trace, _ in group:
                for node in trace.nodes:
                    node.raw_logprobs = [each * times for each in node.raw_logprobs]
        trainer = Trainer(tiny_base, made.settings(), tmp_path / str(times))
        told.append(made.gradient(trainer, made.batch(tmp_path / str(times), 1, groups), tmp_path / str(times)))
    assert told[0] == told[1]
