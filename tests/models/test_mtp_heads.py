"""MTP heads as a module and as a file: every family, each depth with its own keys and values, what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config

from etude.errors import UserError
from etude.models.load import load_model, weight_files
from etude.models.mtp_heads import MtpHeads, keep_apart, load_heads, save_heads
from etude.models.shape import HEADS_FILE, heads_shape
from tests import tiny

DEPTH = 3


def made(family: str, *, shared: bool) -> tuple[Any, MtpHeads]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config_of(family)).eval()
    model.set_attn_implementation("sdpa")
    return model, MtpHeads.for_model(model, depth=DEPTH, shared=shared)


@torch.no_grad()  # type: ignore[untyped-decorator]
def walked(model: Any, heads: MtpHeads, ids: torch.Tensor, cache: Any, begin: int, end: int) -> list[torch.Tensor]:
    """Return h of every depth at some positions, given what the cache holds of those before them."""
    decoder = model.get_decoder()
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state[:, begin:end]
    places, found = torch.arange(begin, end)[None], []
    mask = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)[None, None]
    for depth in range(DEPTH):
        tokens = ids[:, begin + depth + 1 : end + depth + 1]
        hidden = heads.step(depth, hidden, tokens, places, embed=model.get_input_embeddings(), rotary=decoder.rotary_emb,
                            attention_mask=mask, past_key_values=cache)  # fmt: skip
        found.append(hidden)
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_each_depth_has_keys_and_values_of_its_own(family: str, shared: bool) -> None:
    """Positions one by one with transformers' cache give what all at once give: so layer N + depth is a depth's own."""
    model, heads = made(family, shared=shared)
    assert len(heads.layers) == (1 if shared else DEPTH)
    ids = torch.arange(1, 13)[None] * 7 % tiny.VOCABULARY
    whole = walked(model, heads, ids, None, 0, 9)
    cache = DynamicCache()
    parts = [walked(model, heads, ids, cache, place, place + 1) for place in range(9)]
    assert len(cache.layers) == heads.first_layer + DEPTH
    for depth in range(DEPTH):
        assert torch.allclose(torch.cat([part[depth] for part in parts], 1), whole[depth], atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_heads_come_back_as_they_were_saved(tmp_path: Path, family: str, shared: bool) -> None:
    folder = tiny.save_model(tmp_path, family)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    assert load_heads(folder, model) is None
    heads = MtpHeads.for_model(model, depth=2, shared=shared)
    save_heads(folder, heads.state_dict(), depth=2, shared=shared)
    assert heads_shape(folder) == (2, shared)
    back = load_heads(folder, model)
    assert back is not None
    assert (back.depth, back.shared) == (2, shared)
    assert all(torch.equal(weight, back.state_dict()[name]) for name, weight in heads.state_dict().items())
    assert {weight.dtype for weight in load_heads(folder, model.bfloat16()).parameters()} == {torch.bfloat16}  # type: ignore[union-attr]


def test_the_index_names_the_weights_and_not_the_heads(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    before = weight_files(folder)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    keep_apart(folder)
    assert not list(folder.glob("*.index.json"))  # nothing to keep apart
    save_heads(folder, MtpHeads.for_model(model, depth=1).state_dict(), depth=1, shared=True)
    keep_apart(folder)
    assert weight_files(folder) == before
    again = load_model(folder, torch.device("cpu"), torch.float32)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    state = MtpHeads.for_model(model, depth=2, shared=False).state_dict()
    save_heads(
        folder, {name: weight for name, weight in state.items() if "layers.1" not in name}, depth=2, shared=False
    )
    with pytest.raises(UserError, match="does not fit the model beside it"):
        load_heads(folder, model)
    with safe_open(folder / HEADS_FILE, framework="pt") as tensors:
        assert len(tensors.metadata()) == 1  # else the same heads would not be the same file
    (folder / HEADS_FILE).write_bytes((folder / HEADS_FILE).read_bytes()[:-10])
    with pytest.raises(UserError, match="is cut off"):
        load_heads(folder, model)
    (folder / "model.safetensors").replace(folder / HEADS_FILE)
    with pytest.raises(UserError, match="does not say what it holds"):
        heads_shape(folder)


def test_a_model_of_another_build_is_refused() -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with pytest.raises(UserError, match="cannot have MTP heads"):
        MtpHeads.for_model(AutoModelForCausalLM.from_config(config), depth=1)
