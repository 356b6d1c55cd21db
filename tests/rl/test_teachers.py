"""On-policy distillation: the loss and its gradient by brute force, its mean on a distribution that is listed whole, whose tasks are whose."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.agent.trace import Node, Trace
from etude.errors import UserError
from etude.jsonl import read_rows
from etude.models.load import load_model, load_tokeniser
from etude.rl.ledger import Closed, Ledger
from etude.rl.settings import RlSettings
from etude.rl.trainer import Trainer
from etude.training.memory import Way, plan
from tests import tiny
from tests.rl import made
from tests.rl.test_learning import SPROUT
from tests.rl.test_loss import BOUNDS, Groups, in_float64, log_probs, moved, own_tokens, weight
from tests.rl.test_loss import loss as brute_force
from tests.rl.toy import Toy, play, settings_of
from tests.training.test_memory import BIG

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = {"low": 0.0, "high": 1e9}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with other weights than `tiny_base`, so far apart that a bound of a nat cuts some tokens off."""
    folder = tiny.save_model(tmp_path_factory.mktemp("teacher") / "other", seed=4)
    model = load_model(folder, torch.device("cpu"))
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2.0)
    model.save_pretrained(folder)
    return folder


def settings(teacher: Path, bound: float = 0.5, outcome: float = 0.0, **more: Any) -> RlSettings:
    return made.settings(teacher={"models": {"": str(teacher)}, "bound": bound, "outcome": outcome}, **more)


