"""Experts in training: routers are transformers' own, balancing follows its rules, nothing is counted twice, and routes are replayed."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, LlamaConfig, MixtralConfig, OlmoeConfig

from etude.errors import Interrupted, UserError
from etude.jsonl import MetricsLog
from etude.training.batch import Rows, piece_bounds
from etude.training.distributed import World
from etude.training.experts import BINS, Routing, Rule, quantile_bias, routers_of, rule_of, squeeze, take_up
from etude.training.session import add_lora
from etude.training.settings import ExpertSettings, LoraSettings
from tests import tiny
from tests.training import sessions, test_world

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from experts import upcycle

SHAPE = {
    "vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
MORE: dict[str, Any] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, head_dim=8),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, moe_intermediate_size=16, n_routed_experts=4, first_k_dense_replace=1, head_dim=8, routed_scaling_factor=1.5
    ),
}  # fmt: skip
FAMILIES = ["qwen3_moe", "deepseek_v3", *MORE]


def model_of(family: str, seed: int = 0) -> Any:
    """Return a model whose routers choose: transformers begins some at 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MORE.get(family)) or tiny.config_of(family)).eval()
    for router in routers_of(model).values():
        torch.nn.init.normal_(router.weight, std=0.5)
    return model


def rows_of(tokens: Any, weights: Any = None, positions: Any = None) -> Rows:
    tokens = torch.as_tensor(tokens)
    places = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else torch.as_tensor(positions)
    counted = torch.ones(tokens.shape) if weights is None else torch.as_tensor(weights, dtype=torch.float32)
    return Rows(tokens, tokens.roll(-1, 1), counted, places, torch.from_numpy(piece_bounds(places.numpy())))


