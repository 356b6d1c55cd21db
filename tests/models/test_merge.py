"""Merging against its published definitions, worked out number by number; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from etude.errors import UserError
from etude.models.merge import (
    MergeSettings,
    Tensors,
    linear,
    merging,
    refuse_unlike,
    slerp,
    task_arithmetic,
    ties,
    trim_threshold,
    write_merged,
)
from tests import tiny

NUMBERS = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


def folder_of(place: Path, *files: dict[str, torch.Tensor]) -> Path:
    """Write tensors as a model's folder, a file each, without a model that belongs to them."""
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    names = [f"model-{index}.safetensors" for index in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, place / name)
    listed = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return place


def top_only(values: list[float], density: float) -> list[float]:
    """Trim as the paper does: keep the largest of all numbers of the model, and what equals the least of them."""
    least = sorted(map(abs, values), reverse=True)[max(1, round(density * len(values))) - 1]
    return [value if abs(value) >= least else 0.0 for value in values]


def ties_by_hand(base: list[float], models: list[list[float]], scale: float, density: float) -> list[float]:
    """Algorithm 1 of arXiv 2306.01708, one parameter at a time."""
    trimmed = [top_only([a - b for a, b in zip(model, base, strict=True)], density) for model in models]
    merged = []
    for start, *column in zip(base, *trimmed, strict=True):
        mass = sum(column)
        kept = [value for value in column if value * mass > 0]
        merged.append(start + scale * (sum(kept) / len(kept) if kept else 0.0))
    return merged


@given(NUMBERS, NUMBERS, st.floats(0.1, 5), st.floats(0.1, 5))
def test_linear_is_the_weighted_mean(one: list[float], two: list[float], first: float, second: float) -> None:
    found = linear([torch.tensor(one), torch.tensor(two)], [first, second]).tolist()
    expected = [(first * a + second * b) / (first + second) for a, b in zip(one, two, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_slerp_turns_by_its_share_of_the_angle(share: float) -> None:
    angle = 1.1
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    two = torch.tensor([[math.cos(angle), math.sin(angle)], [0.0, 0.0]])
    turned = [[math.cos(share * angle), math.sin(share * angle)], [0.0, 0.0]]
    assert torch.allclose(slerp(one, two, share), torch.tensor(turned), atol=1e-6)


def test_slerp_of_nearly_parallel_tensors_is_a_straight_line() -> None:
    one = torch.tensor([3.0, 4.0])
    assert slerp(one, 2 * one, 0.25).tolist() == pytest.approx([3.75, 5.0])
    assert slerp(one, -one, 0.5).tolist() == pytest.approx([0.0, 0.0])  # no arc is shorter than another
    assert slerp(torch.zeros(2), one, 0.5).tolist() == pytest.approx([1.5 * 2**0.5, 2 * 2**0.5])


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(-2, 2))
def test_task_arithmetic_adds_what_was_learnt(
    base: list[float], one: list[float], two: list[float], scale: float
) -> None:
    found = task_arithmetic(torch.tensor(base), [torch.tensor(one), torch.tensor(two)], [1.0, -0.5], scale).tolist()
    expected = [c + scale * ((a - c) - 0.5 * (b - c)) for a, b, c in zip(one, two, base, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


@given(st.data(), st.sampled_from([0.2, 0.5, 1.0]), st.integers(1, 3))
def test_ties_is_the_published_algorithm(data: st.DataObject, density: float, count: int) -> None:
    whole = st.lists(st.integers(-9, 9).map(float), min_size=10, max_size=10)  # sums are exact, and cancel often
    base, models = data.draw(whole), [data.draw(whole) for _ in range(count)]
    learnt = [[a - b for a, b in zip(model, base, strict=True)] for model in models]
    least = [min(abs(x) for x in top_only(each, density) if x or not any(top_only(each, density))) for each in learnt]
    found = ties(torch.tensor(base), [torch.tensor(model) for model in models], [1.0] * count, 0.5, least)
    assert found.tolist() == pytest.approx(ties_by_hand(base, models, 0.5, density), abs=1e-5)


def test_weights_of_ties_count_in_the_vote_and_in_the_mean() -> None:
    models = [torch.tensor([1.0, 1.0]), torch.tensor([-2.0, 4.0]), torch.tensor([0.5, 0.0])]
    found = ties(torch.zeros(2), models, [3.0, 1.0, 1.0], 1.0, [0.0, 0.0, 0.0])
    assert found.tolist() == [(3 * 1.0 + 0.5) / 4, (3 * 1.0 + 4.0) / 4]  # 0 agrees with neither sign


@settings(max_examples=30)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=40), st.floats(0.01, 1))
def test_the_threshold_is_that_of_sorting_the_whole_model(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], density: float
) -> None:
    place = tmp_path_factory.mktemp("threshold")
    learnt, half = torch.tensor(values), len(values) // 2
    files = [{"a": learnt[:half]}, {"b": learnt[half:], "c": torch.zeros(3)}]
    model = folder_of(place / "model", *files)
    zero = folder_of(place / "zero", *({name: torch.zeros_like(each) for name, each in file.items()} for file in files))
    ordered = sorted([*map(abs, learnt.tolist()), 0.0, 0.0, 0.0], reverse=True)
    expected = ordered[max(1, round(density * len(ordered))) - 1]
    assert trim_threshold(Tensors(model), Tensors(zero), density) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merged_model_is_rounded_once_and_laid_out_as_the_first(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one, two = ({"w": torch.randn(5, 3), "scalar": torch.randn(()), "none": torch.empty(0, 2)} for _ in range(2))
    first = folder_of(tmp_path / "one", {name: each.to(dtype) for name, each in one.items()}, {"z": torch.ones(2)})
    second = folder_of(tmp_path / "two", two | {"z": torch.zeros(2)})  # sharded otherwise, and in float32
    opened = [Tensors(first), Tensors(second)]
    made = merging(MergeSettings(method="linear", others=["two"], weights=[0.3, 0.7]), opened)
    for file in opened[0].files:
        write_merged(file, tmp_path / "out" / file.name, made)
    found = load_file(tmp_path / "out/model-0.safetensors")
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(one, dtype)
    for name in one:
        expected = (one[name].to(dtype).float() * 0.3 + two[name] * 0.7) / (0.3 + 0.7)
        assert torch.equal(found[name], expected.to(dtype))
    assert load_file(tmp_path / "out/model-1.safetensors")["z"].tolist() == pytest.approx([0.3, 0.3])


def test_ties_of_whole_models_is_the_published_algorithm(tmp_path: Path) -> None:
    folders = [tiny.save_model(tmp_path / str(seed), seed=seed) for seed in range(3)]
    states = [load_file(folder / "model.safetensors") for folder in folders]
    flat = [torch.cat([state[name].flatten() for name in state]).double().tolist() for state in states]
    expected = ties_by_hand(flat[0], flat[1:], 1.0, 0.2)
    opened = [Tensors(folder) for folder in (folders[1], folders[2], folders[0])]
    made = merging(MergeSettings(method="ties", others=["2"], ancestor="0"), opened)
    write_merged(opened[0].files[0], folders[1] / "model.safetensors", made)
    model = AutoModelForCausalLM.from_pretrained(folders[1]).state_dict()
    found = torch.cat([model[name].flatten() for name in states[0]])
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lm_head.weight": torch.zeros(2)}, "has the tensor lm_head.weight"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has the shapes \[32\] and \[31\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is stored as I8"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, change: dict[str, torch.Tensor], told: str) -> None:
    one, two = (tiny.save_model(tmp_path / str(seed), seed=seed) for seed in range(2))
    save_file(load_file(two / "model.safetensors") | change, two / "model.safetensors")
    with pytest.raises(UserError, match=told):
        refuse_unlike(Tensors(one), Tensors(two))


