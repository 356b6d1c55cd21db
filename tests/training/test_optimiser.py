"""Optimisers against torch's own, what decays and what does not, their state, and the float32 masters of a bf16 model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from etude.errors import UserError
from etude.training.optimiser import MixedWeights, Muon, Optimiser, Weights, orthogonalise
from etude.training.settings import OptimiserSettings
from tests.training import sessions

SHAPES = [(16, 16), (48, 16), (16, 48), (16, 48), (5, 7)]


def matrices(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]


def give_gradients(weights: Any, seed: int) -> None:
    """Give weights the same gradients, whatever their order and precision."""
    for weight in weights:
        generator = torch.Generator().manual_seed(seed + weight.numel())
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_muon_is_torchs(decay: float) -> None:
    ours, theirs, start = matrices(), matrices(), matrices()
    mine = Muon(ours, lr=0.02, weight_decay=decay, momentum=0.9)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=decay, momentum=0.9, nesterov=True, ns_steps=5,
                             adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        other.step()
    for left, right, before in zip(ours, theirs, start, strict=True):
        moved = (right - before).norm()
        assert (left - right).norm() < 0.02 * moved  # both work in bf16, and add in another order
        assert moved > 0.05


def test_an_orthogonalised_matrix_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in [(3, 8, 24), (2, 24, 8), (2, 4, 8, 16)]:  # the last: stacks of experts
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.3
    assert not orthogonalise(torch.zeros(1, 4, 4)).isnan().any()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adamw_is_torchs_and_only_matrices_decay(family: str) -> None:
    ours, theirs = sessions.fresh_model(family), sessions.fresh_model(family)
    settings = OptimiserSettings(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    mine = Optimiser(Weights(ours).masters, settings)
    decaying: list[Any] = []
    rest: list[Any] = []
    for name, weight in theirs.named_parameters():
        in_matrix = any(part in name for part in ("_proj", "mlp.gate"))
        (decaying if in_matrix else rest).append(weight)
    assert {weight.ndim for weight in rest} == {1, 2}  # norms; embedding and head
    kinds = {2} if family == "llama" else {2, 3}  # experts lie in one tensor
    assert {weight.ndim for weight in decaying} == kinds
    groups = [{"params": decaying, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for step in range(3):
        for model in (ours, theirs):
            give_gradients(model.parameters(), step)
        for group in other.param_groups:
            group["lr"] = 1e-2 * (1 - step / 4)
        mine.set_rate(1 - step / 4)
        mine.update()
        other.step()
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-6, atol=1e-7), name  # fused kernels round otherwise


def test_with_muon_the_rest_has_adamw_and_its_own_rate() -> None:
    ours, theirs = sessions.fresh_model(), sessions.fresh_model()
    settings = OptimiserSettings(name="muon", lr=0.02, other_lr=0.003, weight_decay=0.1, momentum=0.9)
    mine = Optimiser(Weights(ours).masters, settings)
    inner = [weight for name, weight in theirs.named_parameters() if "_proj" in name]
    rest = [weight for name, weight in theirs.named_parameters() if "_proj" not in name]
    others = [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(3):
        for model in (ours, theirs):
            give_gradients(model.parameters(), step)
        mine.set_rate(1.0)
        mine.update()
        for other in others:
            other.step()
    start = dict(sessions.tiny_model().named_parameters())
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        tolerance = 0.02 * float((right - start[name]).detach().norm()) if "_proj" in name else 1e-6
        assert float((left - right).detach().norm()) <= tolerance, name


def test_gpt2_has_no_decay_on_its_embeddings() -> None:
    """A family whose embeddings are called otherwise."""
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    before = sessions.weights(model)
    optimiser = Optimiser(Weights(model).masters, OptimiserSettings(lr=0.1, weight_decay=1.0))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimiser.set_rate(1.0)
    optimiser.update()
    decayed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    wanted = {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
    assert decayed == {f"transformer.h.0.{name}" for name in wanted}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_loaded_state_goes_on_bit_for_bit(name: Any) -> None:
    settings = OptimiserSettings(name=name, lr=1e-2)
    straight, resumed = sessions.fresh_model(), sessions.fresh_model()
    one, two = Optimiser(Weights(straight).masters, settings), Optimiser(Weights(resumed).masters, settings)
    for step in range(3):
        give_gradients(straight.parameters(), step)
        one.set_rate(1.0)
        one.update()
    saved = {key: value.clone() for key, value in one.tensors().items()}
    resumed.load_state_dict(straight.state_dict())
    two.load(saved)
    assert {key: value.tolist() for key, value in two.tensors().items()} == {k: v.tolist() for k, v in saved.items()}
    for step in range(3, 6):
        for model, optimiser in ((straight, one), (resumed, two)):
            give_gradients(model.parameters(), step)
            optimiser.set_rate(0.5)
            optimiser.update()
    for (key, left), right in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right), key


def test_muon_is_refused_where_it_cannot_work() -> None:
    settings = OptimiserSettings(name="muon")
    with pytest.raises(UserError, match='cannot be used on several ranks; use "adamw"'):
        Optimiser(Weights(sessions.fresh_model()).masters, settings, sharded=True)
    with pytest.raises(UserError, match='no matrices that it could train; use "adamw"'):
        Optimiser({"norm.weight": torch.ones(4)}, settings)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("kind", [Weights, MixedWeights])
def test_a_weight_that_took_no_part_is_left_alone(name: Any, kind: type[Weights]) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(8, 8), "idle": torch.nn.Linear(8, 4)})
    weights = kind(model)
    optimiser = Optimiser(weights.masters, OptimiserSettings(name=name, lr=0.1, weight_decay=0.0))
    before = sessions.weights(model)
    for _ in range(2):
        model["used"](torch.ones(2, 8, dtype=model["used"].weight.dtype)).sum().backward()
        weights.collect()
        optimiser.set_rate(1.0)
        optimiser.update()
        weights.publish()
    for key, weight in model.named_parameters():
        assert torch.equal(weight, before[key]) == key.startswith("idle"), key


def test_masters_keep_what_bf16_would_lose() -> None:
    model = sessions.fresh_model()
    exact = sessions.weights(model)
    weights = MixedWeights(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {master.dtype for master in weights.masters.values()} == {torch.float32}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(torch.equal(master, exact[name]) for name, master in weights.masters.items())
    rounded = sessions.weights(model)
    step, name = 1e-6, "model.norm.weight"  # from 1.0 the next number in bf16 is 0.996
    for index in range(4000):
        with torch.no_grad():
            weights.masters[name] -= step
        if index == 999:
            weights.publish()
            assert torch.equal(model.get_parameter(name), rounded[name])  # not yet to be seen, but not lost
    weights.publish()
    assert torch.allclose(weights.masters[name], exact[name] - 4000 * step, atol=1e-4)
    assert torch.equal(model.get_parameter(name), torch.full_like(rounded[name], 0.99609375))


def test_gradients_of_many_parts_are_added_in_float32() -> None:
    model = sessions.fresh_model()
    weights = MixedWeights(model)
    computed = dict(model.named_parameters())
    parts = [1.0, *[0.001] * 100]  # in bf16, 1 + 0.001 is 1
    for part in parts:
        for weight in computed.values():
            weight.grad = torch.full_like(weight, part)
        weights.collect()
        assert all(weight.grad is None for weight in computed.values())
    expected = 1.0 + 100 * float(torch.tensor(0.001, dtype=torch.bfloat16))
    for master in weights.masters.values():
        assert master.grad.dtype == torch.float32
        assert torch.allclose(master.grad, torch.tensor(expected), atol=1e-5)
    held = {name: master.grad for name, master in weights.masters.items()}
    weights.publish()
    for name, master in weights.masters.items():
        assert master.grad is held[name]  # cleared, not let go: no memory is asked for again
        assert not master.grad.any()


@pytest.mark.parametrize("kind", [Weights, MixedWeights])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_leaves_what_will_be_saved(kind: type[Weights], dtype: torch.dtype) -> None:
    model = sessions.fresh_model()
    exact = sessions.weights(model)
    weights = kind(model)
    weights.round_to(dtype)
    for name, master in weights.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master, exact[name].to(dtype).float())
        assert torch.equal(model.get_parameter(name).float(), master.to(model.get_parameter(name).dtype).float())
