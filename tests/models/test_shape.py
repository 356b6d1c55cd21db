from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from etude.errors import UserError
from etude.lineage.compute import Attention
from etude.models.bases import known_bases, resolve
from etude.models.load import load_model
from etude.models.shape import model_shape, shape_of
from tests import tiny
from tests.lineage.refusals import one_line

CPU = torch.device("cpu")
EXPERTS, EXPERTS_A_TOKEN = 8, 2  # of the tiny mixtures of experts


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A tiny model of each family on disk, and the same read back."""
    folder = tiny.save_model(tmp_path_factory.mktemp("models") / request.param, request.param, seed=7)
    return request.param, folder, load_model(folder, CPU)


def test_a_saved_model_computes_what_it_did_before(saved: tuple[str, Path, Any]) -> None:
    family, _, model = saved
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(tiny.config_of(family)).eval()
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        expected, found = made(tokens).logits, model(tokens).logits
    assert found.shape == (1, 32, tiny.VOCABULARY)
    assert not model.training
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parameters_are_the_distinct_ones_of_the_loaded_model(saved: tuple[str, Path, Any]) -> None:
    family, folder, model = saved
    shape = model_shape(folder)
    distinct = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    assert shape.parameters == sum(distinct.values())
    assert (shape.family, shape.context) == (family, tiny.CONTEXT)


def test_active_parameters_are_those_one_token_passes_through(saved: tuple[str, Path, Any]) -> None:
    """Told by the gradient: what a token did not pass through gets none."""
    _, folder, model = saved
    model.zero_grad()
    token = torch.tensor([[5]])
    # With one token as both input and sum over all outputs, the only zero rows are experts and embeddings not used.
    model(token).logits.square().sum().backward()
    distinct = {parameter.data_ptr(): (name, parameter) for name, parameter in model.named_parameters()}
    active = 0
    for name, parameter in distinct.values():
        if ".experts." in name:
            assert parameter.shape[0] == EXPERTS
            used = int(parameter.grad.flatten(1).abs().sum(1).count_nonzero())
            assert used == EXPERTS_A_TOKEN
            active += used * parameter[0].numel()
        else:
            active += parameter.numel()
    model.zero_grad()
    assert model_shape(folder).active_parameters == active


def test_multiplied_parameters_leave_out_an_input_embedding_that_is_only_looked_up(
    saved: tuple[str, Path, Any],
) -> None:
    family, folder, _ = saved
    shape = model_shape(folder)
    looked_up = 0 if family == "llama" else tiny.VOCABULARY * 32  # the tiny Llama's embedding is its head as well
    assert shape.compute.multiplied_parameters == shape.active_parameters - looked_up


def test_attention_of_each_family(saved: tuple[str, Path, Any]) -> None:
    family, folder, model = saved
    expected = Attention(4, 8 + 4, 8) if family == "deepseek_v3" else Attention(4, 8, 8)
    assert model_shape(folder).compute.attention == (expected, expected)
    attention = model.model.layers[0].self_attn
    assert attention.o_proj.in_features == expected.heads * expected.v_dim
    queries = attention.q_b_proj if family == "deepseek_v3" else attention.q_proj
    assert queries.out_features == expected.heads * expected.qk_dim


def test_layers_with_a_window_see_no_more_than_it() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    assert [layer.window for layer in shape_of(config).compute.attention] == [7, None, 7]


def deepseek(**changes: Any) -> Any:
    """Return a config with the dimensions the DeepSeek-V3 report publishes."""
    published = {
        "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "intermediate_size": 18432, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "tie_word_embeddings": False, "max_position_embeddings": 163840,
    }  # fmt: skip
    return DeepseekV3Config(**published | changes)


DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
PUBLISHED: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "smollm2-360m": (LlamaConfig, (960, 32, 15, 5, 2560), {"vocab_size": 49152, "tie_word_embeddings": True}),
    "smollm2-1.7b": (LlamaConfig, (2048, 24, 32, 32, 8192), {"vocab_size": 49152, "tie_word_embeddings": True}),
    "llama-3.2-1b": (LlamaConfig, (2048, 16, 32, 8, 8192), {"vocab_size": 128256, "tie_word_embeddings": True}),
    "qwen2.5-coder-7b": (Qwen2Config, (3584, 28, 28, 4, 18944), {"vocab_size": 152064, "tie_word_embeddings": False}),
    "qwen3-0.6b-base": (Qwen3Config, (1024, 28, 16, 8, 3072), {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}),
    "qwen3-8b-base": (Qwen3Config, (4096, 36, 32, 8, 12288), {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}),
    "qwen3-30b-a3b-base": (Qwen3MoeConfig, (2048, 48, 32, 4, 6144), {
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
    }),
}  # fmt: skip


def published(name: str) -> Any:
    """Return the config of a known base, from the dimensions that its sources in bases.toml state."""
    kind, values, more = PUBLISHED[name]
    return kind(**dict(zip(DIMENSIONS, values, strict=True)), **more)


DENSE = ("smollm2-360m", "smollm2-1.7b", "llama-3.2-1b", "qwen2.5-coder-7b", "qwen3-0.6b-base", "qwen3-8b-base")


@pytest.mark.parametrize("name", DENSE)
def test_published_dimensions_give_the_parameters_in_the_registry(name: str) -> None:
    known, shape = known_bases()[name], shape_of(published(name))
    assert shape.parameters == shape.active_parameters == known.parameters == known.active_parameters
    assert shape.family == known.family


def test_published_dimensions_of_a_mixture_give_the_parameters_in_the_registry() -> None:
    known, shape = known_bases()["qwen3-30b-a3b-base"], shape_of(published("qwen3-30b-a3b-base"))
    assert shape.parameters == known.parameters
    # the two figures that the registry's source states as computed
    assert (shape.active_parameters, shape.compute.multiplied_parameters) == (3353032704, 3041867776)


@pytest.mark.parametrize(
    ("name", "changes", "mixtures", "experts"),
    [
        ("deepseek-v3-base", {}, 58, 256),
        (
            "kimi-k2-base",
            {"vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1},
            60,
            384,
        ),
    ],
)
def test_published_dimensions_of_the_largest_give_their_parameters_without_their_memory(
    name: str, changes: dict[str, int], mixtures: int, experts: int
) -> None:
    """The registry counts the router's correction bias, one number for each expert of each layer with experts.

    It is a tensor of the checkpoint, but transformers keeps it as a buffer and not as a parameter, so that our count
    from the config is lower by exactly that: 58 × 256 = 14,848 of DeepSeek-V3's 671,026,419,200.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shape = shape_of(deepseek(**changes))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
    known = known_bases()[name]
    assert shape.parameters + mixtures * experts == known.parameters
    assert grown < 1_000_000  # its weights would be more than 600,000,000 kB
    stated = int(known.sources["active_parameters"].partition("computed ")[2].split()[0])
    assert shape.compute.multiplied_parameters + mixtures * experts == stated
    assert abs(shape.compute.multiplied_parameters / known.active_parameters - 1) < 0.02
    assert shape.compute.attention == (Attention(changes.get("num_attention_heads", 128), 192, 128),) * 61


