from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import UserError
from etude.models.bases import resolve
from etude.models.load import choose_device, default_dtype, load_model, load_tokeniser
from etude.models.shape import model_shape
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, a test's own."""
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


def change_weights(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_a_model_is_loaded_as_it_was_saved(tiny_base: Path) -> None:
    loaded = load_model(tiny_base, CPU)
    stored = load_file(tiny_base / "model.safetensors")
    state = loaded.state_dict()
    assert {name for name in state if name not in stored} == {"lm_head.weight"}  # tied
    for name, tensor in stored.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert not loaded.training
    assert load_model(tiny_base, CPU, torch.bfloat16).dtype == torch.bfloat16


def test_the_shipped_base_writes_text() -> None:
    folder = resolve("sprout").folder
    model, tokeniser = load_model(folder, CPU), load_tokeniser(folder)
    assert model.dtype == torch.float32  # stored as bf16; computed in what a CPU is exact in
    text = "def add(left, right):\n    return left + right\n"
    ids = tokeniser(text, return_tensors="pt").input_ids
    assert tokeniser.decode(ids[0]) == text
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss < torch.log(torch.tensor(float(len(tokeniser)))) / 2  # far better than chance, so the weights are right


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_refused_and_not_made_up(model: Path, name: str) -> None:
    change_weights(model, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=one_line(model, "lack 1 tensors", name)):
        load_model(model, CPU)


def test_a_tensor_that_the_model_has_no_place_for_is_refused_and_not_dropped(model: Path) -> None:
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # computed anyway
    change_weights(model, lambda tensors: tensors.update(known))
    load_model(model, CPU)
    change_weights(model, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.ones(2, 2)}))
    with pytest.raises(UserError, match=one_line(model, "no place for 1", "model.layers.0.mlp.extra.weight", "lose")):
        load_model(model, CPU)


def test_a_config_with_fewer_layers_than_the_weights_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(model, "no place for 9", "model.layers.1")):
        load_model(model, CPU)


def test_a_missing_embedding_is_missing_as_the_head_too(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(UserError, match=one_line(model, "lack 2 tensors", "lm_head.weight")):
        load_model(model, CPU)


def test_a_tensor_of_another_shape_is_refused(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(UserError, match=one_line(model)):
        load_model(model, CPU)


def test_a_config_with_more_layers_than_the_weights_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(model, "lack 9 tensors", "model.layers.2")):
        load_model(model, CPU)


@pytest.mark.parametrize(
    "change",
    [
        "{",
        "",
        "[]",
        "{}",
        b"\xff\xfe{",
        {"model_type": "no-such-model"},
        {"model_type": "clip"},
        {"hidden_act": "no-such-function"},
        pytest.param("null"),  # TypeError
        pytest.param({"hidden_size": "wide"}),  # StrictDataclassFieldValidationError
        pytest.param({"num_attention_heads": 5}),  # StrictDataclassClassValidationError
        pytest.param({"num_attention_heads": 0}),  # ZeroDivisionError
    ],
    ids=str,
)
def test_a_broken_config_is_refused_in_one_line(model: Path, change: str | bytes | dict[str, Any]) -> None:
    config = model / "config.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(config.read_text("utf-8")) | change)
    config.write_bytes(change.encode() if isinstance(change, str) else change)
    with pytest.raises(UserError, match=one_line(model)):
        load_model(model, CPU)


def test_weights_that_are_cut_off_are_refused_before_they_are_loaded(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=one_line(weights, "is cut off")):
        load_model(model, CPU)


def test_weights_of_an_unknown_kind_are_refused_in_one_line(model: Path) -> None:
    header = json.dumps({"a": {"dtype": "ZZ", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(UserError, match=one_line(model)):
        load_model(model, CPU)


def test_running_out_of_gpu_memory_is_left_to_whoever_chose_the_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        load_model(model, CPU)


def test_a_tokeniser_gives_every_text_back(tiny_base: Path) -> None:
    tokeniser = load_tokeniser(tiny_base)
    text = "def ünï(x):\n\treturn 10_000  # 😀\n"
    assert tokeniser.decode(tokeniser(text).input_ids) == text


def test_a_folder_without_a_tokeniser_is_refused(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(UserError, match=one_line(model, "no tokeniser", "tokenizer.json")):
        load_tokeniser(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokeniser_file_cut_off_is_refused_in_one_line(model: Path, name: str) -> None:
    whole = (model / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        (model / name).write_bytes(whole[:length])
        with pytest.raises(UserError, match=one_line(model, "tokeniser cannot be loaded")):
            load_tokeniser(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe\x00"),
        pytest.param("tokenizer.json", b"[]"),  # TypeError
        pytest.param("tokenizer.json", b"null"),  # AttributeError
        pytest.param("tokenizer_config.json", b"[]"),  # AttributeError
    ],
)
def test_a_damaged_tokeniser_file_is_refused_in_one_line(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(UserError, match=one_line(model, "tokeniser cannot be loaded")):
        load_tokeniser(model)


@pytest.mark.parametrize("part", ["model", "pre_tokenizer", "decoder", "added_tokens"])
def test_a_tokeniser_with_a_part_of_no_known_kind_is_refused_in_one_line(model: Path, part: str) -> None:
    parts = json.loads((model / "tokenizer.json").read_text("utf-8"))
    parts[part] = {"type": "NoSuchKind"}
    (model / "tokenizer.json").write_text(json.dumps(parts), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(model, "tokeniser cannot be loaded")):
        load_tokeniser(model)


def test_a_gpu_is_refused_where_there_is_none_and_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=one_line("cuda", "no GPU", "'cpu'", "'auto'")):
        choose_device("cuda")
    assert choose_device("auto") == choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == CPU
    assert (default_dtype(CPU), default_dtype(torch.device("cuda"))) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("ask", [lambda folder: load_model(folder, CPU), model_shape])
def test_a_multimodal_checkpoint_is_told_what_to_do(model: Path, ask: Callable[[Path], object]) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=one_line(model, "is multimodal", "text-only release, or save its language model")
    ):
        ask(model)
