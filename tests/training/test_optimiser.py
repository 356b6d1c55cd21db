"""Optimisers against torch's own, what decays and what does not, their state, and the float32 masters of a bf16 model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from etude.errors import UserError
from etude.training.optimiser import (
    MixedWeights,
    Muon,
    Optimiser,
    Weights,
    _decode,
    _encode,
    code_book,
    orthogonalise,
    round_at_random,
)
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


def compact(states: str, masters: str = "float32", **more: Any) -> OptimiserSettings:
    return OptimiserSettings.model_validate(
        {"lr": 1e-2, "weight_decay": 0.3, "states": states, "masters": masters, **more}
    )


def trained(
    weights: dict[str, torch.Tensor], settings: OptimiserSettings, steps: int, seed: int = 0, *, compiled: bool = False
) -> dict[str, torch.Tensor]:
    """Take steps with gradients that are the same in any precision."""
    mine = Optimiser(weights, settings, compiled=compiled)
    for step in range(steps):
        give_gradients(weights.values(), 100 * seed + step)
        mine.update()
    return mine.tensors()


def one_of_each(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"a_proj": (96, 512), "experts": (4, 24, 192), "norm": (64,), "odd": (70, 70)}
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


@pytest.mark.parametrize("compiled", [False, True])
def test_states_in_main_memory_are_torchs_adamw(*, compiled: bool) -> None:
    ours, theirs = one_of_each(torch.float32), one_of_each(torch.float32)
    trained(ours, compact("cpu"), 5, compiled=compiled)
    trained(theirs, compact("float32"), 5)
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=1e-6, atol=1e-7), name


def test_states_of_8_bits_take_a_quarter_and_move_weights_alike() -> None:
    ours, exact, start = one_of_each(torch.float32), one_of_each(torch.float32), one_of_each(torch.float32)
    state = trained(ours, compact("8bit"), 30)
    full = trained(exact, compact("float32"), 30)
    assert state["a_proj:first"].dtype == state["experts:second"].dtype == torch.uint8
    assert state["norm:first"].dtype == state["odd:second"].dtype == torch.float32  # few, or no block divides a row
    for name in ("a_proj", "experts"):
        size = sum(value.nbytes for key, value in state.items() if key.startswith(name))
        assert size < 0.28 * sum(value.nbytes for key, value in full.items() if key.startswith(name))
        moved = (exact[name] - start[name]).norm()
        assert 0 < (ours[name] - exact[name]).norm() < 0.05 * moved, name
    for name in ("norm", "odd"):
        assert torch.allclose(ours[name], exact[name], rtol=1e-6, atol=1e-7)


def test_codes_are_unbiased_and_a_slow_average_moves() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(8, 256) * torch.logspace(-4, 3, 8)[:, None]
    for signed in (True, False):
        values, scales = numbers if signed else numbers.abs(), torch.empty(8, 1)
        book = code_book(signed=signed, device=torch.device("cpu"))
        draws = [_decode(_encode(values, scales, book), scales, book) for _ in range(400)]
        assert torch.equal(scales[:, 0], values.abs().amax(1))
        assert (len(book), float(book[0]), float(book[-1])) == (256, -1.0 if signed else 0.0, 1.0)
        place = torch.searchsorted(book, values / scales).clamp(1, 255)
        gap = (book[place] - book[place - 1]) * scales
        assert ((torch.stack(draws) - values).abs() <= gap * 1.001).all()  # one of the two codes beside it
        error = (torch.stack(draws).mean(0) - values).abs()
        assert (error <= 5 * gap / 2 / 20).all()  # five deviations, at most, of a mean of 400
    moment, scale = torch.cat([torch.full((1, 255), 0.5), torch.ones(1, 1)], 1), torch.empty(1, 1)
    for _ in range(700):  # by a thousandth of itself each time: less than half a code
        moment = _decode(_encode(moment, scale, book), scale, book) * torch.tensor([0.999] * 255 + [1.0])
    assert float(moment[0, :255].mean()) == pytest.approx(0.5 * 0.999**700, rel=0.02)


def test_rounding_at_random_is_to_a_neighbour_and_right_on_average() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(512).float()
    below = (numbers.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = ((numbers.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    draws = torch.stack([round_at_random(numbers).float() for _ in range(1000)])
    assert ((draws == below) | (draws == above)).all()
    step = (above - below).abs()
    assert ((draws.mean(0) - numbers).abs() < 5 * step / 2 / 1000**0.5).all()
    kept = numbers.bfloat16()
    assert torch.equal(round_at_random(kept.float()), kept)  # what is bf16 stays


def test_without_masters_weights_move_on_average_as_in_float64() -> None:
    """A weight of 1 and updates of a 40th of its rounding step: to the nearest, it would never move."""
    weight = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    oracle = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.float64))
    settings = compact("float32", "none", lr=1e-4, weight_decay=0.0)
    other = torch.optim.AdamW([oracle], lr=1e-4, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    torch.manual_seed(0)
    mine = Optimiser({"a_proj": weight}, settings)
    for _ in range(60):
        gradient = torch.randn(64, 256) + 1
        weight.grad, oracle.grad = gradient.bfloat16(), gradient.double()
        mine.update()
        other.step()
    moved = 1 - oracle.detach().mean()
    assert moved > 3e-3
    deviation = float((weight.detach().float() - oracle.detach().float()).std()) / (64 * 256) ** 0.5
    assert float(1 - weight.detach().float().mean()) == pytest.approx(
        float(moved), abs=5 * deviation + 0.01 * float(moved)
    )
    nearest = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    nearest.grad = torch.ones_like(nearest)
    torch.optim.AdamW([nearest], lr=1e-4, weight_decay=0.0).step()
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_muon_refuses_what_only_adamw_has() -> None:
    for wrong in ({"states": "8bit"}, {"states": "cpu"}, {"masters": "none"}):
        with pytest.raises(ValueError, match="muon keeps float32 masters and states"):
            OptimiserSettings.model_validate({"name": "muon", **wrong})
