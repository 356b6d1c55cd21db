"""New weights take effect between two steps, wholly or not at all, and every token says which wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.errors import UserError
from etude.inference.policy import Completion, Sampling
from tests.inference.engines import (
    assert_all_returned,
    assert_greedy,
    complete,
    engine_of,
    greedy,
    model_of,
    one_thread,  # noqa: F401
    prompts_of,
)

GREEDY = Sampling(20, temperature=0)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.inference_mode()  # type: ignore[untyped-decorator]
def by_hand(models: list[Any], prompt: list[int], each: list[int]) -> list[int]:
    """Write greedily on transformers' own cache, as many tokens with each model, and compute nothing twice."""
    cache, tokens, written = None, prompt, list[int]()
    for model, count in zip(models, each, strict=True):
        for _ in range(count):
            out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            cache, tokens = out.past_key_values, [int(out.logits[0, -1].argmax())]
            written += tokens
    return written


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("page", [None, 16])
def test_running_requests_go_on_with_new_weights_from_the_next_step(page: int | None, late: int) -> None:
    old, new = model_of(), model_of(seed=1)
    engine = engine_of(old, page=page, late=late)
    prompts, ends = prompts_of(5, 30), list[list[Any]]([[], []])
    for prompt, end in zip(prompts, ends, strict=True):
        engine.submit(prompt, GREEDY, None, end.append)
    for _ in range(6):
        engine.step()
    engine.update(weights_of(new), 4)
    while engine.busy():
        engine.step()
    for prompt, (done,) in zip(prompts, ends, strict=True):
        assert isinstance(done, Completion)
        assert done.versions == [0] * 7 + [4] * 13  # the first step reads the prompt and writes two
        assert done.token_ids == by_hand([old, new], prompt, [7, 13])
        assert done.token_ids != by_hand([old], prompt, [20])
    assert_all_returned(engine)


@pytest.mark.parametrize("page", [None, 16])
def test_what_old_weights_computed_is_not_used_by_new_requests(page: int | None) -> None:
    new = model_of(seed=1)
    engine, prompt = engine_of(model_of(), page=page), prompts_of(60)[0]
    first = [complete(engine, [prompt], GREEDY)[0].cached for _ in range(2)]
    running: list[Any] = []
    engine.submit(prompt, GREEDY, None, running.append)
    engine.step()
    engine.update(weights_of(new), 1)
    after = [complete(engine, [prompt], GREEDY)[0] for _ in range(2)]
    assert running
    assert first[0] == after[0].cached == 0
    assert first[1] == after[1].cached > 40
    for done in after:
        assert_greedy(new, prompt, done)
        assert done.versions == [1] * 20
    assert_all_returned(engine)


def test_a_prompt_half_read_is_finished_with_the_new_weights() -> None:
    new, prompt, box = model_of(seed=1), prompts_of(60)[0], list[Any]()
    engine = engine_of(model_of(), page=16, chunk=16)
    engine.submit(prompt, GREEDY, None, box.append)
    engine.step()
    engine.update(weights_of(new), 1)
    assert_greedy(new, prompt, complete(engine, [prompt], GREEDY)[0])  # nothing of the old one's pages
    assert box[0].versions == [1] * 20


def broken(name: str) -> dict[str, torch.Tensor]:
    weights = weights_of(model_of(seed=1))
    last = list(weights)[-1]  # all others are fine, and come first
    if name == "shape":
        weights[last] = weights[last][:-1]
    elif name == "unknown":
        weights["model.layers.7.mlp.up_proj.weight"] = weights[last]
    else:
        weights[last] = weights[last].clone()
        weights[last].view(-1)[-1] = float(name)
    return weights


@pytest.mark.parametrize(
    ("name", "says"),
    [("shape", "another shape"), ("unknown", r"model.layers.7.mlp.up_proj.weight"), ("nan", "damaged"), ("inf", "damaged")],
)  # fmt: skip
def test_weights_that_do_not_fit_change_nothing(name: str, says: str) -> None:
    engine, prompt, box = engine_of(model_of()), prompts_of(9)[0], list[Any]()
    engine.submit(prompt, GREEDY, None, box.append)
    engine.step()
    before = weights_of(engine.runner.model)
    with pytest.raises(UserError, match=says) as refused:
        engine.update(broken(name), 1)
    assert "\n" not in str(refused.value)
    assert all(torch.equal(value, before[key]) for key, value in engine.runner.model.state_dict().items())
    while engine.busy():
        engine.step()
    assert box[0].token_ids == greedy(model_of(), prompt, 20)
    assert set(box[0].versions) == {0}


def test_versions_rise() -> None:
    engine = engine_of(model_of())
    engine.update({}, 3)
    for version in (3, 2):
        with pytest.raises(UserError, match="versions must rise"):
            engine.update({}, version)
    assert engine.version == 3


def test_part_of_the_weights_can_be_sent_and_what_balances_a_router_too() -> None:
    old, new = model_of("deepseek_v3"), model_of("deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    new.state_dict()[name].normal_(0, 3)
    engine, prompt = engine_of(old), prompts_of(30)[0]
    engine.update({name: new.state_dict()[name]}, 1)
    done = complete(engine, [prompt], GREEDY)[0]
    assert_greedy(new, prompt, done)
    assert done.token_ids != greedy(old, prompt, 20)


def test_weights_are_changed_in_place() -> None:
    engine = engine_of(model_of())
    places = {name: tensor.data_ptr() for name, tensor in engine.runner.model.state_dict().items()}
    engine.update(weights_of(model_of(seed=1)), 1)
    assert {name: tensor.data_ptr() for name, tensor in engine.runner.model.state_dict().items()} == places


def adapter(model: Any, name: str, seed: int) -> dict[str, torch.Tensor]:
    random, (rows, columns) = torch.Generator().manual_seed(seed), model.get_parameter(name).shape
    return {
        f"{name}.lora_A": torch.randn(3, columns, generator=random) * 0.1,
        f"{name}.lora_B": torch.randn(rows, 3, generator=random) * 0.1,
    }


def test_an_adapter_is_added_to_the_base_and_not_to_the_adapter_before() -> None:
    name, model = "model.layers.0.mlp.down_proj.weight", model_of()
    base = model.get_parameter(name).detach().clone()
    runner = engine_of(model).runner
    for seed in (0, 1, 2):
        runner.replace(new := adapter(model, name, seed))
        expected = base.double() + new[f"{name}.lora_B"].double() @ new[f"{name}.lora_A"].double()
        torch.testing.assert_close(runner.model.get_parameter(name).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["lora_A", "lora_B", "name", "half"])
def test_an_adapter_of_another_base_is_refused_and_nothing_changed(change: str) -> None:
    name, model = "model.layers.0.mlp.down_proj.weight", model_of()
    runner = engine_of(model).runner
    before = weights_of(runner.model)
    new = adapter(model, name, 0)
    if change == "name":
        new = {key.replace("layers.0", "layers.77"): value for key, value in new.items()}
    elif change == "half":
        del new[f"{name}.lora_B"]
    else:
        new[f"{name}.{change}"] = torch.zeros(5, 5)
    with pytest.raises(UserError, match=r"another (model|shape)"):
        runner.replace({**adapter(model, name.replace("layers.0", "layers.1"), 0), **new})
    assert all(torch.equal(before[key], value) for key, value in runner.model.state_dict().items())
