"""MTP heads as others load them: transformers generates with them; what vLLM needs is written (test_mtp_vllm.py has vLLM itself)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from etude.errors import UserError
from etude.lineage.licences import licence_files
from etude.models.load import load_model
from etude.models.mtp_heads import MtpHeads, export_heads, save_heads
from tests import tiny
from tests.conftest import Etude

LAYERS = 61  # transformers looks for DeepSeek-V3's heads in layer 61 and nowhere else
PROMPT = torch.tensor([[5, 9, 2, 7]])


def deepseek(layers: int) -> Any:
    small = tiny.config_of("deepseek_v3").to_dict() | {"num_hidden_layers": layers, "first_k_dense_replace": layers - 1}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**small)).eval()


def teach(model: Any, heads: MtpHeads, steps: int = 60) -> None:
    """Train heads to draft what the model writes after the prompt, by the module's own step and all logits at once."""
    ids = model.generate(PROMPT, max_new_tokens=40, do_sample=False, use_cache=False)
    decoder, head, embed = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
    places = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        trunk = decoder(input_ids=ids, use_cache=False).last_hidden_state
        target = head(trunk).softmax(-1)
    optimiser = torch.optim.Adam(heads.parameters(), lr=1e-2)
    for _ in range(steps):
        last, loss = trunk, torch.zeros(())
        for depth in range(heads.depth):
            last = heads.step(
                depth,
                last,
                ids.roll(-depth - 1, 1),
                places,
                embed=embed,
                rotary=decoder.rotary_emb,
                attention_mask=mask,
            )
            guess, wanted = head(last)[0, : -depth - 2], target[0, depth + 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(guess, wanted.argmax(-1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def saved(folder: Path, model: Any, *, depth: int, shared: bool) -> Path:
    model.requires_grad_(False).save_pretrained(folder)
    loaded = load_model(folder, torch.device("cpu"), torch.float32)
    loaded.set_attn_implementation("sdpa")
    heads = MtpHeads.for_model(loaded.requires_grad_(False), depth=depth, shared=shared)
    teach(loaded, heads)
    save_heads(folder, {name: value.detach() for name, value in heads.state_dict().items()}, depth=depth, shared=shared)
    return folder


def generated(folder: Path, numbers: str | None = None, **wish: Any) -> tuple[list[int], int]:
    """Return what transformers generates from a folder, and how often it called the model for it."""
    model, calls = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    if numbers:
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\."]
    model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    ids = model.generate(PROMPT, max_new_tokens=24, do_sample=False, **wish)
    return ids[0].tolist(), len(calls)


def test_transformers_generates_the_same_in_fewer_calls(tmp_path: Path) -> None:
    """With no more said to transformers than `use_mtp=True`: one depth, in the layer it looks for."""
    source = saved(tmp_path / "model", deepseek(LAYERS), depth=1, shared=True)
    (source / "tokenizer.json").write_text("{}")
    export_heads(source, tmp_path / "out", "transformers")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    plain, calls = generated(source)
    drafted, fewer = generated(tmp_path / "out", use_mtp=True)
    assert drafted == plain
    assert calls == 24
    assert fewer < 20


@pytest.mark.parametrize("shared", [True, False])
def test_transformers_takes_several_depths_where_it_is_told_their_layers(tmp_path: Path, shared: bool) -> None:
    source = saved(tmp_path / "model", deepseek(2), depth=3, shared=shared)
    use = export_heads(source, tmp_path / "out", "transformers")
    assert "({})".format("2|3|4") in use
    plain, _ = generated(source)
    drafted, fewer = generated(tmp_path / "out", numbers="2|3|4", use_mtp=True)
    assert drafted == plain
    assert fewer < 15


def test_the_draft_for_vllm_is_a_renaming(tmp_path: Path, etude: Etude) -> None:
    source = tiny.save_model(tmp_path / "model")
    model = load_model(source, torch.device("cpu"), torch.float32)
    heads = MtpHeads.for_model(model, depth=3)
    save_heads(source, heads.state_dict(), depth=3, shared=True)
    (source / "LICENSES/tiny").mkdir(parents=True)
    (source / "LICENSES/tiny/NOTICE").write_text("by others", encoding="utf-8")
    said = etude("mtp", "export", source, tmp_path / "out", "--layout", "mimo")
    assert [file.name for file in licence_files(tmp_path / "out")] == ["LICENSE", "NOTICE"]
    assert said.code == 0, said.err
    assert '"num_speculative_tokens": 3' in said.out
    found, layer = load_file(tmp_path / "out" / "model.safetensors"), heads.layer(0)
    width = 32
    projection = found["model.mtp_layers.0.input_proj.weight"]
    assert torch.equal(projection[:, :width], layer.eh_proj.weight[:, width:])
    assert torch.equal(projection[:, width:], layer.eh_proj.weight[:, :width])
    assert torch.equal(found["model.mtp_layers.0.mlp.up_proj.weight"], layer.mtp_block.mlp.up_proj.weight)
    assert not found["model.mtp_layers.0.self_attn.k_proj.bias"].any()
    assert torch.equal(found["lm_head.weight"], model.get_output_embeddings().weight)
    names = {
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
    }
    assert {name.split(".")[3] for name in found if "mtp_layers" in name} == names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]


@pytest.mark.parametrize(("family", "layout", "said"), [
    ("llama", "transformers", "transformers has no MTP for LlamaForCausalLM"), ("qwen3", "mimo", "is a qwen3; the layout mimo"),
])  # fmt: skip
def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path, family: str, layout: Any, said: str) -> None:
    source = tiny.save_model(tmp_path / "model", family)
    with pytest.raises(UserError, match="has no MTP heads"):
        export_heads(source, tmp_path / "none", layout)
    heads = MtpHeads.for_model(load_model(source, torch.device("cpu"), torch.float32), depth=1)
    save_heads(source, heads.state_dict(), depth=1, shared=True)
    with pytest.raises(UserError, match=said):
        export_heads(source, tmp_path / "out", layout)
    with pytest.raises(UserError, match="is not empty"):
        export_heads(source, source, layout)