def text(rows: int = 3, length: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def taken_up(model: Any, balance: str = "none", steps: int = 100, **more: Any) -> Any:
    experts = take_up(model, ExpertSettings.model_validate({"balance": balance, **more}), steps)
    assert experts is not None
    return experts


# ---- routers


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_taken_up_give_what_transformers_gives(family: str) -> None:
    model, tokens = model_of(family), text()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    experts = taken_up(model)
    assert all(isinstance(router, Routing) for router in experts.routers)
    assert list(model.state_dict()) == names  # nothing more is saved
    exact = family != "gpt_oss"  # which normalises after the choice: the same but for rounding
    logits, own = model(tokens).logits, plain(tokens).logits
    assert torch.equal(logits, own) if exact else torch.allclose(logits, own, atol=1e-6)
    logits.square().mean().backward()
    own.square().mean().backward()
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        assert weight.grad is None or torch.allclose(weight.grad, other.grad, atol=1e-7), name


def test_a_bfloat16_router_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    router = next(iter(routers_of(model_of("qwen3_moe").bfloat16()).values()))
    hidden = torch.randn(50, 32).bfloat16()
    before = router(hidden)[0]
    exact = hidden.float() @ router.weight.float().T
    taken_up(SimpleModel(router))
    after = router(hidden)[0]
    assert before.dtype == torch.bfloat16
    assert torch.equal(after, exact)


class SimpleModel(torch.nn.Module):  # type: ignore[misc]
    """A model that is a router beside experts, as `take_up` looks for them."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.gate, self.experts = router, torch.nn.Identity()
        self.wrapped = torch.nn.ModuleList([])

    def get_decoder(self) -> Any:
        return self

    def set_experts_implementation(self, _: str) -> None: ...


def test_the_rule_of_each_family_is_found() -> None:
    rules = {family: rule_of(next(iter(routers_of(model_of(family)).values()))) for family in FAMILIES}
    assert rules == {
        "qwen3_moe": Rule(sigmoid=False, normalised=False, scale=1.0), "mixtral": Rule(sigmoid=False, normalised=True, scale=1.0),
        "olmoe": Rule(sigmoid=False, normalised=False, scale=1.0), "gpt_oss": Rule(sigmoid=False, normalised=True, scale=1.0),
        "deepseek_v3": Rule(sigmoid=True, normalised=True, scale=2.5), "glm4_moe": Rule(sigmoid=True, normalised=True, scale=1.5),
    }  # fmt: skip


def test_unknown_routers_and_dense_models_are_left_alone() -> None:
    class Odd(torch.nn.Module):  # type: ignore[misc]
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))

        def forward(self, hidden: torch.Tensor) -> Any:
            logits = hidden @ self.weight.T
            return logits, logits.topk(2).values.exp(), logits.topk(2).indices

    assert take_up(SimpleModel(Odd()), ExpertSettings(), 1) is None
    assert take_up(sessions.fresh_model(), ExpertSettings(), 1) is None
    with pytest.raises(UserError, match='"aux_free": SimpleModel has routers of a kind that is not known'):
        take_up(SimpleModel(Odd()), ExpertSettings(balance="aux_free"), 1)
    with pytest.raises(
        UserError, match='"aux_loss": LlamaForCausalLM has no experts that could be balanced; set "none"'
    ):
        take_up(sessions.fresh_model(), ExpertSettings(balance="aux_loss"), 1)


def test_balance_is_refused_where_it_can_do_nothing() -> None:
    frozen = model_of("mixtral").requires_grad_(requires_grad=False)
    with pytest.raises(UserError, match="no router is trained here"):
        take_up(frozen, ExpertSettings(balance="aux_free"), 1)
    with pytest.raises(UserError, match="not among groups"):
        take_up(model_of("deepseek_v3"), ExpertSettings(balance="quantile"), 1)
    with pytest.raises(ValueError, match="`rate` has no effect with"):
        ExpertSettings(balance="aux_loss", rate=0.1)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "glm4_moe"])
@pytest.mark.parametrize("case", ["plain", "an expert without a token", "a padded tail"])
def test_grouped_experts_are_eager_ones_forward_and_backward(family: str, case: str) -> None:
    model, tokens = model_of(family), text(2, 24)
    router = next(iter(routers_of(model).values()))
    if case == "an expert without a token":
        with torch.no_grad():  # one that is never chosen, whatever comes
            (router.e_score_correction_bias if family == "glm4_moe" else router.weight)[1] = (
                -100.0 if family == "glm4_moe" else 0.0
            )
            if family != "glm4_moe":
                router.weight[[0, 2, 3]] = router.weight[[0, 2, 3]].abs()
                model.get_decoder().layers[0].post_attention_layernorm.weight.fill_(0.0)
    weights = torch.ones(2, 24)
    if case == "a padded tail":
        tokens[:, 15:], weights[:, 15:] = 0, 0.0
    eager = copy.deepcopy(model)
    eager.set_experts_implementation("eager")
    experts = taken_up(model)
    for each in (model, eager):
        (each(tokens).logits.float().log_softmax(-1)[..., 0] * weights).sum().backward()
    if case == "an expert without a token" and family == "glm4_moe":
        assert experts.routers[0].seen[0][1] == 0
    for (name, weight), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        if other.grad is None:
            assert weight.grad is None or not weight.grad.any(), name
        else:
            assert torch.allclose(weight.grad, other.grad, atol=1e-5, rtol=1e-4), name


def test_layers_with_experts_compile_without_a_graph_break() -> None:
    model, tokens = (
        model_of("qwen3_moe").bfloat16(),
        text(),
    )  # as on a GPU; transformers cannot compile float32 ones for training
    plain = copy.deepcopy(model)
    experts = taken_up(model, "quantile")
    taken_up(plain, "quantile")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with experts.working_on(rows_of(tokens)):
        logits = model(tokens).logits
        logits.square().mean().backward()
    own = plain(tokens).logits
    own.square().mean().backward()
    assert torch.equal(logits, own)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(weight.grad, other.grad, atol=1e-4), name
    for one, other in zip(experts.routers, routers_of(plain).values(), strict=True):
        assert torch.equal(one.seen[0], other.seen[0])


# ---- load


def brute_load(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return how many live tokens each expert of each layer got, read off what the experts are given."""
    given_ids: list[torch.Tensor] = []
    hooks = [part.register_forward_pre_hook(lambda _, args: given_ids.append(args[1]))
             for name, part in model.named_modules() if name.endswith(".experts")]  # fmt: skip
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    count = next(iter(routers_of(model).values())).weight.shape[0]
    return torch.stack([torch.bincount(ids[mask.flatten()].flatten(), minlength=count) for ids in given_ids])


def test_padding_is_not_counted() -> None:
    model, tokens = model_of("mixtral"), text(2, 12)
    weights, positions = torch.ones(2, 12), torch.arange(12).repeat(2, 1)
    weights[0, 7:] = 0.0
    positions[0, 8:] = torch.arange(4)  # a piece that nothing is learnt of
    experts = taken_up(model)
    experts.begin([], World())
    with experts.working_on(rows_of(tokens, weights, positions)):
        model(tokens)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 8:] = False
    assert torch.equal(experts._sums[0].long(), brute_load(model, tokens, mask))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sessions.write_corpus(tmp_path_factory.mktemp("corpus"))


