"""Router replay: the experts that an engine sampled with reach the trainer, which computes what the engine computed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from etude.agent.formats import choose_format
from etude.agent.harness import Harness, HarnessSettings
from etude.agent.summary import SummarySettings
from etude.agent.trace import Node, Trace, first_unrouted, from_json, note_routes, samples, to_json
from etude.errors import UserError
from etude.inference.local import LocalPolicy
from etude.inference.policy import Sampling, from_npy, to_npy
from etude.models.load import load_model
from etude.rl.trainer import Trainer, branches
from etude.run.stages.rl import with_replay
from etude.training.experts import routers_of
from tests import tiny
from tests.agent.test_harness import Echo
from tests.rl import made
from tests.training.test_experts import model_of, rows_of, taken_up, text

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ["qwen3_moe", "deepseek_v3", "mixtral"]


def save(folder: Path, family: str) -> Path:
    """Save a small mixture whose routers have clear wishes."""
    model = model_of(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    tiny.tokeniser().save_pretrained(folder)
    return folder


def played(base: Path, turns: int = 2, **sampling: Any) -> list[tuple[Trace, float]]:
    """Return two episodes of some turns, sampled by the engine, with the experts of every token that was read."""

    async def play() -> list[tuple[Trace, float]]:
        policy = LocalPolicy.open(base, device="cpu")
        group = []
        for number in range(2):
            trace = Trace(f"episode {number}", "task", [Node(None, "opening", [7, 8, 9], "")])
            for turn in range(turns):
                leaf = len(trace.nodes) - 1
                first = first_unrouted(trace, leaf)
                asked = Sampling(12, seed=10 * number + turn, experts=True, experts_from=first, **sampling)
                done = await policy.generate(trace.context(leaf), asked)
                parts = done.token_ids, "", True, done.logprobs, done.raw_logprobs, done.versions
                trace.nodes.append(Node(leaf, "turn", *parts))
                note_routes(trace, leaf + 1, first, done.experts)
                trace.nodes.append(Node(leaf + 1, "answers", [3, 4, 5], ""))
            group.append((trace, float(number)))
        await policy.close()
        return group

    return asyncio.run(play())


def disturb(trainer: Trainer, by: float = 2.0) -> None:
    """Move where routers choose, and nothing else: a bias on the choice alone."""
    experts = trainer.session.experts
    assert experts is not None
    for place, router in enumerate(experts.routers):
        with torch.no_grad():
            router.own_bias()[place % 2 :: 2] += by


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_routes_give_the_engines_log_probs_though_the_router_would_choose_others(
    tmp_path: Path, family: str
) -> None:
    base = save(tmp_path / "base", family)
    group = played(base, temperature=0.7)
    mismatch = {}
    for replay in (True, False):
        trainer = Trainer(
            base, made.settings(harness={"temperature": 0.7}, router_replay=replay), tmp_path / str(replay)
        )
        disturb(trainer)
        metrics = made.gradient(trainer, made.batch(tmp_path, 1, [group]), tmp_path)
        mismatch[replay] = metrics["mismatch_p99"]
    assert mismatch[True] < 1e-5
    assert mismatch[False] > 0.01


def test_routes_survive_the_trace_file_and_the_last_token_of_a_turn_gets_its_own_in_the_next(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "mixtral")
    trace = played(base)[0][0]
    again = from_json(to_json(trace), "here")
    assert again == trace
    counts = [len(from_npy(node.routes)) if node.routes else 0 for node in trace.nodes]
    assert counts == [
        3,
        12,
        3,
        11,
        0,
    ]  # of the last turn's last token, and of what came after it, nobody has read a thing
    (branch,) = branches(again, 0, train_summaries=True, routes=True)
    assert branch.routes is not None
    assert branch.routes.shape == (len(branch.tokens), 2, 2)
    assert (branch.routes[:-1] >= 0).all()
    assert (branch.routes[-1] == -1).all()
    model = load_model(base, torch.device("cpu"), torch.float32)
    given: list[torch.Tensor] = []
    for name, part in model.named_modules():
        if name.endswith(".experts"):
            part.register_forward_pre_hook(lambda _, arguments: given.append(arguments[1]))
    with torch.no_grad():
        model(torch.from_numpy(branch.tokens)[None])
    wanted = torch.stack(given, 1).sort().values.numpy()
    assert np.array_equal(np.sort(branch.routes[:-1], -1), wanted[:-1])


def test_only_what_is_not_known_is_asked_for_and_the_rest_may_come_from_the_cache(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "mixtral")

    async def ask() -> tuple[Any, Any]:
        policy = LocalPolicy.open(base, device="cpu")
        prompt = list(range(1, 60))
        whole = await policy.generate(prompt, Sampling(4, temperature=0, experts=True))
        part = await policy.generate(prompt, Sampling(4, temperature=0, experts=True, experts_from=50))
        new = [7, *prompt]  # nothing of it is in the cache: it is read from the beginning, and told from 20 on
        for first in (20, 0):
            done = await policy.generate(new, Sampling(4, temperature=0, experts=True, experts_from=first))
            unread.append(done.experts)
        await policy.close()
        return whole, part

    unread: list[Any] = []
    whole, part = asyncio.run(ask())
    assert torch.equal(unread[0].sort().values, unread[1][20:].sort().values)
    assert (whole.cached, whole.experts.shape[0]) == (0, 62)
    assert part.cached > 30
    assert part.cached <= 50
    assert torch.equal(part.experts.sort().values, whole.experts[50:].sort().values)


class Recorded:
    """The engine, and what was asked of it."""

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy, self.info, self.close = policy, policy.info, policy.close
        self.asked: list[Sampling] = []

    async def generate(self, prompt: Any, sampling: Sampling, **more: Any) -> Any:
        self.asked.append(sampling)
        return await self.policy.generate(prompt, sampling, **more)


def test_rows_without_a_route_are_the_live_routers_exactly() -> None:
    tokens = text()
    plain, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    taken_up(plain)
    experts = taken_up(model)
    routes = torch.full((*tokens.shape, 2, 2), -1, dtype=torch.int16)
    routes[1, 5:9] = torch.tensor([[0, 3], [2, 1]], dtype=torch.int16)
    part = SampledLike(rows_of(tokens), routes)
    for router in experts.routers:
        router.chosen = []
        router.register_forward_hook(lambda own, _, out: own.chosen.append(out))
    with experts.working_on(part):
        model(tokens)
    hidden: list[torch.Tensor] = []
    first = next(iter(routers_of(plain).values()))
    first.register_forward_hook(lambda _, given, out: hidden.extend(out))
    plain(tokens)
    logits, weights, ids = experts.routers[0].chosen[0]
    live = (routes[:, :, 0] < 0).all(-1).flatten()
    assert torch.equal(logits, hidden[0])
    assert torch.equal(weights[live], hidden[1][live])
    assert torch.equal(ids[live], hidden[2][live])
    assert torch.equal(ids[~live], routes[:, :, 0].flatten(0, 1)[~live].long())
    assert torch.equal(weights[~live], logits.softmax(-1).gather(1, ids)[~live])
    assert experts.routers[0].routes_NK is None  # afterwards the router chooses again


class SampledLike:
    """Rows with routes."""

    def __init__(self, rows: Any, routes: torch.Tensor) -> None:
        self.rows, self.routes_BTLK, self.live = rows, routes, rows.live


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_the_router_through_the_gathered_scores(family: str) -> None:
    """Against numeric differences, at routes that the router would not choose, and the same where layers are recomputed."""
    tokens, model = text(2, 10), model_of(family)
    experts = taken_up(model)
    layers = len(experts.replayed)
    routes = torch.from_numpy(
        np.stack([np.random.default_rng(0).permuted(np.arange(4))[:2] for _ in range(20 * layers)])
    )
    part = SampledLike(rows_of(tokens), routes.view(2, 10, layers, 2).to(torch.int16))
    router = experts.replayed[-1]

    def loss() -> torch.Tensor:
        return model(tokens, use_cache=False).logits.double().log_softmax(-1)[..., 5].sum()

    gradients = []
    for recomputed in (False, True):
        model.zero_grad()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers:
                layer.training = True
        with experts.working_on(part):
            loss().backward()
        gradients.append(router.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-6)
    direction, slopes = gradients[0] / gradients[0].norm(), []
    with experts.working_on(part), torch.no_grad():
        for step in (1e-2, -1e-2):
            router.weight += step * direction
            slopes.append(loss().item())
            router.weight -= step * direction
    numeric = (slopes[0] - slopes[1]) / 2e-2
    assert numeric > 1e-3
    assert gradients[0].norm().item() == pytest.approx(numeric, rel=2e-2)


def test_branches_of_a_tree_keep_their_routes_in_packed_rows(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "mixtral")
    group = played(base)
    trainer = Trainer(base, made.settings(router_replay=True), tmp_path / "trainer")
    trainer._root = tmp_path
    packed = trainer.packed(made.batch(tmp_path, 1, [group]), 4, fixed=False)
    for part in packed.parts:
        rows = part.rows(packed.weights, packed.shares)
        assert rows.routes_BTLK is not None
        routes = rows.routes_BTLK.numpy()
        used = np.zeros(routes.shape[:2], bool)
        for branch, row, column in part.places:
            here = slice(column, column + len(branch.tokens))
            assert branch.routes is not None
            assert np.array_equal(routes[row, here], branch.routes)
            used[row, here] = True
        assert (routes[~used] == -1).all()
        assert not rows.live().numpy()[~used].any()


def test_the_harness_fills_the_trace_turn_by_turn(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "qwen3_moe")

    async def play() -> tuple[Trace, list[Sampling]]:
        policy = Recorded(LocalPolicy.open(base, device="cpu"))
        settings = HarnessSettings(turns=3, turn_tokens=8, malformed=9, summary=SummarySettings(kind="none"))
        talk = choose_format(tiny.tokeniser())
        harness = Harness(policy, talk, Echo(), settings, Trace("one", "task"), 1, experts=True)
        trace = await harness.run("be good", "do it")
        await policy.close()
        return trace, policy.asked

    trace, asked = asyncio.run(play())
    ends = np.cumsum([len(node.tokens) for node in trace.nodes])
    turns = [place for place, node in enumerate(trace.nodes) if node.sampled]
    assert len(turns) > 1
    assert [each.experts for each in asked] == [True] * len(turns)
    assert [each.experts_from for each in asked] == [0, *(ends[place] - 1 for place in turns[:-1])]
    (sample,) = samples(trace)
    assert sum(len(from_npy(routes)) for _, routes in sample.routes) == ends[turns[-1]] - 1


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    with pytest.raises(UserError, match="has no experts to replay; leave it out"):
        with_replay(made.settings(router_replay=True), tiny_base)
    base = save(tmp_path / "base", "mixtral")
    assert [with_replay(made.settings(router_replay=asked), base).router_replay for asked in (None, True, False)] == [
        True,
        True,
        False,
    ]
    assert with_replay(made.settings(), tiny_base).router_replay is False
    group = played(base)
    trainer = Trainer(save(tmp_path / "other", "qwen3_moe"), made.settings(router_replay=True), tmp_path / "trainer")
    group[0][0].nodes[0].routes = to_json_routes(group[0][0].nodes[0].routes, by=100)
    with pytest.raises(UserError, match="names experts that this model does not have; begin a new run"):
        made.gradient(trainer, made.batch(tmp_path, 1, [group]), tmp_path)
    for balance in ("aux_free", "quantile"):
        with pytest.raises(UserError, match=f'base has no place for the bias of "{balance}"'):
            Trainer(base, made.settings(experts={"balance": balance}), tmp_path / balance)


def to_json_routes(routes: str, by: int) -> str:
    return to_npy(from_npy(routes) + by)


def test_a_bias_that_is_trained_in_rl_is_published_with_the_weights(tmp_path: Path) -> None:
    base = save(tmp_path / "base", "deepseek_v3")
    trainer = Trainer(base, made.settings(router_replay=True, experts={"balance": "aux_free"}), tmp_path / "trainer")
    before = {
        name: value.clone()
        for name, value in trainer.session.computed_state().items()
        if name.endswith("correction_bias")
    }
    metrics = made.step(trainer, made.batch(tmp_path, 1, [played(base)]), tmp_path)
    after = trainer.session.computed_state()
    assert before
    assert all(
        (after[name] - value).abs().max().item() == pytest.approx(1e-3, rel=1e-3) for name, value in before.items()
    )
    assert 0 < metrics["experts_entropy"] <= 1
