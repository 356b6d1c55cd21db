from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import tiny
from tests.lineage.audit.relatives import drifted, llama, save

if TYPE_CHECKING:
    from tests.conftest import Etude


def test_two_models(etude: Etude, tmp_path: Path) -> None:
    base, child = save(tmp_path / "base", llama(0)), save(tmp_path / "child", drifted(llama(0), 0.5))
    said = etude("audit", child, base)
    assert said.code == 0, said.err
    assert "child against base (weights)" in said.out
    for test in ("aligned neurons", "gate/up matching", "embedding basis", "query/key similarity"):
        assert test in said.out
    assert "derived: evidence of shared initialisation" in said.out
    assert "which of the two came first cannot be told" in said.out
    assert " read of " in said.out
    told = json.loads(etude("audit", child, base, "--json").out)
    assert (told["suspect"], told["reference"], told["verdict"]["word"]) == ("child", "base", "derived")
    stranger = save(tmp_path / "stranger", llama(5))
    assert "none: no evidence of shared initialisation" in etude("audit", stranger / "model.safetensors", base).out


def test_a_base_is_added_to_the_library_and_found(etude: Etude, tmp_path: Path) -> None:
    base, child, cache = (
        save(tmp_path / "base", llama(0)),
        save(tmp_path / "child", drifted(llama(0), 0.5)),
        tmp_path / "cache",
    )
    (base / "LICENSE").write_text(Path("LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    added = json.loads(etude("library", "add", base, "mine", "--cache", cache, "--json").out)
    assert added["licence"] == "Apache-2.0"
    assert added["file"] == str(cache / "sketches/mine.sketch.safetensors")
    assert etude("library", "add", base, "mine", "--cache", cache).code == 2
    listed = json.loads(etude("library", "list", "--cache", cache, "--json").out)
    assert [each["name"] for each in listed] == ["smollm2-135m", "sprout", "mine"]
    assert listed[2]["model_digest"] == added["model_digest"]
    assert "Apache-2.0" in etude("library", "list", "--cache", cache).out
    for path in base.iterdir():  # the sketch is enough
        path.unlink()
    said = etude("audit", child, "--library", "--cache", cache)
    assert said.code == 0, said.err
    assert "child against 3 known bases, best match first" in said.out
    assert "child against mine (sketch)" in said.out
    found = json.loads(etude("audit", child, "--library", "--cache", cache, "--json").out)
    assert [each["verdict"]["word"] for each in found] == ["derived", "none", "none"]
    assert found[0]["reference"] == "mine"


def test_sprout_is_known_by_its_shipped_sketch(etude: Etude, tmp_path: Path) -> None:
    found = json.loads(etude("audit", "sprout", "--library", "--cache", tmp_path, "--json").out)
    assert [(each["reference"], each["verdict"]["word"]) for each in found] == [
        ("sprout", "derived"),
        ("smollm2-135m", "none"),
    ]


def test_what_is_asked_must_be_clear(etude: Etude, tmp_path: Path) -> None:
    for words in (["sprout"], ["sprout", "sprout", "--library"]):
        said = etude("audit", *words)
        assert said.code == 2
        assert "give two models, or one and --library" in said.err
    said = etude("audit", "sprout", tmp_path / "absent")
    assert said.code == 2
    assert "absent" in said.err
    said = etude("library", "add", "sprout", "a b", "--cache", tmp_path)
    assert said.code == 2
    assert "no name for a sketch" in said.err


def test_torch_is_never_loaded(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    code = (
        "import sys; from pathlib import Path; from etude.progress import Reporter;"
        "from etude.lineage.audit.examine import examine, open_model; from etude.lineage.audit.sketch import known_sketches;"
        "import etude.lineage.audit.examine, etude.cli.lineage;"
        f"model = open_model(Path({str(model)!r})); examine(model, model, Reporter(quiet=True)); known_sketches(None, Reporter(quiet=True));"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
