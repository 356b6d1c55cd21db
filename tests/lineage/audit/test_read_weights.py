"""Every matrix that is read by name equals the parameter of the live model that transformers computes with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file, save_file

import etude.models
from etude.errors import UserError
from etude.lineage.audit.examine import compare_shapes, compare_tokens
from etude.lineage.audit.read_weights import Weights, open_weights, read_tokens, unpacked
from etude.models import gguf
from etude.progress import Reporter
from tests.lineage.audit import zoo
from tests.lineage.audit.zoo import DIM, EXPERT_FFN, EXPERTS, FFN, HEADS, HIDDEN, KEYS, LAYERS, VOCAB


def saved(folder: Path, family: str) -> tuple[Weights, Any]:
    model = zoo.build(family)
    model.save_pretrained(folder)
    return open_weights(folder), model


def same(read: Any, expected: Any) -> bool:
    return read is not None and read.dtype == np.float32 and np.array_equal(read, expected.detach().float().numpy())


def check_layers(weights: Weights, expected: dict[str, Any], layers: Any) -> None:
    """`expected`: by part, what the live layer says its matrix is."""
    for index, layer in enumerate(layers):
        for part in ("up", "gate", "query", "key", "router"):
            read = weights.part(index, part)
            if part in expected:
                assert same(read, expected[part](layer)), (part, index)
            else:
                assert read is None, (part, index)


SEPARATE = {"query": lambda layer: layer.self_attn.q_proj.weight, "key": lambda layer: layer.self_attn.k_proj.weight}
GATED = {"up": lambda layer: layer.mlp.up_proj.weight, "gate": lambda layer: layer.mlp.gate_proj.weight}


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_separate_matrices(tmp_path: Path, family: str, tied: bool) -> None:
    weights, model = saved(tmp_path, family)
    check_layers(weights, SEPARATE | GATED, model.model.layers)
    assert same(weights.embedding(), model.model.embed_tokens.weight)
    shape = weights.shape
    assert (shape.model_type, shape.hidden, shape.layers, shape.ffn, shape.vocab) == (
        family,
        HIDDEN,
        LAYERS,
        FFN,
        VOCAB,
    )
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.attention, shape.tied) == (HEADS, KEYS, DIM, "gqa", tied)
    assert (shape.experts, shape.expert_ffn, shape.shared_experts, shape.dense_layers) == (0, 0, 0, LAYERS)
    assert shape.rope_theta == 10000.0


def test_fused_query_key_value_and_gate_up(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "phi3")
    parts = (HEADS * DIM, KEYS * DIM, KEYS * DIM)
    expected = {
        "query": lambda layer: layer.self_attn.qkv_proj.weight.split(parts)[0],
        "key": lambda layer: layer.self_attn.qkv_proj.weight.split(parts)[1],
        "gate": lambda layer: layer.mlp.gate_up_proj.weight.chunk(2)[0],
        "up": lambda layer: layer.mlp.gate_up_proj.weight.chunk(2)[1],
    }
    check_layers(weights, expected, model.model.layers)
    assert (weights.shape.ffn, weights.shape.kv_heads) == (FFN, KEYS)


def test_gpt2_is_stored_the_other_way_round_and_has_no_gate(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "gpt2")
    expected = {
        "query": lambda layer: layer.attn.c_attn.weight.T[:HIDDEN],
        "key": lambda layer: layer.attn.c_attn.weight.T[HIDDEN : 2 * HIDDEN],
        "up": lambda layer: layer.mlp.c_fc.weight.T,
    }
    check_layers(weights, expected, model.transformer.h)
    assert same(weights.embedding(np.array([5, 3])), model.transformer.wte.weight[[5, 3]])
    assert (weights.shape.ffn, weights.shape.attention, weights.shape.tied) == (FFN, "mha", True)


def test_starcoder_has_gpt2s_names_but_the_usual_way_round(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "starcoder2")
    check_layers(weights, SEPARATE | {"up": lambda layer: layer.mlp.c_fc.weight}, model.model.layers)


@pytest.mark.parametrize("family", ["gpt_neox", "falcon"])
def test_queries_grouped_with_their_key(tmp_path: Path, family: str) -> None:
    weights, model = saved(tmp_path, family)
    layers = model.gpt_neox.layers if family == "gpt_neox" else model.transformer.h
    keys = HEADS if family == "gpt_neox" else KEYS
    for index, layer in enumerate(layers):
        attention = layer.attention if family == "gpt_neox" else layer.self_attention
        # As both of transformers' implementations view the output: key-value heads, then queries, key and value of each.
        groups = attention.query_key_value.weight.view(keys, HEADS // keys + 2, DIM, HIDDEN)
        assert same(weights.part(index, "query"), groups[:, :-2].reshape(-1, HIDDEN))
        assert same(weights.part(index, "key"), groups[:, -2].reshape(-1, HIDDEN))
        assert same(weights.part(index, "up"), layer.mlp.dense_h_to_4h.weight)
        assert weights.part(index, "gate") is None
    assert weights.shape.kv_heads == keys


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "deepseek_v4"])
def test_experts_by_number_and_in_one_tensor(tmp_path: Path, family: str, stacked: bool) -> None:
    weights, model = saved(tmp_path, family)
    if stacked:  # as transformers 5 keeps them in memory
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
        )
        weights = open_weights(tmp_path)
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            assert same(weights.part(index, "up"), layer.mlp.up_proj.weight)
            assert weights.part(index, "router") is weights.part(index, "expert up", 0) is None
            continue
        assert same(weights.part(index, "router"), layer.mlp.gate.weight)
        for expert in range(EXPERTS):
            gate, up = layer.mlp.experts.gate_up_proj[expert].chunk(2)
            assert same(weights.part(index, "expert gate", expert), gate)
            assert same(weights.part(index, "expert up", expert, np.array([4, 1])), up[[4, 1]])
        shared = getattr(layer.mlp, "shared_experts", getattr(layer.mlp, "shared_expert", None))
        for part in ("up", "gate"):
            read = weights.part(index, part)
            assert same(read, getattr(shared, f"{part}_proj").weight) if shared else read is None
    shape = weights.shape
    narrow = FFN if family == "mixtral" else EXPERT_FFN
    assert (shape.experts, shape.expert_ffn) == (EXPERTS, narrow)
    dense, shared_experts = {
        "qwen3_moe": (1, 0),
        "deepseek_v3": (1, 2),
        "deepseek_v4": (0, 1),
        "qwen2_moe": (0, 2),
    }.get(family, (0, 0))
    assert (shape.dense_layers, shape.shared_experts, shape.ffn) == (dense, shared_experts, FFN if dense else 0)


def test_interleaved_gate_and_up_of_experts_stored_the_other_way_round(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "gpt_oss")
    for index, layer in enumerate(model.model.layers):
        fused = layer.mlp.experts.gate_up_proj
        for expert in range(EXPERTS):  # gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            assert same(weights.part(index, "expert gate", expert), fused[expert, :, ::2].T)
            assert same(weights.part(index, "expert up", expert), fused[expert, :, 1::2].T)
        assert same(weights.part(index, "router"), layer.mlp.router.weight)


def test_latent_attention(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "deepseek_v3")
    attention = model.model.layers[2].self_attn
    assert same(weights.part(2, "query"), attention.q_a_proj.weight)
    assert same(weights.part(2, "key"), attention.kv_a_proj_with_mqa.weight)
    shape = weights.shape
    assert (shape.attention, shape.q_rank, shape.kv_rank, shape.head_dim, shape.kv_heads) == ("mla", 24, 16, 16, HEADS)


def test_one_key_for_all_heads(tmp_path: Path) -> None:
    weights, model = saved(tmp_path, "deepseek_v4")
    attention = model.model.layers[1].self_attn
    assert same(weights.part(1, "query"), attention.q_a_proj.weight)
    assert same(weights.part(1, "key"), attention.kv_proj.weight)
    assert (weights.shape.attention, weights.shape.kv_heads, weights.shape.tied) == ("gqa", 1, False)


def test_prefixes_towers_and_further_prediction_layers_are_told_apart(tmp_path: Path) -> None:
    _, model = saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["visual.embed.weight"] = torch.zeros(9, 9)
    renamed |= {f"vision_tower.layers.{index}.mlp.up_proj.weight": torch.zeros(9, 9) for index in range(9)}
    renamed |= {
        f"language_model.model.layers.{LAYERS}.{name}.weight": torch.zeros(4, 4)
        for name in ("embed_tokens", "mlp.up_proj")
    }
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "seeing", "text_config": config}))
    weights = open_weights(tmp_path)
    check_layers(weights, SEPARATE | GATED, model.model.layers)
    assert same(weights.embedding(), model.model.embed_tokens.weight)
    assert (weights.shape.layers, weights.shape.tied) == (LAYERS, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = zoo.build("llama").to(dtype)
    model.save_pretrained(tmp_path)
    check_layers(open_weights(tmp_path), SEPARATE | GATED, model.model.layers)


@pytest.mark.parametrize(
    ("block", "suffix"), [([16, 8], "weight_scale_inv"), ([128, 128], "weight_scale_inv"), ([32, 32], "scale")]
)
def test_fp8_with_block_scales(tmp_path: Path, block: list[int], suffix: str) -> None:
    saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    scales = torch.rand(-(-FFN // block[0]), -(-HIDDEN // block[1])) + 0.5
    coded = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {name: coded, name.replace("weight", suffix): scales}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"weight_block_size": block}}))
    whole = scales.repeat_interleave(block[0], 0)[:FFN].repeat_interleave(block[1], 1)[:, :HIDDEN] * coded.float()
    weights, some = open_weights(tmp_path), np.array([40, 3, 17])
    assert same(weights.part(1, "up"), whole)
    assert same(weights.part(1, "up", rows=some), whole[some])


@pytest.mark.parametrize("scale_shape", [(), (1,), (FFN, 1)])
def test_fp8_with_one_scale_or_one_a_row(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    coded, scale = tensors[name].to(torch.float8_e4m3fn), torch.rand(scale_shape) + 0.5
    save_file(tensors | {name: coded, f"{name}_scale": scale}, tmp_path / "model.safetensors")
    assert same(open_weights(tmp_path).part(0, "gate"), coded.float() * scale)


def test_int4_packed_eight_to_a_word_with_a_scale_for_each_group(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    del tensors[name]
    numbers = torch.randint(-8, 8, (FFN, HIDDEN))
    packed = [
        [sum((int(n) + 8) << 4 * place for place, n in enumerate(word)) for word in row.view(-1, 8)] for row in numbers
    ]
    scales = torch.rand(FFN, HIDDEN // 16).to(torch.bfloat16)
    words = torch.tensor(packed, dtype=torch.int64).to(torch.int32)
    save_file(tensors | {f"{name}_packed": words, f"{name}_scale": scales}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert same(weights.part(0, "up"), numbers * scales.float().repeat_interleave(16, 1))
    assert np.array_equal(unpacked(words.numpy(), HIDDEN), numbers)
    assert weights.shape.ffn == FFN


def test_shards_one_shard_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    weights, model = saved(tmp_path / "one", "llama")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    sharded = open_weights(tmp_path / "many")
    assert len(sharded.files) > 3
    check_layers(sharded, SEPARATE | GATED, model.model.layers)
    assert open_weights(sharded.files[1]).files == sharded.files
    check_layers(open_weights(tmp_path / "one" / "model.safetensors"), SEPARATE | GATED, model.model.layers)
    assert sharded.shape == weights.shape


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    weights, _ = saved(tmp_path, "llama")
    assert weights.bytes_read == 0
    assert weights.bytes_total == (tmp_path / "model.safetensors").stat().st_size
    weights.embedding(np.array([7, 90, 2]))
    assert weights.bytes_read == 3 * HIDDEN * 4
    weights.part(0, "up")
    weights.part(1, "up", rows=np.arange(10, 20))
    assert weights.bytes_read == (3 + FFN + 10) * HIDDEN * 4


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0]
)
def test_gguf_equals_its_parameters_and_the_folder_it_is_converted_to(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    model, file = zoo.build("llama"), tmp_path / "model.gguf"
    zoo.write_gguf(file, model, kind, ["<end>", "a", "b", "c", "ab", "abc", *map(str, range(VOCAB - 6))])
    weights = open_weights(file)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = torch.from_numpy(
                dequantize(quantize(parameter.detach().numpy(), kind), kind).astype(np.float32)
            )
    check_layers(weights, SEPARATE | GATED, model.model.layers)
    assert same(weights.part(1, "up", rows=np.array([9, 2])), model.model.layers[1].mlp.up_proj.weight[[9, 2]])
    assert same(weights.embedding(), model.model.embed_tokens.weight)
    gguf.convert(file, tmp_path, Reporter(quiet=True))
    converted = open_weights(tmp_path)
    assert compare_shapes(weights.shape, converted.shape).kind == "exact"
    assert weights.shape == converted.shape
    ours, theirs = read_tokens(file), read_tokens(tmp_path)
    assert ours is not None
    assert theirs is not None
    assert compare_tokens(ours, theirs).kind == "identical"
    assert ours.special == theirs.special == {"<end>"}


def test_one_of_several_gguf_parts_stands_for_all(tmp_path: Path) -> None:
    file = tmp_path / "whole-00001-of-00002.gguf"
    zoo.write_gguf(file, zoo.build("llama"), GGMLQuantizationType.F16, ["a"])
    with pytest.raises(UserError, match="one of 2 parts and 1 are here"):
        open_weights(file)
    second = tmp_path / "whole-00002-of-00002.gguf"
    writer = GGUFWriter(second, "llama")
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_weights(file).files == [file, second]
    shutil.copy(file, second)
    with pytest.raises(UserError, match=r"blk\.0\S+ is in whole-00001-of-00002\.gguf and in .*whole-00002"):
        open_weights(file)


def test_numbers_that_cannot_be_read_and_unknown_models_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(FFN, HIDDEN, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} holds U8"):
        open_weights(tmp_path).part(0, "up")
    save_file(
        {"encoder.block.0.q.weight": torch.zeros(2, 2), "shared.weight": torch.zeros(2, 2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"no layers known to this audit.*encoder\.block\.0\.q\.weight, shared\.weight"):
        open_weights(tmp_path)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no embedding known"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "config.json is missing"), ("{", "config.json is not JSON"), ("[]", "not the config of a language model"), ('{"model_type": "llama"}', "'num_hidden_layers' is missing or wrong")],
)  # fmt: skip
def test_a_missing_or_damaged_config_is_said(tmp_path: Path, config: str | None, said: str) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=said):
        open_weights(tmp_path)


def test_sprout_is_read_without_torch() -> None:
    sprout = Path(etude.models.__file__).parent / "sprout"
    code = (
        "import sys, pathlib; from etude.lineage.audit.read_weights import open_weights, read_tokens\n"
        "p = pathlib.Path(sys.argv[1]); w = open_weights(p); read_tokens(p)\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)\n"
        "print(w.part(5, 'up').sum(dtype='f8'), w.shape.vocab)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sprout)], capture_output=True, text=True, check=True)
    total, vocab = done.stdout.split()
    expected = load_file(sprout / "model.safetensors")["model.layers.5.mlp.up_proj.weight"]
    assert float(total) == pytest.approx(float(expected.double().sum()), rel=1e-9)
    assert vocab == "6144"