def test_other_computation_and_other_tokens_are_refused_and_chat_templates_are_not(tmp_path: Path) -> None:
    one, two = (tiny.save_model(tmp_path / str(seed), seed=seed) for seed in range(2))
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "transformers_version": "4.0"}))
    (two / "chat_template.jinja").write_text("{{ messages }}")
    refuse_unlike(Tensors(one), Tensors(two))
    (two / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match=r"differ in rms_norm_eps: 1e-06 and 0\.001"):
        refuse_unlike(Tensors(one), Tensors(two))
    (two / "config.json").write_text(json.dumps(config))
    words = json.loads((two / "tokenizer.json").read_text())
    first, second, *_ = words["model"]["vocab"]
    vocabulary = words["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (two / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match="number the tokens differently"):
        refuse_unlike(Tensors(one), Tensors(two))


def test_numbers_too_large_for_the_dtype_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {"w": torch.tensor([6e4], dtype=torch.float16)})
    zero = folder_of(tmp_path / "zero", {"w": torch.tensor([1.0])})
    opened = [Tensors(one), Tensors(zero)]
    made = merging(MergeSettings(method="task_arithmetic", ancestor="zero", scale=2.0), opened)
    with pytest.raises(UserError, match="merged w has numbers that F16 cannot hold"):
        write_merged(opened[0].files[0], tmp_path / "out/model.safetensors", made)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"method": "linear"}, "nothing to merge with"),
        ({"method": "linear", "others": ["a"], "scale": 1.0}, "`scale` has no effect with linear"),
        ({"method": "slerp", "others": ["a"], "weights": [1.0, 1.0]}, "slerp goes from one model to another"),
        ({"method": "slerp", "others": ["a", "b"]}, "slerp goes from one model to another"),
        ({"method": "ties", "others": ["a"]}, "ties needs `ancestor`"),
        ({"method": "ties", "others": ["a"], "ancestor": "b", "weights": [1.0, -1.0]}, "only task_arithmetic"),
        ({"method": "linear", "others": ["a"], "weights": [1.0]}, "1 numbers for 2 models"),
        (
            {"method": "task_arithmetic", "ancestor": "b", "density": 0.5},
            "`density` has no effect with task_arithmetic",
        ),
    ],
)
def test_settings_without_effect_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MergeSettings.model_validate(wrong)