def step_metrics(corpus: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    with sessions.session(corpus, folder, sessions.settings(**changes), model=model_of("qwen3_moe")) as run:
        for step in run.session.steps(3):
            run._write(step)
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        return list(metrics.rows("train/"))


def test_load_is_in_the_metrics_once_however_it_is_computed(corpus: Path, tmp_path: Path) -> None:
    plain = step_metrics(corpus, tmp_path / "plain")
    names = {"experts_entropy", "experts_busiest", "experts_idle"}
    assert all(names <= row.keys() for row in plain)
    assert all(0 < row["experts_entropy"] <= 1 <= row["experts_busiest"] for row in plain)
    variants: dict[str, dict[str, Any]] = {"again": {"recompute": True}, "split": {"micro": 2}}
    for name, changes in variants.items():
        other = step_metrics(corpus, tmp_path / name, **changes)
        assert [row["experts_entropy"] for row in other] == pytest.approx(
            [row["experts_entropy"] for row in plain], rel=1e-3
        )


def test_what_is_recomputed_is_counted_once() -> None:
    model, tokens = model_of("mixtral"), text()
    experts = taken_up(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    experts.begin([], World())
    with experts.working_on(rows_of(tokens)):
        model(tokens, use_cache=False).logits.sum().backward()
    assert experts._sums[0].sum(-1).tolist() == [tokens.numel() * 2] * 2


# ---- the rules of balancing


def learn_nothing(experts: Any, model: Any, tokens: torch.Tensor, done: int = 1) -> dict[str, float]:
    rows = rows_of(tokens)
    experts.begin([rows], World())
    with experts.working_on(rows):
        model(tokens)
    metrics: dict[str, float] = experts.end(done, World(), skipped=False)
    return metrics


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "deepseek_v3"])
def test_the_bias_goes_by_the_sign_of_the_load_and_only_chooses(family: str) -> None:
    model = model_of(family)
    experts = taken_up(model, "aux_free", rate=0.01)
    wanted = torch.zeros_like(experts.bias_LE)
    for step in range(1, 6):
        tokens = text(seed=step)
        load = brute_load(model, tokens, torch.ones_like(tokens, dtype=torch.bool)).float()
        learn_nothing(experts, model, tokens, step)
        for layer in range(len(load)):
            for expert in range(load.shape[1]):
                mean = load[layer].mean()
                wanted[layer, expert] += (
                    0.01 if load[layer, expert] < mean else -0.01 if load[layer, expert] > mean else 0.0
                )
        for router, bias in zip(experts.routers, wanted, strict=True):
            assert torch.allclose(router.own_bias(), bias, atol=1e-7)
    hidden = torch.randn(30, 32)
    router = experts.routers[0]
    logits, weights, ids = router(hidden)
    assert torch.equal(weights, router.rule.weights(router.rule.scores(logits), ids))  # the bias is in none of them
    with torch.no_grad():
        router.own_bias()[2] = 10.0
    assert (router(hidden)[2] == 2).any(-1).all()


def test_a_skipped_step_leaves_the_bias() -> None:
    model = model_of("mixtral")
    experts = taken_up(model, "aux_free")
    rows = rows_of(text())
    experts.begin([rows], World())
    with experts.working_on(rows):
        model(rows.tokens_BT)
    experts.end(1, World(), skipped=True)
    assert not experts.bias_LE.any()


