from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import save_file

from etude.errors import UserError
from etude.files import digest_of_files
from etude.lineage.audit.examine import compare_tokens, open_model
from etude.lineage.audit.read_weights import Tokens, shared
from etude.lineage.audit.sketch import (
    SUFFIX,
    Facts,
    Sketch,
    digest_weights,
    hashed,
    known_sketches,
    make_sketch,
    middles,
    place_for,
    project,
    shipped,
)
from etude.lineage.record import load_lineage
from etude.models.bases import known_bases, resolve
from etude.progress import Reporter
from tests.lineage.audit.made import gaussian
from tests.lineage.audit.relatives import HIDDEN, llama, save

FACTS = Facts(name="base", source="here", licence="Apache-2.0", model_digest="ab" * 32, made="2026-11-15")


def sketch_in(folder: Path, facts: Facts = FACTS) -> Sketch:
    opened = open_model(save(folder, llama(0)))
    return make_sketch(opened.weights, opened.tokens, facts)


def test_a_sketch_holds_what_it_says_to_eight_bits(tmp_path: Path) -> None:
    sketch, model = sketch_in(tmp_path / "base"), llama(0)
    assert sketch.layers == [1, 3, 5]
    assert sorted(sketch.names) == sorted(
        [f"{layer}.{part}{steps}" for layer in (1, 3, 5) for part in ("up", "gate", "key") for steps in ("", ".steps")]
        + ["vocabulary", "words", "embedding", "embedding.steps"]
    )
    for layer in sketch.layers:
        for part, name in (("up", "mlp.up_proj"), ("gate", "mlp.gate_proj"), ("key", "self_attn.k_proj")):
            rows = model[f"model.layers.{layer}.{name}.weight"]
            whole, kept = rows if part == "key" else project(rows), sketch.part(layer, part)
            assert kept is not None
            assert np.abs(kept - whole).max() <= np.abs(whole).max() / 127 / 2 * 1.001
    words = sketch.embedding(sketch.words)
    assert np.abs(words - model["model.embed_tokens.weight"][sketch.words]).max() < 0.02
    assert len(sketch.words) == 3 * HIDDEN
    assert sketch.words[0] == 1  # 0 is special
    assert sketch.part(2, "up") is None


def test_a_sketch_comes_back_from_its_file(tmp_path: Path) -> None:
    made = sketch_in(tmp_path / "base")
    made.save(tmp_path / "base.sketch.safetensors")
    read = Sketch.load(tmp_path / "base.sketch.safetensors")
    assert (read.facts, read.shape, read.names) == (made.facts, made.shape, made.names)
    assert all(np.array_equal(read.read(name), made.read(name)) for name in made.names)
    assert read.tokens == made.tokens


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_projections_keep_cosines(seed: int) -> None:
    """Johnson and Lindenstrauss: a cosine c of rows is kept up to about (1 − c²)/√RANK."""
    chance = np.random.default_rng(seed)
    a, other = gaussian(chance, 200, 576), gaussian(chance, 200, 576)
    b = 0.6 * a + 0.8 * other

    def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((x * y).sum(axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1))

    errors = cosines(project(a), project(b)) - cosines(a, b)
    assert project(a).shape == (200, 256)
    assert np.abs(errors).mean() < 0.06
    assert abs(errors.mean()) < 0.02


def test_the_signs_never_change() -> None:
    """They are part of the file format: with others, every sketch ever made would be worthless, and silently so."""
    first = project(np.eye(16, dtype=np.float32))
    assert first.shape == (16, 8)
    assert "".join("+" if sign > 0 else "-" for sign in first[:2].ravel()) == "------++-+-+-+++"
    assert abs(project(np.eye(576, dtype=np.float32)).mean()) < 0.01


def test_middles() -> None:
    assert middles(3, range(30)) == [5, 15, 25]
    assert middles(6, [5, 15, 25]) == [5, 15, 25]
    assert middles(3, range(1)) == [0]
    assert middles(3, range(2)) == [0, 1]


