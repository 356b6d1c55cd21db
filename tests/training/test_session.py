"""A whole training: killed and taken up again, interrupted, skipping damage, with LoRA, and what it hands over."""

from __future__ import annotations

import io
import itertools
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from etude.data.loader import Corpus
from etude.errors import Interrupted, UserError
from etude.files import read_json
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.training import checkpoint
from etude.training.attention import isolate
from etude.training.batch import rows_of
from etude.training.objectives.next_token import NextToken
from etude.training.run import TrainingRun, measuring_steps
from tests import tiny
from tests.training import sessions

STEPS, TOKENS = 12, 8 * sessions.LENGTH  # of a training with the default settings, and of each of its steps


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sessions.write_corpus(tmp_path_factory.mktemp("corpus"))


def die_at(batch: int) -> Any:
    left = iter(range(batch))

    def change(given: Any) -> Any:
        if next(left) == batch - 1:
            sessions.kill_oneself()
        return given

    return lambda plain: sessions.Wrapped(plain, change)


def train(corpus: Path, folder: Path, name: str, after_step: int = 0, at_batch: int = 0) -> None:
    """Train and export, unless killed after so many steps of this session or when so many batches have been read."""
    more: dict[str, Any] = {"wrap": die_at(at_batch)} if at_batch else {}
    chosen = sessions.settings(optimiser={"name": name, "lr": 3e-3}, evaluations=4)
    with sessions.session(
        corpus, folder, chosen, reporter=sessions.acting_reporter(after_step, sessions.kill_oneself), **more
    ) as training:
        training.run()
        training.session.export(folder / "model")


