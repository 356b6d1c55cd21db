"""Quantised bases are dequantised tensor by tensor, exactly, and what is saved of them is not quantised any more."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, LlamaForCausalLM

from etude.errors import UserError
from etude.files import read_json, write_json
from etude.models.load import load_model, saved_dtype
from etude.models.shape import model_shape
from tests import tiny
from tests.lineage.refusals import one_line
from tests.training import sessions

CPU = torch.device("cpu")
BLOCK = 16
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # OCP MX, e2m1


def quantise_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model's matrices as DeepSeek and Qwen do; return what they stand for, in float32."""
    meant, stored = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        meant[name], stored[name] = weight.float(), weight
        if "proj" in name:
            rows, columns = weight.shape
            blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            stored |= {name: codes.view_as(weight), f"{name}_scale_inv": scales[:, 0, :, 0].contiguous()}
            meant[name] = (codes.float() * scales).view_as(weight)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    scheme = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "quantization_config": scheme})
    return meant


def saved_again(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    assert "quantization_config" not in read_json(folder / "config.json")
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_with_block_scales(tmp_path: Path, family: str) -> None:
    folder = tiny.save_model(tmp_path / "base", family)
    parameters = model_shape(folder).parameters
    meant = quantise_fp8(folder)
    assert saved_dtype(folder) == torch.bfloat16
    assert model_shape(folder).parameters == parameters
    exact = saved_again(tmp_path / "exact", load_model(folder, CPU, torch.float32))
    rounded = saved_again(tmp_path / "rounded", load_model(folder, CPU, torch.bfloat16))
    assert exact.keys() == rounded.keys() == meant.keys()
    for name, weight in meant.items():
        assert torch.equal(exact[name], weight), name
        assert torch.equal(rounded[name], weight.bfloat16()), name


def test_mxfp4_as_gpt_oss_has_it(tmp_path: Path) -> None:
    width, hidden, experts = 32, 64, 4
    config = GptOssConfig(
        vocab_size=64, hidden_size=width, intermediate_size=hidden, num_hidden_layers=1, num_local_experts=experts,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, layer_types=["full_attention"],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    stored, meant = load_file(file), {}
    draw = torch.Generator().manual_seed(0)
    for name, rows, columns in (("gate_up_proj", 2 * hidden, width), ("down_proj", width, hidden)):
        full = f"model.layers.0.mlp.experts.{name}"
        codes = torch.randint(16, (experts, rows, columns // 32, 32), generator=draw)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), generator=draw)
        values = torch.tensor(FP4)[codes] * 2.0 ** (scales[..., None] - 127)
        meant[full] = values.view(experts, rows, columns).mT  # the model multiplies from the other side
        del stored[full]
        stored[f"{full}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[f"{full}_scales"] = scales.to(torch.uint8)
    save_file(stored, file, {"format": "pt"})
    written = json.loads((tmp_path / "base" / "config.json").read_text())
    skipped = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write_json(tmp_path / "base" / "config.json", {**written, "quantization_config": skipped})
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path / "base", CPU, dtype)
        assert model.dtype == dtype
        for name, weight in meant.items():
            assert torch.equal(model.get_parameter(name).float(), weight), name
        again = saved_again(tmp_path / str(dtype), model)
        assert {name.rpartition(".")[2] for name in again if "experts." in name} >= {"gate_up_proj", "down_proj"}


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "base")
    write_json(
        folder / "config.json",
        {**read_json(folder / "config.json"), "quantization_config": {"quant_method": "gptq", "bits": 4}},
    )
    with pytest.raises(
        UserError, match=one_line("is quantised by 'gptq', which cannot be trained (fp8, mxfp4 can); take")
    ):
        load_model(folder, CPU)


def load_and_measure(folder: Path, file: Path) -> None:
    before = Path("/proc/self/statm").read_text().split()[1]
    load_model(folder, CPU, torch.float32)
    file.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - int(before) * 4096))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux")
def test_main_memory_holds_the_weights_once_and_the_files_that_are_mapped(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
            )
        ).bfloat16()
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="50MB")
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 200e6
    assert sessions.processes(load_and_measure, (tmp_path, tmp_path / "peak")) == [0]
    weights, mapped = 2 * size, size  # float32; what is mapped the system may drop again
    assert weights < int((tmp_path / "peak").read_text()) < weights + mapped + 100e6
