"""The stages that train, through the command line: a chain of all of them on a tiny base, and what they refuse."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.cli.main import main
from etude.data.loader import Corpus
from etude.data.manifest import load_manifest
from etude.files import files_below, sha256_file
from etude.lineage.licences import licence_files
from etude.lineage.record import load_lineage, load_record
from etude.progress import Reporter
from etude.run.stages.extend import ExtendSettings, measured
from tests import tiny
from tests.conftest import Etude

RECIPE = """
name = "chain"
base = "{base}"
stages = ["cpt", "extend", "sft"]
[data]
length = 2048
heldout = 0.2
separator = "<|end|>"
workers = 1
filters = {{ scrub = false, min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }}
duplicates = {{ near = false }}
[[data.source]]
name = "rows"
jsonl = "{rows}"
unknown = "keep"
[cpt]
tokens = 6144
length = 512
batch = 4
evaluations = 2
evaluation_rows = 4
lora = {{ rank = 4 }}
optimiser = {{ lr = 3e-2 }}
[extend]
tokens = 8192
length = 2048
batch = 2
evaluations = 0
evaluation_rows = 2
retrieval_items = 2
retrieval_keys = 2
retrieval_lengths = [1024]
position_rows = 2
[sft]
conversations = ["{chats}"]
tokens = 4096
length = 256
batch = 4
evaluations = 0
heldout = 0.3
optimiser = {{ lr = 1e-2 }}
"""
CALL = {"id": "1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*words: object) -> int:
    """Run `etude …` in this process and return its exit code."""
    old, sys.argv = sys.argv, ["etude", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as leaving:
            main()
    finally:
        sys.argv = old
    return int(leaving.value.code or 0)


def write_inputs(folder: Path) -> Path:
    """Write a base, a corpus's rows, conversations and the recipe; return the recipe."""
    tiny.save_model(folder / "base")
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(60):
            text = "\n".join(
                f"def function_{number}_{line}(value):\n    return value + {line}" for line in range(number)
            )
            rows.write(json.dumps({"text": f"# file {number}\n{text}\n"}) + "\n")
    with (folder / "chats.jsonl").open("w") as chats:
        for number in range(20):
            asked = {"role": "user", "content": f"What is {number}?"}
            answer = {"role": "assistant", "content": f"It is {number}."}
            traced = [
                asked,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "text"},
                answer,
            ]
            chats.write(
                json.dumps({"messages": traced, "tools": [TOOL]} if number % 2 else {"messages": [asked, answer]})
                + "\n"
            )
    recipe = folder / "chain.toml"
    recipe.write_text(RECIPE.format(base=folder / "base", rows=folder / "rows.jsonl", chats=folder / "chats.jsonl"))
    return recipe


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all stages."""
    folder = tmp_path_factory.mktemp("chain")
    recipe = write_inputs(folder)
    assert run("run", recipe, "--out", folder / "run", "--cache", folder / "cache") == 0
    return folder / "run"


def results(stage: Path) -> Any:
    return json.loads((stage / "results.json").read_text())


def test_each_model_descends_from_the_one_before(chain: Path) -> None:
    lineage = load_lineage(chain / "sft" / "model")
    names = []
    record = lineage.records[lineage.head]
    while record.parents:
        names.append(record.stage)
        (parent,) = record.parents
        assert parent.record is not None
        record = lineage.records[parent.record]
    assert [*names, record.stage] == ["sft", "extend", "cpt", "base"]


@pytest.mark.parametrize(("stage", "tokens"), [("cpt", 3 * 4 * 512), ("extend", 2 * 2 * 2048), ("sft", 4 * 4 * 256)])
def test_records_say_what_was_spent_and_read(chain: Path, stage: str, tokens: int) -> None:
    record = load_record(chain / stage)
    rows = [json.loads(line) for line in (chain / stage / "metrics.jsonl").read_text().splitlines()]
    assert record.compute.tokens == tokens
    assert record.compute.model_flops == sum(row.get("flops", 0) for row in rows) > 0
    assert record.compute.device_seconds == pytest.approx(sum(row.get("device_seconds", 0) for row in rows), abs=1e-3)
    (use,) = record.data
    if stage == "sft":
        assert use.name == "chats.jsonl"
    else:
        assert (use.name, use.tokens, use.digest) == ("rows", tokens, load_manifest(chain / "data").sources[0].digest)


def test_the_tree_reaches_the_corpus_and_knows_when_its_manifest_was_changed(chain: Path, etude: Etude) -> None:
    corpus = load_record(chain / "data")
    lineage = load_lineage(chain / "sft" / "model")
    assert {record.stage: record.corpus for record in lineage.records.values() if record.corpus} == {
        "cpt": corpus.id, "extend": corpus.id,
    }  # fmt: skip
    assert lineage.corpora == {corpus.id: corpus}
    manifest = chain / "data" / "manifest.json"
    assert corpus.outputs["manifest.json"].sha256 == sha256_file(manifest)
    assert f"data (corpus)  record {corpus.id[:12]}" in etude("lineage", "show", chain, "--verify").out
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(b'"kept": ', b'"kept":  ', 1).replace(b"\n", b"", 1))
    try:
        said = etude("lineage", "show", chain, "--verify")
        refused = etude("release", chain, chain.parent / "refused", "--acknowledge", "unknown-data")
    finally:
        manifest.write_bytes(before)
    assert (said.code, refused.code) == (2, 1)
    assert "data/manifest.json is not the file that was recorded" in said.err
    assert "data/manifest.json is not the file that was recorded" in refused.out + refused.err


def test_no_file_of_a_release_names_a_folder_of_this_machine(chain: Path, etude: Etude) -> None:
    out = chain.parent / "released"
    cache = chain.parent / "cache"
    said = etude(
        "release", chain, out, "--acknowledge", "unknown-data", "--base", chain / "base/model", "--cache", cache
    )
    assert said.code == 0, said.out + said.err
    payloads = re.compile(rb'"payload": *"([^"]+)"')
    for file in files_below(out):
        content = file.read_bytes()
        texts = [content, *(base64.b64decode(found) for found in payloads.findall(content))]
        for place in (chain.parent, Path.home(), Path.cwd()):
            assert not any(f"{place}/".encode() in text for text in texts), (file, place)
    records = load_lineage(out).records.values()
    assert {use.source for record in records for use in record.data} == {"jsonl …/rows.jsonl", "file …/chats.jsonl"}
    assert etude("verify", out, "--cache", cache).code == 0


def test_training_helps_where_it_should(chain: Path) -> None:
    (code,) = results(chain / "cpt")["domains"]
    assert code["change"] < 0
    assert code["after"] - code["before"] == pytest.approx(code["change"])
    chat = results(chain / "sft")["domains"][0]
    assert chat["domain"] == "chat answers"
    assert chat["change"] < -0.1


def test_each_stage_starts_where_the_last_ended(chain: Path) -> None:
    """The corpus is measured on the same rows; only the length of rows differs between cpt and extend."""
    before = {row["domain"]: row["before"] for row in results(chain / "sft")["domains"]}
    model = AutoModelForCausalLM.from_pretrained(chain / "extend" / "model")
    assert before["code"] > 0
    assert model.config.max_position_embeddings == 2048
    assert model.config.rope_parameters["rope_theta"] > 10_000
    long = results(chain / "extend")["long"]
    assert set(long["parent"]["retrieval"]) == {"1024"}
    assert [bucket["last"] for bucket in long["child"]["positions"]["code"]][-1] == 2047


def test_asking_at_long_contexts_shows_how_far_it_is_and_can_be_stopped(chain: Path) -> None:
    settings = ExtendSettings(tokens=1, length=2048, retrieval_items=2, retrieval_keys=2, retrieval_lengths=[512, 1024])
    reporter = Reporter(quiet=True)
    told: list[dict[str, Any]] = []
    reporter.listener = told.append
    asked = (chain / "extend" / "model", Corpus.open(chain / "data"), settings, 0, reporter)
    found = measured(*asked)
    assert set(found["retrieval"]) == {"512", "1024"}
    assert told[-1]["total"] == 2 * (512 + 1024)
    assert 0.9 * told[-1]["total"] < told[-1]["done"] <= told[-1]["total"]

    def stop() -> None:
        raise KeyboardInterrupt

    reporter.check_stop = stop
    with pytest.raises(KeyboardInterrupt):
        measured(*asked)


def test_the_saved_model_knows_its_chat(chain: Path) -> None:
    folder = chain / "sft" / "model"
    tokeniser = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = tokeniser.convert_tokens_to_ids("<|im_end|>")
    assert end == len(tokeniser) - 5  # one of six that were added
    assert model.generation_config.eos_token_id == end
    assert model.get_input_embeddings().weight.shape[0] >= len(tokeniser)
    asked = tokeniser.apply_chat_template(
        [{"role": "user", "content": "What is 3?"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nWhat is 3?<|im_end|>\n<|im_start|>assistant\n"
    assert [file.name for file in licence_files(folder)] == ["LICENSE"]
    assert not (folder / "LICENSE").exists()  # it lies below LICENSES, as the base's


def test_a_finished_chain_is_kept(chain: Path, etude: Etude) -> None:
    said = etude("run", chain / "recipe.toml", "--out", chain, "--cache", chain.parent / "cache")
    assert said.code == 0
    assert said.err.count("unchanged, kept") == 5


def test_pretrain_makes_a_model_of_nothing(tmp_path: Path, etude: Etude) -> None:
    write_inputs(tmp_path)
    (tmp_path / "MINE").write_text("Do as you like.\n")
    recipe = tmp_path / "pretrain.toml"
    recipe.write_text(
        f'name = "new"\nstages = ["pretrain"]\n[data]\nlength = 128\nheldout = 0.2\nworkers = 1\ntokeniser = {{ source = "train", vocabulary = 300 }}\n'
        "filters = { scrub = false, min_chars = 1, max_repeated_lines = 1.0, max_compression = 100.0 }\nduplicates = { near = false }\n"
        f'[[data.source]]\nname = "rows"\njsonl = "{tmp_path / "rows.jsonl"}"\nunknown = "keep"\n'
        f'[pretrain]\ntokens = 4096\nbatch = 4\nevaluations = 1\nlicence = "{tmp_path / "MINE"}"\n'
        "model = { width = 32, layers = 2, heads = 2, kv_heads = 1, head_width = 16, feed_forward = 64, context = 128 }\n"
    )
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    assert said.code == 0, said.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/pretrain/model")
    assert (model.config.vocab_size, model.config.hidden_size, model.dtype) == (300, 32, torch.bfloat16)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run/pretrain/model")) == 300
    assert (tmp_path / "run/pretrain/model/LICENSE").read_text() == "Do as you like.\n"
    record = load_record(tmp_path / "run/pretrain")
    assert record.parents == []
    assert [(licence.file, licence.inherited_from) for licence in record.licences] == [("LICENSE", "this recipe")]
    assert results(tmp_path / "run/pretrain")["domains"][0]["change"] < -0.5


BAD = {
    "too long for the model": (["cpt.length=2048", "cpt.tokens=8192", "extend.length=4096"], "longer than the model's context of 1024"),
    "no divisor": (["cpt.length=500"], "must"),
    "no extension": (["extend.length=1024"], "already has a context of 1024"),
    "unknown domain": (['cpt.shares={ cod = 1.0 }'], "did you mean 'code'"),
    "shares that lack": (['cpt.shares={ code = 0.5 }'], "add up to 1"),
    "no template": (['sft.template="base"'], "has no chat template"),
    "no such template": (['sft.template="none.jinja"'], "none.jinja"),
    "nothing fits": (["sft.length=16"], "hides every token"),
    "no such file": (['sft.conversations=["missing.jsonl"]'], "missing.jsonl"),
    "betas": (["cpt.optimiser.betas=[0.9]"], "betas"),
    "muon's": (["cpt.optimiser.momentum=0.9"], "momentum"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(chain: Path, tmp_path: Path, etude: Etude, name: str) -> None:
    changes, expected = BAD[name]
    words = [word for change in changes for word in ("--set", change)]
    recipe = chain.parent / "chain.toml"
    said = etude("run", recipe, *words, "--out", tmp_path / "run", "--cache", chain.parent / "cache")
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert said.code == 2
    assert len(errors) == 1
    assert expected in errors[0]
    assert "Traceback" not in said.err


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, etude: Etude) -> None:
    recipe = write_inputs(tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    assert said.code == 2
    assert "model.norm.weight holds values that are not finite" in said.err


def test_a_damaged_shard_is_not_trained_on(tmp_path: Path, etude: Etude) -> None:
    recipe = write_inputs(tmp_path)
    words = ("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    assert etude(*words, "--until", "data").code == 0
    shard = next((tmp_path / "run/data/shards").glob("*train*.tokens.npy"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    said = etude(*words)
    assert said.code == 2
    assert "is not what was built; delete the corpus's folder and build it again" in said.err
    content[-1] ^= 1
    shard.write_bytes(content)
    manifest = tmp_path / "run/data/manifest.json"
    manifest.write_text(manifest.read_text().replace("0.1.0", "0.1.1", 1))
    assert "manifest.json is not what was built; delete the corpus's folder" in etude(*words).err


def test_another_vocabulary_is_refused(tmp_path: Path, etude: Etude) -> None:
    recipe = write_inputs(tmp_path)
    changed = recipe.read_text().replace(
        "workers = 1", 'workers = 1\ntokeniser = { source = "train", vocabulary = 300 }'
    )
    recipe.write_text(changed.replace('separator = "<|end|>"\n', ""))
    said = etude("run", recipe, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    assert said.code == 2
    assert "another vocabulary than the model's" in said.err


def test_a_changed_recipe_starts_anew_and_says_so(chain: Path, etude: Etude) -> None:
    recipe = chain.parent / "chain.toml"
    said = etude(
        "run", recipe, "--set", "cpt.tokens=8192", "--out", chain, "--cache", chain.parent / "cache", "--until", "cpt"
    )
    assert said.code == 0
    assert "cpt: its inputs changed; the result so far will be kept in" in said.err