def test_hashed_words_are_compared_as_words_are() -> None:
    a = Tokens(["<end>", *map(str, range(200))], [], frozenset({"<end>"}))
    b = Tokens(["<end>", *map(str, range(50, 300)), None], [], frozenset({"<end>"}))
    plain, short = compare_tokens(a, b), compare_tokens(hashed(a), hashed(b))
    assert short.shared == pytest.approx(plain.shared, abs=1)  # without the special one
    assert [ids.tolist() for ids in shared(hashed(a), hashed(b))] == [ids.tolist() for ids in shared(a, b)]


def test_files_that_are_no_sketches_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sketch.safetensors"
    path.write_bytes(b"not a sketch")
    with pytest.raises(UserError, match=r"x\.sketch\.safetensors is no sketch .*make one with etude library add"):
        Sketch.load(path)
    about = {"format": "etude-sketch/0", "facts": FACTS.model_dump(), "shape": {}}
    for metadata in ({}, {"sketch": "{"}, {"sketch": json.dumps(about)}):
        save_file({"x": np.zeros(1, np.int8)}, path, metadata)
        with pytest.raises(UserError, match="is no sketch"):
            Sketch.load(path)


def test_a_damaged_sketch_is_named_and_the_others_serve(tmp_path: Path) -> None:
    (tmp_path / f"broken{SUFFIX}").write_bytes(b"nothing")
    sketch_in(tmp_path / "base").save(tmp_path / f"whole{SUFFIX}")
    lines = io.StringIO()
    reporter = Reporter(console=Console(file=lines, width=300))
    assert [each.name for each in known_sketches(tmp_path, reporter)] == ["smollm2-135m", "sprout", "base"]
    assert "left out" in lines.getvalue()
    assert f"broken{SUFFIX} is no sketch" in lines.getvalue()


def test_no_base_is_replaced_unseen(tmp_path: Path) -> None:
    path = place_for("base", tmp_path / "mine")
    sketch_in(tmp_path / "base").save(path)
    assert [each.name for each in known_sketches(tmp_path / "mine", Reporter(quiet=True))] == [
        "smollm2-135m",
        "sprout",
        "base",
    ]
    taken = (("base", f"has a 'base' already: {path}"), ("sprout", "has a 'sprout' already"))
    for name, why in (*taken, ("../x", "no name for a sketch"), ("", "no name for a sketch")):
        with pytest.raises(UserError, match=why):
            place_for(name, tmp_path / "mine")


def test_the_shipped_sketches_are_of_the_bases_they_name() -> None:
    known = {each.name: each for each in known_sketches(None, Reporter(quiet=True))}
    assert set(known) == {"smollm2-135m", "sprout"}
    for name, sketch in known.items():
        assert sketch.facts.licence == known_bases()[name].licence
        assert sketch.shape.model_type == known_bases()[name].family
    sizes = {path.name.split(".")[0]: path.stat().st_size for path in shipped().iterdir()}
    assert sizes["smollm2-135m"] < 4_000_000
    assert sizes["sprout"] < 1_000_000


def test_the_sketch_of_sprout_is_that_of_the_sprout_that_ships() -> None:
    """If this fails, sprout was trained anew: delete its sketch and make it again with `etude library add sprout sprout`."""
    sprout, lineage = open_model(resolve("sprout").folder), load_lineage(resolve("sprout").folder)
    kept = next(each for each in known_sketches(None, Reporter(quiet=True)) if each.name == "sprout")
    assert kept.facts.model_digest == lineage.records[lineage.head].model_digest
    assert kept.facts.model_digest == digest_weights(sprout.weights.path, Reporter(quiet=True))
    again = make_sketch(sprout.weights, sprout.tokens, kept.facts)
    assert again.names == kept.names
    for name in kept.names:  # sums may be rounded otherwise on another machine
        assert np.allclose(again.read(name).astype(float), kept.read(name).astype(float), atol=1, rtol=1e-5)


def test_heads_beside_a_model_count_as_its_weights_as_in_a_record(tmp_path: Path) -> None:
    files = {"model.safetensors": b"model", "mtp.safetensors": b"heads"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    told = digest_of_files({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    assert digest_weights(tmp_path, Reporter(quiet=True)) == told
