from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from pydantic import ValidationError

from etude.errors import UserError
from etude.models.context import RopeSettings, stretch
from tests import tiny

YARN, SCALE = RopeSettings(method="yarn"), RopeSettings(method="scale")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}


def wide() -> Any:
    """A Llama with heads of 64, enough pairs for YaRN to keep, blend and divide."""
    return tf.LlamaConfig(**SMALL, max_position_embeddings=2048, rope_theta=10_000.0)


def scaled(kind: str) -> Any:
    """A Llama made for 1,024 tokens and scaled to 4,096 by its maker."""
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024, **more}
    return tf.LlamaConfig(**SMALL, max_position_embeddings=4096, rope_parameters=rope)


def model_of(config: Any, weights: Any = None) -> Any:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def rotary(config: Any) -> Any:
    return model_of(config).model.rotary_emb


def yarn_by_the_paper(theta: float, dimensions: int, context: int, factor: float) -> list[float]:
    """Section 3.2 of arXiv 2309.00071 as the authors' code has it: the ramp is over whole dimension numbers."""

    def pair_turning(times: float) -> float:
        return dimensions / 2 * math.log(context / (times * 2 * math.pi)) / math.log(theta)

    low, high = math.floor(pair_turning(32)), math.ceil(pair_turning(1))
    slowed = [min(1.0, max(0.0, (pair - low) / (high - low))) for pair in range(dimensions // 2)]
    return [theta ** (-2 * i / dimensions) * (1 - share + share / factor) for i, share in enumerate(slowed)]


@pytest.mark.parametrize(("length", "factor"), [(4096, None), (16_384, None), (16_384, 12.0)])
def test_yarn_turns_as_the_paper_says(length: int, factor: float | None) -> None:
    made, used = rotary(stretch(wide(), length, RopeSettings(method="yarn", factor=factor))), factor or length / 2048
    torch.testing.assert_close(made.inv_freq, torch.tensor(yarn_by_the_paper(10_000.0, 64, 2048, used)))
    assert made.attention_scaling == pytest.approx(0.1 * math.log(used) + 1)


@pytest.mark.parametrize("length", [4096, 16_384, 262_144])
def test_by_rule_no_pair_meets_a_new_angle_and_a_lower_base_would_not_do(length: int) -> None:
    stretched = stretch(wide(), length, RopeSettings())
    old, new = rotary(wide()).inv_freq.double(), rotary(stretched).inv_freq.double()
    slow = old * 2048 < math.tau  # never completed a turn
    assert 5 < slow.sum() < 20
    assert (new[slow] * length <= old[slow] * 2048 * (1 + 1e-6)).all()
    # Were there a pair that turned exactly once in the old context, it would turn exactly once in the new one.
    once = math.log(2048 / math.tau) / math.log(10_000)
    assert length * stretched.rope_parameters["rope_theta"] ** -once == pytest.approx(math.tau)
    halfway = stretch(wide(), (2048 + length) // 2, RopeSettings())
    assert stretch(halfway, length, RopeSettings()).rope_parameters == pytest.approx(stretched.rope_parameters)


def test_a_stated_base_is_taken() -> None:
    made = rotary(stretch(wide(), 4096, RopeSettings(theta=1e6)))
    torch.testing.assert_close(made.inv_freq, torch.tensor([1e6 ** (-2 * pair / 64) for pair in range(32)]))


@pytest.mark.parametrize("settings", [RopeSettings(), YARN], ids=["theta", "yarn"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_survives_saving_and_turns_all_but_the_first_token(family: str, settings: RopeSettings, tmp_path: Path) -> None:
    given = tiny.config_of(family)
    model = model_of(stretch(given, 4096, settings))
    assert given.to_dict() == tiny.config_of(family).to_dict()
    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (again.config.max_position_embeddings, again.config.rope_parameters) == (4096, model.config.rope_parameters)
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        logits = model(tokens).logits
        assert torch.equal(again(tokens).logits, logits)
        moved = (model_of(given, model.state_dict())(tokens).logits - logits).abs().amax(-1)[0]
    assert moved[0] < 1e-7  # attends to itself only, at no distance
    assert (moved[2:] > 1e-7).all()


def test_latent_attention_is_sharpened_as_a_whole() -> None:
    config = tiny.config_of("deepseek_v3")
    plain, longer = model_of(config).model, model_of(stretch(config, 4096, YARN)).model
    assert longer.rotary_emb.attention_scaling == 1
    ratio = longer.layers[0].self_attn.scaling / plain.layers[0].self_attn.scaling
    assert ratio == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_mixtral_which_leaves_its_head_size_open() -> None:
    config = tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2, max_position_embeddings=512)
    assert rotary(stretch(config, 2048, YARN)).inv_freq.shape == (32,)


@pytest.mark.parametrize("settings", [YARN, SCALE], ids=["yarn", "scale"])
def test_yarn_goes_on_from_yarn_as_if_it_had_been_one_step(settings: RopeSettings) -> None:
    config = scaled("yarn")
    made = rotary(stretch(config, 16_384, settings))
    torch.testing.assert_close(made.inv_freq, torch.tensor(yarn_by_the_paper(10_000.0, 64, 1024, 16.0)))
    assert made.attention_scaling == pytest.approx(0.1 * math.log(16) + 1)


@pytest.mark.parametrize(("kind", "slowest"), [("linear", 4.0), ("llama3", 4.0), ("yarn", 4.0)])
def test_scaling_on_slows_the_slowest_pair_by_as_much_as_the_context_grows(kind: str, slowest: float) -> None:
    before, after = rotary(scaled(kind)).inv_freq, rotary(stretch(scaled(kind), 16_384, SCALE)).inv_freq
    assert float(before[-1] / after[-1]) == pytest.approx(slowest)
    assert float(before[0] / after[0]) == pytest.approx(slowest if kind == "linear" else 1.0)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_raised_base_beside_a_scaling_lets_no_slow_pair_meet_a_new_angle(kind: str) -> None:
    old, new = (
        rotary(scaled(kind)).inv_freq.double(),
        rotary(stretch(scaled(kind), 16_384, RopeSettings())).inv_freq.double(),
    )
    slow = old * 4096 < math.tau
    assert slow.any()
    assert (new[slow] * 16_384 <= old[slow] * 4096 * (1 + 1e-6)).all()


def test_the_context_of_qwen_with_yarn_is_what_it_is_scaled_to() -> None:
    config = scaled("yarn")
    config.max_position_embeddings = 1024  # as its cards say to set it
    with pytest.raises(UserError, match="context of 4096 tokens"):
        stretch(config, 4096, SCALE)
    assert stretch(config, 8192, SCALE).rope_parameters["factor"] == 8.0


def test_of_layers_with_windows_only_those_that_see_far_are_stretched() -> None:
    config = tf.Gemma3TextConfig(**SMALL, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048)
    before, after = config.rope_parameters, stretch(config, 8192, YARN).rope_parameters
    assert after["sliding_attention"] == before["sliding_attention"]
    assert (after["full_attention"]["rope_type"], after["full_attention"]["factor"]) == ("yarn", 4.0)
    model_of(stretch(config, 8192, YARN))(torch.arange(20)[None])


@pytest.mark.parametrize(
    ("config", "length", "settings", "said"),
    [
        (wide(), 2048, RopeSettings(), "already has a context of 2048 tokens"),
        (wide(), 4096, RopeSettings(theta=10_000.0), "does not exceed the model's 10000"),
        (wide(), 8192, RopeSettings(method="yarn", factor=2.0), "too small for that context; it takes 4"),
        (scaled("yarn"), 8192, SCALE.model_copy(update={"factor": 7.0}), "too small for that context; it takes 8"),
        (scaled("yarn"), 4096, YARN, "already has a context of 4096 tokens"),
        (scaled("llama3"), 8192, YARN, "scaled already .rope_type 'llama3'.; set rope.method"),
        (wide(), 8192, SCALE, "not scaled yet; set rope.method"),
        (scaled("dynamic"), 8192, SCALE, "rope_type 'dynamic' turns a text by how long it is"),
        (tf.GPT2Config(), 8192, RopeSettings(), "gpt2 models have no rotary positions"),
        (tf.FalconConfig(alibi=True), 8192, RopeSettings(), "falcon models have no rotary positions"),
        (tf.Gemma3TextConfig(sliding_window=None), 10**6, RopeSettings(), "each kind of layer in its own way"),
        (tf.Phi3Config(max_position_embeddings=4096), 8192, YARN, "phi3 models do not take 'yarn'"),
    ],
)
def test_refusals_are_one_line(config: Any, length: int, settings: RopeSettings, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        stretch(config, length, settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong", [{"factor": 4.0}, {"method": "yarn", "theta": 1e6}, {"method": "linear"}, {"theta": 0.5}]
)
def test_settings_without_effect_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RopeSettings(**wrong)