def test_the_largest_published_figure() -> None:
    assert known_bases()["deepseek-v3-base"].parameters == 671_026_419_200
    shape = shape_of(deepseek())
    assert (shape.parameters, shape.active_parameters) == (671_026_404_352, 37_552_282_624)


def test_the_shape_of_sprout_is_what_the_registry_says() -> None:
    known, shape = known_bases()["sprout"], model_shape(resolve("sprout").folder)
    assert (shape.parameters, shape.context, shape.family) == (known.parameters, known.context, known.family)


@pytest.mark.parametrize(
    "change",
    [
        "{",
        "",
        "null",
        "[]",
        "{}",
        {"model_type": "no-such-model"},
        pytest.param({"model_type": "clip"}),  # ValueError, from shape_of
        pytest.param({"hidden_size": "wide"}),  # StrictDataclassFieldValidationError
        pytest.param({"num_attention_heads": 5}),  # StrictDataclassClassValidationError
        pytest.param({"num_attention_heads": 0}),  # ZeroDivisionError
        pytest.param({"hidden_act": "no-such-function"}),  # KeyError, from shape_of
    ],
    ids=str,
)
def test_a_config_that_describes_no_model_is_refused_in_one_line(
    tiny_base: Path, tmp_path: Path, change: str | dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    config = folder / "config.json"
    text = change if isinstance(change, str) else json.dumps(json.loads(config.read_text("utf-8")) | change)
    config.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=one_line(config)):
        model_shape(folder)


def test_a_folder_without_a_config_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(tmp_path / "config.json")):
        model_shape(tmp_path)
