"""The trainer: what it measures, how it moves weights, what it refuses, and what it hands over."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.agent.trace import Node, Trace, sampled_nodes
from etude.errors import UserError
from etude.inference.kv_cache import plan
from etude.inference.local import LocalPolicy, build
from etude.inference.policy import Sampling
from etude.inference.vllm_plugin import merged
from etude.models.load import load_model, saved_dtype
from etude.rl.exchange import OBSERVED, Batch, TrainedEpisode, TrainedGroup
from etude.rl.trainer import Trainer
from tests import tiny
from tests.rl import made


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.session.model.named_parameters()}


def test_what_an_engine_sampled_is_what_the_trainer_sees(tiny_base: Path, tmp_path: Path) -> None:
    """Token for token and, but for rounding, log-prob for log-prob: over two turns, sampled at another temperature than 1."""

    async def play() -> list[tuple[Trace, float]]:
        policy = LocalPolicy.open(tiny_base, device="cpu")
        group = []
        for number in range(2):
            trace = Trace(f"episode {number}", "task", [Node(None, "opening", [7, 8, 9], "")])
            for turn in range(2):
                leaf = len(trace.nodes) - 1
                done = await policy.generate(
                    trace.context(leaf), Sampling(12, temperature=0.7, seed=10 * number + turn)
                )
                trace.nodes.append(
                    Node(leaf, "turn", done.token_ids, "", True, done.logprobs, done.raw_logprobs, done.versions)
                )
                trace.nodes.append(Node(leaf + 1, "answers", [3, 4, 5], ""))
            group.append((trace, float(number)))
        await policy.close()
        return group

    group = asyncio.run(play())
    trainer = Trainer(tiny_base, made.settings(harness={"temperature": 0.7}), tmp_path)
    metrics = made.gradient(trainer, made.batch(tmp_path, 1, [group]), tmp_path)
    assert (
        metrics["sampled"]
        == metrics["trained"]
        == sum(len(n.tokens) for trace, _ in group for n in trace.nodes if n.sampled)
    )
    assert metrics["mismatch_mean"] < 1e-5
    assert metrics["mismatch_p99"] < 1e-4
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-3)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert metrics["staleness_0"] == 1
    drawn = [each for trace, _ in group for node in trace.nodes for each in node.logprobs]
    assert metrics["entropy"] == pytest.approx(-sum(drawn) / len(drawn), rel=1e-5)


def test_tokens_are_told_apart_by_their_age(tiny_base: Path, tmp_path: Path) -> None:
    rng, trainer = random.Random(1), Trainer(tiny_base, made.settings(), tmp_path)
    trainer.session.loop.done = 3
    traces = [made.episode(rng, made.LINE, version=version) for version in (3, 1)]
    counts = [sum(len(node.tokens) for node in trace.nodes if node.sampled) for trace in traces]
    metrics = made.gradient(trainer, made.batch(tmp_path, 4, [[(traces[0], 1.0), (traces[1], 0.0)]]), tmp_path)
    assert {name: value for name, value in metrics.items() if name.startswith("staleness")} == {
        "staleness_0": counts[0] / sum(counts), "staleness_2": counts[1] / sum(counts)
    }  # fmt: skip
    model = load_model(tiny_base, torch.device("cpu"))
    wrong = []  # of the newest version only
    with torch.no_grad():
        logs = model(torch.tensor([traces[0].context(3)])).logits[0].log_softmax(-1)
    at = 0
    for node in traces[0].nodes:
        for token, drawn in zip(node.tokens, node.logprobs or [0.0] * len(node.tokens), strict=True):
            if node.sampled:
                wrong.append(abs(float(logs[at - 1, token]) - drawn))
            at += 1
    assert metrics["mismatch_mean"] == pytest.approx(sum(wrong) / len(wrong), rel=1e-4)


def test_what_the_trainer_computes_of_each_token_is_kept_beside_the_traces(tiny_base: Path, tmp_path: Path) -> None:
    """Of a tree and of a line, in the order of their sampled nodes; by transformers, each node at the end of its own context."""
    model = load_model(tiny_base, torch.device("cpu"))
    trainer = Trainer(
        tiny_base, made.settings(keep_traces=True, correction={"mode": "mask", "low": 0.5, "high": 1.5}), tmp_path
    )
    groups = made.usual(random.Random(5))
    made.step(trainer, made.batch(tmp_path, 1, groups), tmp_path)
    masked = list[int]()
    for place, group in enumerate(groups):
        kept = json.loads((tmp_path / f"episodes/{100 + place:06d}" / OBSERVED).read_text())
        assert list(kept) == ["000.json", "001.json"]
        for (trace, _), (name, own) in zip(group, kept.items(), strict=True):
            expected, changes = list[float](), list[float]()
            for at in sampled_nodes(trace):
                context, node = trace.context(at), trace.nodes[at]
                with torch.no_grad():
                    logs = model(torch.tensor([context])).logits[0].log_softmax(-1)
                begin = len(context) - len(node.tokens)
                now = [float(logs[begin + number - 1, token]) for number, token in enumerate(node.tokens)]
                expected += now
                changes += [after - before for after, before in zip(now, node.logprobs, strict=True)]
            assert len(expected) == sum(len(node.tokens) for node in trace.nodes if node.sampled)
            assert own["logprobs"] == pytest.approx(expected, abs=2e-4), name
            assert own["masked"] == [int(not 0.5 <= math.exp(change) <= 1.5) for change in changes], name
            masked += own["masked"]
    assert 0 < sum(masked) < len(masked)


def test_the_better_episode_becomes_likelier_and_the_rate_warms_up(tiny_base: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_base, made.settings(warmup=2, correction={"mode": "off"}), tmp_path)
    rng = random.Random(2)
    good, bad = made.episode(rng, made.LINE), made.episode(rng, made.LINE)
    batch = made.batch(tmp_path, 1, [[(good, 1.0), (bad, 0.0)]])

    def likelihood(trace: Trace) -> float:
        alone = made.batch(tmp_path / "alone", 9, [[(trace, 0.0)]])
        return math.log(made.gradient(trainer, alone, tmp_path / "alone")["ratio_mean"])

    before = likelihood(good), likelihood(bad)
    metrics = [made.step(trainer, batch, tmp_path) for _ in range(3)]
    after = likelihood(good), likelihood(bad)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert [each["lr"] for each in metrics] == [0.0005, 0.001, 0.001]
    assert [each["skipped"] for each in metrics] == [0, 0, 0]
    assert all(each["flops"] > 0 and each["gradient"] > 0 and each["seconds"] > 0 for each in metrics)
    assert trainer.done == 3


@pytest.mark.filterwarnings("ignore:overflow")  # that is what it is about
def test_a_loss_that_is_no_number_moves_nothing(tiny_base: Path, tmp_path: Path) -> None:
    said: list[str] = []
    trainer = Trainer(tiny_base, made.settings(), tmp_path, say=said.append)
    before = weights(trainer)
    group = [(made.episode(random.Random(3), made.LINE), reward) for reward in (1e38, -1e38)]
    metrics = made.step(trainer, made.batch(tmp_path, 1, [[(trace, reward * 10) for trace, reward in group]]), tmp_path)
    assert metrics["skipped"] == 1
    assert "loss" not in metrics  # JSON knows no infinity
    assert said == ["step 1 was skipped: loss is not finite"]
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    metrics = made.step(trainer, made.batch(tmp_path, 2, made.usual(random.Random(3))), tmp_path)
    assert metrics["skipped"] == 0
    assert metrics["gradient"] > 0  # nothing of the other step is left in it


@pytest.mark.parametrize("kind", ["start", "average"])
def test_divergence_is_from_the_start_or_from_an_average_of_the_way(tiny_base: Path, tmp_path: Path, kind: str) -> None:
    trainer = Trainer(tiny_base, made.settings(kl={"coefficient": 0.1, "reference": kind, "decay": 0.5}), tmp_path)
    start = weights(trainer)
    metrics = made.step(trainer, made.batch(tmp_path, 1, made.usual(random.Random(4))), tmp_path)
    assert "kl" in metrics
    assert trainer.session.start is not None
    for name, weight in trainer.session.start.model.named_parameters():
        expected = start[name] if kind == "start" else (start[name] + weights(trainer)[name]) / 2
        torch.testing.assert_close(weight, expected)
    assert trainer.session.model.get_input_embeddings().weight.requires_grad  # the reference has weights of its own


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_learns_publishes_and_exports(tmp_path: Path, family: str) -> None:
    base = tiny.save_model(tmp_path / "base", family)
    trainer = Trainer(base, made.settings(dtype="bfloat16", recompute=family == "llama"), tmp_path / "trainer")
    before = weights(trainer)
    made.step(trainer, made.batch(tmp_path, 1, made.usual(random.Random(5))), tmp_path)
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer).items())
    held = load_model(base, torch.device("cpu"))
    held.load_state_dict(trainer.session.computed_state())  # what an engine has, name by name
    for name, weight in held.named_parameters():
        assert torch.equal(weight, weights(trainer)[name])
    trainer.export(tmp_path / "model")
    assert saved_dtype(tmp_path / "model") == torch.bfloat16
    exported = load_model(tmp_path / "model", torch.device("cpu"), torch.float32)
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, weights(trainer)[name].bfloat16().float())
    assert not (tmp_path / "model.part").exists()


def test_lora_publishes_adapters_exports_the_sum_and_trains_small_matrices_only(
    tiny_base: Path, tmp_path: Path
) -> None:
    trainer = Trainer(tiny_base, made.settings(lora={"rank": 2}, kl={"coefficient": 0.1}), tmp_path / "trainer")
    before = weights(trainer)
    for number in range(2):
        metrics = made.step(trainer, made.batch(tmp_path, number, made.usual(random.Random(number))), tmp_path)
        assert metrics["skipped"] == 0
    adapters = trainer.session.computed_state()
    changed = {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    held = load_model(tiny_base, torch.device("cpu"), torch.float32)
    ids = torch.arange(1, 60)[None]
    trainer.session.model.set_attn_implementation("sdpa")
    assert trainer.reference is not None
    of_start = trainer.reference.ask(lambda model, rows: model(rows).logits, ids)
    torch.testing.assert_close(of_start, held(ids).logits.detach(), rtol=1e-4, atol=1e-4)
    held.load_state_dict(merged(adapters, held.state_dict(), torch.float32))  # as the plug-in of vLLM does
    with torch.no_grad():
        expected = trainer.session.model(ids).logits
        torch.testing.assert_close(held(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert sum(each.numel() for each in adapters.values()) < sum(each.numel() for each in held.parameters()) / 10
        runner = build(load_model(tiny_base, torch.device("cpu"), torch.float32), None, str, context=64, rows=1).runner
        runner.replace(adapters)  # an engine that has the base needs no more
        where = plan([([1], 0, ids.shape[1])], runner.cache.size, runner.device)
        torch.testing.assert_close(runner.run(ids[0], where)[0], expected[0], rtol=1e-4, atol=1e-4)
        trainer.export(tmp_path / "model")
        exported = load_model(tmp_path / "model", torch.device("cpu"), torch.float32)
        torch.testing.assert_close(exported(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_recomputing_layers_changes_nothing(tiny_base: Path, tmp_path: Path) -> None:
    metrics = []
    for recompute in (False, True):
        trainer = Trainer(tiny_base, made.settings(recompute=recompute), tmp_path / str(recompute))
        metrics.append(made.step(trainer, made.batch(tmp_path, 1, made.usual(random.Random(6))), tmp_path))
        metrics[-1].pop("seconds")
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.parametrize(("more", "match"), [
    ({"length": tiny.CONTEXT + 1}, "beyond the model's context of 1024"),
    ({"compile": "on"}, "is for a GPU"),
    ({"micro": 10**9}, "will not fit"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_at_once(tiny_base: Path, tmp_path: Path, more: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        Trainer(tiny_base, made.settings(**more), tmp_path)


def test_a_batch_that_cannot_be_learnt_from_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_base, made.settings(length=16), tmp_path)
    gone = Batch(3, (TrainedGroup(0, "task", (TrainedEpisode("episodes/none.json", 1.0),)),))
    with pytest.raises(UserError, match=r"step 3 learns from .*none.json, which is gone"):
        made.step(trainer, gone, tmp_path)
    long = made.episode(random.Random(7), made.TREE)
    with pytest.raises(UserError, match="does not fit a training row of 16; raise `length`"):
        made.step(trainer, made.batch(tmp_path, 1, [[(long, 1.0)]]), tmp_path)
    empty = Trace("empty", "task", [Node(None, "opening", [1, 2], "")])
    with pytest.raises(UserError, match="hold no token to train on"):
        made.step(trainer, made.batch(tmp_path, 1, [[(empty, 1.0), (empty, 0.0)]]), tmp_path)