def rows(folder: Path, prefix: str) -> dict[str, Any]:
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        return {row["key"].removeprefix(prefix): row for row in metrics.rows(prefix)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_killed_again_and_again_it_comes_out_the_same_bit_for_bit(corpus: Path, tmp_path: Path, name: str) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert sessions.processes(train, (corpus, straight, name)) == [0]
    rng = random.Random(name)
    # Before there is a checkpoint; while the first is written; in the middle of a step; anywhere.
    deaths = [(2, 0), (4, 0), (0, rng.randrange(3, 5)), (rng.randrange(1, 5), 0)]
    for after_step, at_batch in deaths:
        assert sessions.processes(train, (corpus, killed, name, after_step, at_batch)) == [-signal.SIGKILL]
    assert sessions.processes(train, (corpus, killed, name)) == [0]
    expected, found = rows(straight, "train/"), rows(killed, "train/")
    assert list(expected) == [f"{number:08d}" for number in range(1, STEPS + 1)]
    for field in ("loss", "gradient", "lr", "tokens", "flops"):
        assert [row[field] for row in found.values()] == [row[field] for row in expected.values()]
    assert {key: row["bits_per_byte"] for key, row in rows(killed, "eval/").items()} == {
        key: row["bits_per_byte"] for key, row in rows(straight, "eval/").items()
    }
    assert (killed / "model" / "model.safetensors").read_bytes() == (
        straight / "model" / "model.safetensors"
    ).read_bytes()
    again = rows(killed, "again/")
    steps = {key: row for key, row in again.items() if "/train/" in key}
    assert {key.partition("/")[0] for key in steps} >= {"0002", "0004"}
    for key, row in steps.items():
        first = found[key.rpartition("/")[2]]
        assert [row[field] for field in ("loss", "tokens", "flops")] == [
            first[field] for field in ("loss", "tokens", "flops")
        ]
        assert row["device_seconds"] > 0
    with MetricsLog(killed / "metrics.jsonl") as metrics:
        assert metrics.total("tokens") == (STEPS + len(steps)) * TOKENS
        spent = [*found.values(), *again.values(), *rows(killed, "eval/").values()]
        assert metrics.total("device_seconds") == pytest.approx(sum(row["device_seconds"] for row in spent))
        assert metrics.total("flops") > sum(row["flops"] for row in expected.values())


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training left alone."""
    folder = tmp_path_factory.mktemp("straight")
    with sessions.session(corpus, folder, sessions.settings(evaluations=4)) as training:
        training.run()
        training.session.export(folder / "model")
    return folder


def train_slowly(corpus: Path, folder: Path, after_step: int = 0) -> None:
    """Train with a clock on which every step takes 30 seconds, and a checkpoint is due after 100."""
    held: list[TrainingRun] = []

    def die() -> None:
        held[0].session._checkpoints.wait()
        sessions.kill_oneself()

    now = itertools.count(0, 30)
    chosen = sessions.settings(evaluations=4, checkpoint_every=1000, checkpoint_seconds=100.0)
    reporter = sessions.acting_reporter(after_step, die)
    with sessions.session(corpus, folder, chosen, reporter=reporter, clock=lambda: next(now)) as training:
        held.append(training)
        training.run()
        training.session.export(folder / "model")


def test_checkpoints_are_written_by_the_clock_too(corpus: Path, straight: Path, tmp_path: Path) -> None:
    """At step 4, 120 seconds after the start, and at step 8: killed after step 7, three steps are done again."""
    assert sessions.processes(train_slowly, (corpus, tmp_path, 7)) == [-signal.SIGKILL]
    assert sessions.processes(train_slowly, (corpus, tmp_path)) == [0]
    assert sorted(key.rpartition("/")[2] for key in rows(tmp_path, "again/") if "train" in key) == [
        f"{step:08d}" for step in (5, 6, 7)
    ]
    assert sessions.same(straight, tmp_path)


def test_progress_moves_within_a_step_and_a_stop_need_not_wait_for_its_end(
    corpus: Path, straight: Path, tmp_path: Path
) -> None:
    seen: list[float] = []
    made, left = Reporter(quiet=True), iter(range(20))  # of 12 steps, each in four parts

    def check() -> None:
        if next(left) == 16:
            sessions.interrupt()

    made.check_stop = check
    made.listener = lambda state: seen.append(state["done"] / TOKENS)
    chosen = sessions.settings(evaluations=4, micro=2)
    with sessions.session(corpus, tmp_path, chosen, reporter=made) as training, pytest.raises(Interrupted):
        training.run()
    assert training.session.loop.done == 3
    assert max(seen) == 3.75
    with sessions.session(corpus, tmp_path, chosen) as training:
        training.run()
    with sessions.session(corpus, tmp_path / "whole", chosen) as whole:
        whole.run()
    assert sessions.losses(tmp_path) == sessions.losses(tmp_path / "whole")


def stop_after(corpus: Path, folder: Path, steps: int, **more: Any) -> None:
    chosen = sessions.settings(evaluations=4, **more)
    with (
        sessions.session(
            corpus, folder, chosen, reporter=sessions.acting_reporter(steps, sessions.interrupt)
        ) as training,
        pytest.raises(Interrupted),
    ):
        training.run()


def go_on(corpus: Path, folder: Path) -> tuple[str, list[str]]:
    """Train to the end; return what was said and the notes."""
    said = io.StringIO()
    with sessions.session(
        corpus, folder, sessions.settings(evaluations=4), reporter=Reporter(Console(file=said, width=300))
    ) as training:
        training.run()
        training.session.export(folder / "model")
        return said.getvalue(), training.notes()


@pytest.mark.parametrize("steps", [1, 4, 6])  # the fourth has a checkpoint of its own
def test_an_interruption_loses_nothing(corpus: Path, straight: Path, tmp_path: Path, steps: int) -> None:
    stop_after(corpus, tmp_path, steps)
    assert (tmp_path / "checkpoints" / f"{steps:08d}").is_dir()
    said, notes = go_on(corpus, tmp_path)
    assert f"going on from the checkpoint of step {steps} of 12" in said
    assert sessions.same(tmp_path, straight)
    assert not rows(tmp_path, "again/")
    assert "steps skipped: 0; steps done again after an interruption: 0" in notes


def damage(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("masters", "states"), [("float32", "8bit"), ("float32", "cpu"), ("none", "float32"), ("none", "8bit")]
)
def test_what_is_rounded_at_random_goes_on_bit_for_bit(corpus: Path, tmp_path: Path, masters: str, states: str) -> None:
    chosen = sessions.settings(optimiser={"lr": 3e-3, "masters": masters, "states": states}, dtype="bfloat16")
    for name, stops in (("straight", [0]), ("stopped", [6, 0])):
        for stop in stops:
            reporter = sessions.acting_reporter(stop, sessions.interrupt)
            with sessions.session(corpus, tmp_path / name, chosen, reporter=reporter) as training:
                assert training.session.model.dtype == (torch.bfloat16 if masters == "none" else torch.float32)
                if stop:
                    with pytest.raises(Interrupted):
                        training.run()
                    continue
                training.run()
                training.session.export(tmp_path / name / "model")
    assert sessions.same(tmp_path / "straight", tmp_path / "stopped")
    losses = sessions.losses(tmp_path / "straight")
    assert losses[-1] < losses[0] - 0.5


def test_a_damaged_checkpoint_is_passed_over(corpus: Path, straight: Path, tmp_path: Path) -> None:
    stop_after(corpus, tmp_path, 6)
    damage(tmp_path / "checkpoints" / "00000006")
    said, notes = go_on(corpus, tmp_path)
    assert "the checkpoint of step 6 is damaged" in said
    assert "going on from the checkpoint of step 4 of 12" in said
    assert sessions.same(tmp_path, straight)
    assert [key for key in rows(tmp_path, "again/") if "/train/" in key] == [
        "0002/train/00000005",
        "0002/train/00000006",
    ]
    assert "steps skipped: 0; steps done again after an interruption: 2" in notes


def test_with_all_checkpoints_damaged_it_starts_anew(corpus: Path, straight: Path, tmp_path: Path) -> None:
    stop_after(corpus, tmp_path, 6)
    damage(tmp_path / "checkpoints" / "00000004")
    damage(tmp_path / "checkpoints" / "00000006")
    said, _ = go_on(corpus, tmp_path)
    assert "training starts anew" in said
    assert sessions.same(tmp_path, straight)


def test_a_split_chosen_by_free_memory_is_kept(corpus: Path, tmp_path: Path) -> None:
    chosen = sessions.settings(micro=0)
    with sessions.session(
        corpus, tmp_path, chosen, reporter=sessions.acting_reporter(5, sessions.interrupt)
    ) as training:
        assert training.session.micro == 8
        training.session.micro = training.session.loop.micro = 2  # as if there had been less
        with pytest.raises(Interrupted):
            training.run()
    with sessions.session(corpus, tmp_path, chosen) as training:
        training.run()
        assert training.session.loop.micro == 2
        assert training.session.guard.state()["recent"]["loss"] == sessions.losses(tmp_path)  # of both sessions
    (tmp_path / "small").mkdir()
    with sessions.session(corpus, tmp_path / "small", sessions.settings(micro=2)) as training:
        training.run()
    assert sessions.losses(tmp_path) == sessions.losses(tmp_path / "small")


def test_it_is_measured_before_on_the_way_and_after(corpus: Path, straight: Path, tmp_path: Path) -> None:
    found = rows(straight, "eval/")
    assert list(found) == ["00000000", "00000002", "00000003", "00000004", "00000008", "after"]
    bits = [row["bits_per_byte"]["code"] for row in found.values()]
    assert bits[-1] < 0.9 * bits[0]
    with sessions.session(corpus, tmp_path, sessions.settings(evaluations=4)) as training:
        results = training.run()
    before, after = (results[when]["code"] for when in ("before", "after"))
    untouched = sessions.fresh_model().eval()
    isolate(untouched, "auto")
    expected = sessions.evaluate(corpus, lambda given: NextToken(untouched).nats(untouched, given))["code"]
    assert np.array_equal(before.nats, expected.nats)
    assert (before.per_byte, after.per_byte) == (bits[0], bits[-1])


def test_measurements_are_taken_mostly_early() -> None:
    assert measuring_steps(1000, 0) == set()
    assert measuring_steps(1000, 6) == {250, 500, 750, 125, 62}
    assert measuring_steps(4, 12) == {1, 2, 3}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_measured_last_is_what_is_handed_over(corpus: Path, tmp_path: Path, family: str, dtype: str) -> None:
    model = sessions.fresh_model(family)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.add_(torch.linspace(0, 1e-3, len(buffer)) + 1)  # what bf16 would round away
    chosen = sessions.settings(tokens=3 * TOKENS, dtype=dtype)
    with sessions.session(corpus, tmp_path, chosen, model=model) as training:
        after = training.run()["after"]["code"]
        training.session.export(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not model.config.tie_word_embeddings)  # noqa: SIM118
        found = {file.get_tensor(name).dtype for name in file.keys() if "correction" not in name}  # noqa: SIM118
        assert found == {getattr(torch, dtype)}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == loaded.config.dtype == getattr(torch, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    isolate(loaded, "auto")
    measured = sessions.evaluate(corpus, partial(NextToken(loaded).nats, loaded))["code"]
    assert np.array_equal(measured.nats, after.nats)


def opened(corpus: Path, folder: Path, **more: Any) -> TrainingRun:
    with sessions.session(corpus, folder, sessions.settings(**more.pop("changes", {})), **more) as training:
        return training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_base_weights_are_refused(corpus: Path, tmp_path: Path, value: float) -> None:
    model = sessions.fresh_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(
        UserError,
        match=r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are not finite; fetch the base again",
    ):
        opened(corpus, tmp_path, model=model)


def test_a_model_that_computes_no_numbers_is_refused(corpus: Path, tmp_path: Path) -> None:
    training = opened(corpus, tmp_path)
    with torch.no_grad():
        training.session.model.model.norm.weight.fill_(3e38)  # finite, and yet
    with pytest.raises(UserError, match=r"^measured after step 0, 'code' has no finite bits per byte"):
        training.run()


def test_a_mask_that_hides_everything_is_refused(corpus: Path, tmp_path: Path) -> None:
    def hidden(batch: Any) -> Any:
        return replace(batch, learnt=np.zeros(batch.tokens.shape, bool))

    with sessions.session(
        corpus, tmp_path, sessions.settings(), wrap=lambda plain: sessions.Wrapped(plain, hidden)
    ) as training:
        with pytest.raises(UserError, match="step 1: the batch has no token to train on; its mask hides every one"):
            training.run()
        assert all(
            torch.equal(weight, sessions.tiny_model().get_parameter(name))
            for name, weight in training.session.model.named_parameters()
        )


def some_rows(corpus: Path) -> Any:
    plain = Corpus.open(corpus)
    return rows_of(plain.read([plain.splits["train"]["a"][index] for index in range(8)]))


def gradients(training: TrainingRun, given: Any) -> Iterator[torch.Tensor]:
    loop = training.session.loop
    loop.root(loop.objective.loss, given).sum.backward()
    return (weight.grad for weight in training.session.weights.masters.values())


@pytest.mark.parametrize("way", ["documents", "sdpa"])
def test_recomputing_gives_the_same_gradients(corpus: Path, tmp_path: Path, way: str) -> None:
    found, passes = [], []
    for recompute in (False, True):
        config = tiny.config_of("llama")
        config.attention_dropout = 0.5  # which stays off
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(sessions.tiny_model().state_dict())
        calls: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        changes = {"recompute": recompute, "attention": way}
        training = opened(corpus, tmp_path / str(recompute), model=model, changes=changes)
        calls.clear()
        found.append(list(gradients(training, some_rows(corpus))))
        passes.append(len(calls))
    assert passes == [1, 2]
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_training_learns(straight: Path) -> None:
    found = sessions.losses(straight)
    assert found[-1] < found[0] - 0.5


def test_a_large_model_is_saved_in_several_files(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LARGEST_FILE", "20KB")
    with sessions.session(corpus, tmp_path, sessions.settings(dtype="bfloat16")) as training:
        training.session.settle()
        training.session.export(tmp_path / "model")
        expected = sessions.weights(training.session.model)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    assert {file.name for file in files} == set(
        read_json(tmp_path / "model" / "model.safetensors.index.json")["weight_map"].values()
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, expected[name]), name