@settings(max_examples=25, deadline=None)
@given(
    strategies.integers(0, 10_000),
    strategies.sampled_from([4, 8, 32]),
    strategies.integers(1, 3),
    strategies.booleans(),
)
def test_quantiles_are_numpys(seed: int, experts: int, chosen: int, sigmoid: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 1.5, (4000, experts)) + rng.normal(0, 1, experts))
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    bias = torch.from_numpy(rng.normal(0, 0.05, experts))
    threshold = np.sort((scores + bias).numpy(), 1)[:, -chosen - 1]
    apart = scores.numpy() - threshold[:, None]
    wanted = -np.quantile(apart, 1 - chosen / experts, axis=0)
    place = (squeeze(torch.from_numpy(apart)) * BINS).long().clamp(0, BINS - 1)
    histogram = torch.stack([torch.bincount(place[:, each], minlength=BINS) for each in range(experts)]).double()
    made = quantile_bias(histogram, chosen).numpy()
    assert np.allclose(made, wanted - wanted.mean(), rtol=0.03, atol=0.03 * np.abs(wanted).max() + 1e-5)


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_quantile_balancing_evens_the_load_in_a_few_steps(family: str) -> None:
    router = list(routers_of(model_of(family)).values())[-1]
    experts = taken_up(SimpleModel(router), "quantile")
    hidden = (
        torch.randn(2000, 32, generator=torch.Generator().manual_seed(0)) + 0.5
    )  # with a mean, which favours some experts
    rows, seen = rows_of(torch.ones(1, 2000, dtype=torch.long)), []
    for step in range(1, 9):
        experts.begin([rows], World())
        with experts.working_on(rows):
            router(hidden)
        seen.append(experts.end(step, World(), skipped=False)["experts_busiest"])
    assert seen[0] > 1.15
    assert seen[-1] < 1.03


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_the_auxiliary_loss_is_switchs_on_the_global_batch(family: str) -> None:
    model, tokens = model_of(family), text(4, 16)
    experts = taken_up(model, "aux_loss", coefficient=0.5)
    share = brute_load(model, tokens, torch.ones_like(tokens, dtype=torch.bool)).double()
    share /= share.sum(-1, keepdim=True)
    learn_nothing(experts, model, tokens)

    logits: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: logits.append(out[0])) for router in experts.routers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    total = sum((share.shape[1] * each * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
                for each, scores in zip(share, map(experts.routers[0].rule.scores, logits), strict=True))  # fmt: skip
    own = [router.weight for router in experts.routers]
    wanted = torch.autograd.grad(0.5 * total / len(own), own)

    parts = [rows_of(tokens[:3]), rows_of(tokens[3:])]  # split as nobody would
    experts.begin(parts, World())
    model.zero_grad()
    for part in parts:
        with experts.working_on(part):
            (0.0 * model(part.tokens_BT).logits.sum()).backward()
    for router, gradient in zip(experts.routers, wanted, strict=True):
        assert gradient.abs().max() > 1e-4
        assert torch.allclose(router.weight.grad, gradient.float(), atol=1e-6)


# ---- training


@pytest.mark.parametrize(
    ("family", "balance"), [("glm4_moe", "aux_free"), ("mixtral", "quantile"), ("mixtral", "aux_loss")]
)
def test_resumed_training_is_the_same_bit_for_bit(corpus: Path, tmp_path: Path, family: str, balance: str) -> None:
    chosen = sessions.settings(experts={"balance": balance})
    for name, stop in {"whole": 0, "stopped": 5}.items():
        folder = tmp_path / name
        folder.mkdir()
        for at in [stop, 0] if stop else [0]:
            reporter = sessions.acting_reporter(at, sessions.interrupt)
            with sessions.session(corpus, folder, chosen, model=model_of(family), reporter=reporter) as training:
                if at:
                    with pytest.raises(Interrupted):
                        training.run()
                    continue
                training.run()
                training.session.export(folder / "model")
    assert sessions.same(tmp_path / "whole", tmp_path / "stopped")


def test_a_bias_with_a_place_is_exported_and_one_without_has_faded(corpus: Path, tmp_path: Path) -> None:
    for family in ("glm4_moe", "mixtral"):
        folder = tmp_path / family
        folder.mkdir()
        chosen = sessions.settings(experts={"balance": "aux_free", "rate": 0.02})
        with sessions.session(corpus, folder, chosen, model=model_of(family)) as training:
            experts = training.session.experts
            assert experts is not None
            biases = [experts.routers[0].own_bias().abs().max().item() for _ in training.session.steps(12)]
            training.session.settle()
            training.session.export(folder / "model")
            assert (experts.fading, biases[8] > 0) == (family == "mixtral", True)
            training.session.close()
            rows = rows_of(text())
            here = training.session.nats(rows)
        saved = load_file(folder / "model" / "model.safetensors")
        kept = [value for name, value in saved.items() if "correction_bias" in name]
        assert (biases[-1] == 0.0) == (not kept) == (family == "mixtral")
        with torch.no_grad():
            there = AutoModelForCausalLM.from_pretrained(folder / "model").eval()(rows.tokens_BT).logits.log_softmax(-1)
        there = -there.gather(-1, rows.targets_BT[..., None])[..., 0]
        assert torch.allclose(here, there, atol=1e-5), family


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_matrices_and_leaves_routers_and_experts_alone(family: str) -> None:
    model = model_of(family)
    kind, matrices = model.config.model_type, {
        name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name != "lm_head"
    }  # fmt: skip
    add_lora(model, LoraSettings(rank=2), 0)
    trained = {name.partition(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == matrices
    assert model.config.model_type == kind


def test_lora_on_experts_is_refused_in_one_line() -> None:
    for name, why in {
        "gate_up_proj": "only its experts have 'gate_up_proj', which LoRA leaves as they are",
        "experts": "is not supported",
    }.items():
        with pytest.raises(UserError, match=why) as refused:
            add_lora(model_of("mixtral"), LoraSettings(targets=["q_proj", name]), 0)
        assert "\n" not in str(refused.value)


def test_lora_and_balancing_are_refused(corpus: Path, tmp_path: Path) -> None:
    chosen = sessions.settings(experts={"balance": "aux_free"})
    refused = pytest.raises(UserError, match="no router is trained here")
    with refused, sessions.session(corpus, tmp_path, chosen, model=model_of("glm4_moe"), lora=LoraSettings()):
        pass


@pytest.mark.parametrize("balance", ["aux_free", "quantile", "aux_loss"])
def test_two_ranks_balance_as_one(corpus: Path, tmp_path: Path, balance: str) -> None:
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        test_world.run(ranks, corpus, tmp_path / str(ranks), family="qwen3_moe", experts={"balance": balance})
    rows = []
    for size in ("1", "2"):
        with MetricsLog(tmp_path / size / "metrics.jsonl") as metrics:
            rows.append(list(metrics.rows("train/")))
    for one, two in zip(*rows, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["experts_entropy"] == pytest.approx(one["experts_entropy"], abs=2e-3)
    states = [sessions.held(sorted((tmp_path / size / "checkpoints").iterdir())[-1]) for size in ("1", "2")]
    name = "experts/share" if balance == "aux_loss" else "experts/bias"
    assert states[0][name].abs().max() > 0
    assert torch.allclose(states[0][name], states[1][name], atol=2e-3)


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_a_mixture_of_equal_experts_is_the_dense_model(kind: str) -> None:
    """Wherever its routers send a token; with noise it is not, and the experts differ."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "head_dim": 8, "tie_word_embeddings": True} | {"num_experts_per_tok": None})
    dense, tokens = AutoModelForCausalLM.from_config(config).eval(), text()
    with torch.no_grad():
        wanted = dense(tokens).logits
        equal, noisy = (upcycle(dense, kind, experts=4, noise=noise) for noise in (0.0, 0.1))
        assert torch.allclose(equal(tokens).logits, wanted, atol=1e-5)
        assert (noisy(tokens).logits - wanted).abs().max() > 1e-3
    stacks = [weight for name, weight in noisy.named_parameters() if ".experts." in name]
    assert all(not torch.equal(stack[0], stack[1]) for stack in stacks)
    assert all(isinstance(router.weight, torch.Tensor) and router.weight.any() for router in routers_of(noisy).values())


def test_all_layers_are_compiled_as_one() -> None:
    """A class of its own for each router would have a compiler compile every layer by itself: minutes, with 48 layers."""
    config = OlmoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    take_up(model, ExpertSettings(), 10)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=backend)
    model(torch.randint(0, 64, (2, 16)), use_cache=False).logits.sum().backward()
    assert len(graphs) == 1