def held(
    model: Any, teacher: Any, groups: Groups, chosen: RlSettings
) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Return for every branch its tokens and, of every learnt place, what log π is multiplied with there, by plain loops."""
    made_ = []
    for group in groups:
        mean = sum(reward for _, reward in group) / len(group)
        for trace, reward in group:
            for tokens, own in own_tokens(trace):
                learnt = [(place, old) for place, old, summary in own if chosen.train_summaries or not summary]
                if learnt:
                    now, there = (log_probs(each, tokens, chosen) for each in (model, teacher))
                    changes = [now[place - 1] - old for place, old in learnt]
                    bound = chosen.teacher.bound
                    gains = [
                        min(max(there[place - 1] - now[place - 1], -bound), bound)
                        + chosen.teacher.outcome * (reward - mean)
                        for place, _ in learnt
                    ]
                    factors = [
                        gain * weight(change, changes, chosen) for gain, change in zip(gains, changes, strict=True)
                    ]
                    made_.append((tokens, [(place, each) for (place, _), each in zip(learnt, factors, strict=True)]))
    return made_


@pytest.mark.parametrize(
    ("outcome", "more"),
    [(0.0, {"correction": {"mode": "off"}}), (0.5, {"correction": {"level": "geometric", "mode": "mask", **BOUNDS}}),
     (0.0, {"correction": {"mode": "truncate", **BOUNDS}, "harness": {"temperature": 0.7}, "train_summaries": False})],
)  # fmt: skip
def test_it_is_the_brute_force_loss_and_has_its_gradient(
    tiny_base: Path, teacher: Path, tmp_path: Path, outcome: float, more: dict[str, Any]
) -> None:
    chosen, groups = settings(teacher, outcome=outcome, **more), made.usual(random.Random(7))
    trainer = Trainer(tiny_base, chosen, tmp_path / "trainer")
    moved(trainer)
    exact, taught_by = in_float64(trainer.session.model), in_float64(load_model(teacher, torch.device("cpu")))
    fixed = held(exact, taught_by, groups, chosen)
    told = made.gradient(trainer, made.batch(tmp_path, 1, groups), tmp_path)
    assert told["loss"] == pytest.approx(brute_force(exact, fixed, chosen), rel=1e-4, abs=1e-7)
    assert 0 < told["teacher_clipped"] < 1  # the case tells something of the bound
    gradients = {name: master.grad.double() for name, master in trainer.session.weights.masters.items()}
    scale = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
    weights, size = dict(exact.named_parameters()), 1e-5
    torch.manual_seed(0)
    ways = {name: torch.randn_like(each) for name, each in weights.items()}
    found = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, each in weights.items():
                each.add_(ways[name], alpha=sign * size)
        found.append(brute_force(exact, fixed, chosen))
    slope = sum(float((gradients[name] * way).sum()) for name, way in ways.items())
    assert slope == pytest.approx((found[0] - found[1]) / (2 * size), rel=1e-3, abs=1e-4 * scale)


def test_a_teacher_that_is_the_policy_has_nothing_to_say(tiny_base: Path, tmp_path: Path) -> None:
    """However stale the tokens are: these were sampled by quite another policy."""
    trainer = Trainer(tiny_base, settings(tiny_base, correction=WIDE), tmp_path)
    told = made.gradient(trainer, made.batch(tmp_path, 1, made.usual(random.Random(1))), tmp_path)
    assert (told["teacher_gap"], told["loss"]) == (0, 0)
    assert told["ratio_max"] > 1.5
    assert all(not master.grad.any() for master in trainer.session.weights.masters.values())


def test_its_mean_over_what_is_sampled_is_the_gradient_of_the_divergence(
    tiny_base: Path, teacher: Path, tmp_path: Path
) -> None:
    """Every token of the vocabulary is an episode of its own, drawn from a flat distribution: ρ makes it the policy's."""
    prompt, flat = [7, 8, 9], -math.log(tiny.VOCABULARY)
    traces = []
    for token in range(tiny.VOCABULARY):
        turn = Node(0, "turn", [token], "", True, [flat], [flat], [0])
        traces.append((Trace(str(token), "task", [Node(None, "opening", prompt, ""), turn]), 0.0))
    chosen = settings(teacher, bound=50.0, groups=1, group_size=tiny.VOCABULARY, normaliser=1, correction=WIDE)
    trainer = Trainer(tiny_base, chosen, tmp_path / "trainer")
    told = made.gradient(trainer, made.batch(tmp_path, 1, [traces]), tmp_path)
    own, other = (in_float64(load_model(folder, torch.device("cpu"))) for folder in (tiny_base, teacher))
    logs = own(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with torch.no_grad():
        wanted = other(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    divergence = (logs.exp() * (logs - wanted)).sum()
    divergence.backward()
    assert float(divergence.detach()) > 0.01
    right = {name: each.grad for name, each in own.named_parameters()}
    scale = max(float(each.abs().max()) for each in right.values() if each is not None)
    assert told["teacher_clipped"] == 0
    for name, master in trainer.session.weights.masters.items():
        torch.testing.assert_close(master.grad.double(), right[name], rtol=1e-3, atol=1e-4 * scale)


def test_each_teacher_scores_its_own_tasks(tiny_base: Path, teacher: Path, tmp_path: Path) -> None:
    """The longest prefix decides; whose teacher is the policy itself is not moved, and what is spent is counted by teacher."""
    rng, models = random.Random(3), {"": str(tiny_base), "med": str(tiny_base), "med-hard": str(teacher)}
    chosen = made.settings(teacher={"models": models, "bound": 50.0}, correction={"mode": "off"}, groups=3)
    batch = made.batch(tmp_path, 1, [[(made.episode(rng, made.LINE), 0.0) for _ in range(2)] for _ in range(3)])
    tasks = ("law-1", "med-hard-2", "med-1")
    batch = type(batch)(
        1, tuple(type(g)(g.group, task, g.episodes) for g, task in zip(batch.groups, tasks, strict=True))
    )
    trainer = Trainer(tiny_base, chosen, tmp_path / "trainer")
    trainer._root = tmp_path
    packed = trainer.packed(batch, trainer.session.micro, fixed=False)
    assert packed.teachers == [str(each) for each in (tiny_base, tiny_base, teacher, teacher, tiny_base, tiny_base)]
    judges = {str(folder): load_model(folder, torch.device("cpu")) for folder in (tiny_base, teacher)}
    seen = 0
    for part in packed.parts:
        assert part.taught is not None
        for branch, said in part.by_branch(part.taught):
            wanted = log_probs(judges[packed.teachers[branch.episode]], branch.tokens.tolist(), chosen)
            assert said[branch.learnt].tolist() == pytest.approx(
                [wanted[place] for place in branch.learnt.nonzero()[0]], abs=1e-4
            )
            seen += 1
    assert seen == 6
    trainer.session.loop.backward(packed.rows(), packed.divisor)
    gaps = trainer.session.loop.objective.observed  # type: ignore[attr-defined]
    by_episode = {branch.episode: float(abs(gap).max())
                  for part, each in zip(packed.parts, gaps, strict=True) for branch, gap in part.by_branch(each.gaps)}  # fmt: skip
    assert [by_episode[episode] > 0.01 for episode in range(6)] == [False, False, True, True, False, False]


def test_a_task_without_a_teacher_and_a_teacher_without_a_task() -> None:
    one = made.settings(teacher={"models": {"med": "a", "law-": "b"}}).teacher
    with pytest.raises(UserError, match="the id of the task 'tax-1' begins with none of the prefixes"):
        one.refuse_gaps(["med-1", "law-2", "tax-1"])
    with pytest.raises(UserError, match="no task is left for 'law-'"):
        one.refuse_gaps(["med-1"])
    one.refuse_gaps(["med-1", "law-2"])


@pytest.mark.parametrize(
    ("given", "told"),
    [({"teacher": {"bound": 3.0}}, "`bound` has no effect with no `models`"), ({"teacher": {"models": {"": "x"}, "bound": 0.0}}, "greater than 0"),
     ({"teacher": {"models": {"": "x"}}, "kl": {"coefficient": 0.1}}, "kl is a part of the reward")],
)  # fmt: skip
def test_settings_that_say_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made.settings(**given)


def test_the_plan_counts_the_teachers() -> None:
    alone, taught = (plan(BIG, Way(4096, ranks=2, teachers=count), 10**12).parts for count in (0, 7_000_000_000))
    assert taught == alone | {"teachers": 7_000_000_000}
    assert plan(BIG, Way(4096, gpu=False, teachers=1000), 10**12).parts["teachers"] == 4000


def test_the_student_moves_to_the_teacher_though_all_rewards_are_alike(tmp_path: Path) -> None:
    """The teacher is sprout, less certain of all it says."""
    cpu, doubtful = torch.device("cpu"), tmp_path / "doubtful"
    shutil.copytree(SPROUT, doubtful)
    wanted = load_model(doubtful, cpu)
    with torch.no_grad():
        wanted.get_decoder().norm.weight.mul_(0.5)
    wanted.save_pretrained(doubtful)
    chosen = settings_of(
        steps=8, groups=4, group_size=4, mode="sync", epochs=9, optimiser={"lr": 2e-4}, normaliser=16, length=64,
        teacher={"models": {"": str(doubtful)}},
    )  # fmt: skip
    toy = Toy(load_tokeniser(SPROUT), tasks=12, tokens=16)
    toy.liked = frozenset()  # no episode earns anything
    play(SPROUT, tmp_path / "run", chosen, toy, seed=1)
    events, _ = Ledger(tmp_path / "run" / "ledger.jsonl").read()
    assert {event.fate for event in events if isinstance(event, Closed)} == {"ready"}
    gaps = [row["teacher_gap"] for row in read_rows(tmp_path / "run" / "metrics.jsonl", "train/")]
    assert len(gaps) == 8
    assert sum(gaps[-2:]) < 0.5 * sum(gaps[:2])
    before, after = (load_model(folder, cpu) for folder in (SPROUT, tmp_path / "run" / "model"))
    prompts = [torch.tensor([toy.tokeniser.encode(line)]) for line in ("def mul(one, other):\n", "import json\n")]

    def apart(model: Any) -> float:
        with torch.no_grad():
            own, its = ([each(prompt).logits[0].log_softmax(-1) for prompt in prompts] for each in (model, wanted))
        return sum(float((a.exp() * (a - b)).sum()) for a, b in zip(own, its, strict=True))

    assert apart(after) < 0.7 * apart(before)
