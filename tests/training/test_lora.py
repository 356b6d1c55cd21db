"""LoRA, and the masters of a model that computes in bf16: what changes, what goes on, and what is handed over."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from etude.errors import Interrupted, UserError
from etude.training.attention import isolate
from etude.training.objectives.next_token import NextToken
from etude.training.optimiser import MixedWeights, Optimiser, Weights
from etude.training.session import Session
from etude.training.settings import LoraSettings
from tests.training import sessions

TOKENS = 8 * sessions.LENGTH  # of a step
ARGUMENTS: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
LORA = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sessions.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_changes_small_matrices_and_hands_over_their_sum(corpus: Path, tmp_path: Path, dtype: str) -> None:
    with sessions.session(corpus, tmp_path, sessions.settings(dtype=dtype), lora=LORA, seed=5) as training:
        before = sessions.weights(training.session.model)
        for _ in training.session.loop.steps(6):
            pass
        trained = sessions.weights(training.session.model)
        changed = {name for name in before if not torch.equal(before[name], trained[name])}
        assert changed == {name for name in before if ".lora_" in name}
        assert len(changed) == 2 * 7 * 2  # a pair for each of seven matrices in two layers
        training.session.settle()
        training.session.export(tmp_path / "model")
    peft_model = get_peft_model(sessions.fresh_model(), LoraConfig(**ARGUMENTS))
    peft_model.base_model.model.load_state_dict(trained, strict=False)
    merged = peft_model.merge_and_unload().eval()
    Weights(merged).round_to(getattr(torch, dtype))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert not any("lora" in name for name, _ in exported.named_parameters())
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, merged(ids).logits)
        assert (exported(ids).logits - sessions.fresh_model()(ids).logits).abs().max() > 0.01
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == getattr(torch, dtype)


def test_what_an_engine_is_sent_adds_up_to_what_peft_would_merge(corpus: Path, tmp_path: Path) -> None:
    with sessions.session(corpus, tmp_path, sessions.settings(), lora=LORA) as training:
        session = training.session
        for _ in session.loop.steps(4):
            pass
        before = sessions.weights(session.model)
        sent = session.computed_state()
        assert all(torch.equal(weight, before[name]) for name, weight in session.model.named_parameters())
        peft_model = get_peft_model(sessions.fresh_model(), LoraConfig(**ARGUMENTS))
        peft_model.base_model.model.load_state_dict(before, strict=False)  # without a tied one
        expected = peft_model.merge_and_unload().state_dict()
    base = sessions.fresh_model().state_dict()
    changed = {name for name, weight in expected.items() if not torch.equal(weight, base[name])}
    assert {name.partition(".weight.")[0] + ".weight" for name in sent} == changed
    for name in changed:
        whole = torch.addmm(base[name], sent[f"{name}.lora_B"], sent[f"{name}.lora_A"])
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-6)


def test_lora_goes_on_after_an_interruption(corpus: Path, tmp_path: Path) -> None:
    for name, steps in (("straight", 0), ("stopped", 6)):
        if steps:
            with sessions.session(corpus, tmp_path / name, sessions.settings(), lora=LORA, reporter=sessions.acting_reporter(steps, sessions.interrupt)) as training:  # fmt: skip
                assert (
                    sum(weight.numel() for weight in training.session.weights.masters.values()) < 5000
                )  # a small checkpoint
                with pytest.raises(Interrupted):
                    training.run()
        with sessions.session(corpus, tmp_path / name, sessions.settings(), lora=LORA) as training:
            after = training.run()["after"]["code"]
            training.session.export(tmp_path / name / "model")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").eval()
        isolate(loaded, "auto")
        found = sessions.evaluate(corpus, partial(NextToken(loaded).nats, loaded))["code"]
        assert np.array_equal(found.nats, after.nats)
    assert sessions.same(tmp_path / "straight", tmp_path / "stopped")


def compute_in_bf16(session: Session) -> None:
    """Make a session on a CPU what it is on a GPU."""
    session.weights = session.loop.weights = MixedWeights(session.model)
    session.optimiser = session.loop.optimiser = Optimiser(session.weights.masters, session.settings.optimiser)


@pytest.mark.parametrize(("dtype", "adapter"), [("float32", None), ("float32", LORA), ("bfloat16", LORA)])
def test_with_masters_it_goes_on_and_hands_over_all_their_precision(
    corpus: Path, tmp_path: Path, dtype: str, adapter: LoraSettings | None
) -> None:
    chosen = sessions.settings(dtype=dtype, tokens=4 * TOKENS)
    for name, stops in (("straight", [0]), ("stopped", [2, 0])):
        for stop in stops:
            with sessions.session(
                corpus,
                tmp_path / name,
                chosen,
                lora=adapter,
                reporter=sessions.acting_reporter(stop, sessions.interrupt),
            ) as training:
                compute_in_bf16(training.session)
                if stop:
                    with pytest.raises(Interrupted):
                        training.run()
                    continue
                after = training.run()["after"]["code"]
                training.session.export(tmp_path / name / "model")
    assert sessions.same(tmp_path / "straight", tmp_path / "stopped")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "model").eval()
    assert exported.dtype == getattr(torch, dtype)
    for name, weight in exported.named_parameters():
        if "_proj" in name:
            assert torch.equal(weight.float(), weight.bfloat16().float()) == (dtype == "bfloat16"), name
    isolate(exported, "auto")
    MixedWeights(exported)  # computes as the session did
    found = sessions.evaluate(corpus, partial(NextToken(exported).nats, exported))["code"]
    assert np.array_equal(found.nats, after.nats)


def on_cpu(corpus: Path, session: Session) -> Any:
    return sessions.evaluate(corpus, lambda given: session.nats(given.to(session.device)).cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_on_a_gpu_an_interrupted_training_goes_on(
    corpus: Path, tmp_path: Path, name: str, adapter: LoraSettings | None
) -> None:
    chosen = sessions.settings(device="cuda", compile="off", optimiser={"name": name, "lr": 3e-3})
    for folder, stops in ((tmp_path / "straight", [0]), (tmp_path / "stopped", [6, 0])):
        for stop in stops:
            with sessions.session(
                corpus, folder, chosen, lora=adapter, reporter=sessions.acting_reporter(stop, sessions.interrupt)
            ) as training:
                training.evaluate = partial(on_cpu, corpus)
                if stop:
                    with pytest.raises(Interrupted):
                        training.run()
                    continue
                training.run()
                training.session.export(folder / "model")
        AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sessions.losses(tmp_path / "stopped") == pytest.approx(sessions.losses(tmp_path / "straight"), rel=1e-3)


def test_lora_names_that_fit_nothing_are_refused(corpus: Path, tmp_path: Path) -> None:
    wrong = LoraSettings(targets=["no_such_layer"])
    refused = pytest.raises(UserError, match=r"^lora.targets \['no_such_layer'\] does not fit this model: ")
    with refused, sessions.session(corpus, tmp_path, sessions.settings(), lora=wrong):
        pass
