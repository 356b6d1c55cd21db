from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from etude.errors import UserError
from etude.lineage.audit.descent_tests import EMBEDDING, MATCHING, NEURONS, ROUTER
from etude.lineage.audit.examine import IDENTITY, Finding, Opened, examine, examine_library, open_model
from etude.lineage.audit.sketch import Facts, Sketch, make_sketch
from etude.progress import Reporter
from tests.lineage.audit import zoo
from tests.lineage.audit.relatives import (
    HIDDEN,
    drifted,
    flipped,
    llama,
    narrower,
    renamed,
    rescaled,
    save,
    shallower,
    shuffled,
    turned,
    upcycled,
)

QUIET = Reporter(quiet=True)
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


def sketch_of(model: Opened, name: str = "") -> Sketch:
    facts = Facts(name=name or model.name, source="here", licence=None, model_digest="0" * 64, made="2026-11-15")
    return make_sketch(model.weights, model.tokens, facts)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_model(save(tmp_path_factory.mktemp("base") / "base", llama(0)), "base")


def both(base: Opened, suspect: Path) -> tuple[Finding, Finding]:
    """Examine a model against the whole base and against its sketch."""
    opened = open_model(suspect)
    return examine(base, opened, QUIET), examine(sketch_of(base), opened, QUIET)


def p_of(finding: Finding, name: str, *, rotated: bool = False) -> float:
    found = [test.log10_p for test in finding.tests if (test.name, test.rotated) == (name, rotated)]
    assert len(found) == 1, finding.tests
    return found[0] or 0.0


def test_a_copy_trained_on_is_derived_and_a_stranger_is_not(base: Opened, tmp_path: Path) -> None:
    for finding in both(base, save(tmp_path / "child", drifted(llama(0), 0.5))):
        assert finding.verdict.word == "derived"
        assert finding.tokens is not None
        assert finding.tokens.kind == "identical"
        assert finding.shapes.kind == "exact"
        assert all(p_of(finding, name) < -30 for name in (NEURONS, MATCHING, EMBEDDING))
    for finding in both(base, save(tmp_path / "stranger", llama(7))):
        assert finding.verdict.word == "none"
        assert finding.verdict.log10_p > -3
        assert {test.rotated for test in finding.tests} == {False, True}  # a rotated copy was looked for


def test_strangers_have_uniform_p_values_against_sketches_too(base: Opened, tmp_path: Path) -> None:
    sketch = sketch_of(base)
    found = [
        examine(sketch, open_model(save(tmp_path / str(seed), llama(seed), words=False)), QUIET)
        for seed in range(20, 60)
    ]
    for name in (NEURONS, MATCHING):
        for rotated in (False, True):
            p_values = sorted(10 ** p_of(finding, name, rotated=rotated) for finding in found)
            distance = max((i + 0.5) / 40 - p for i, p in enumerate(p_values))  # too large they may be: two are tried
            assert distance < 1.63 / math.sqrt(40), (name, rotated)  # Kolmogorov's bound for one in a hundred


def test_the_same_weights_are_told_from_a_copy_of_most_of_them(base: Opened, tmp_path: Path) -> None:
    same = examine(base, open_model(save(tmp_path / "same", llama(0))), QUIET)
    assert same.verdict.word == "same"
    other = {name: each + 1e-3 if "layers.5." in name else each for name, each in llama(0).items()}
    found = examine(base, open_model(save(tmp_path / "frozen", other)), QUIET)
    assert found.verdict.word == "derived"
    share = next(test.effect for test in found.tests if test.name == IDENTITY)
    assert share == pytest.approx(5 / 6)


def test_units_in_another_order_are_found_by_the_gates(base: Opened, tmp_path: Path) -> None:
    for finding in both(base, save(tmp_path / "shuffled", shuffled(drifted(llama(0), 0.3)))):
        assert p_of(finding, NEURONS) > -4
        assert p_of(finding, MATCHING) < -30
        assert finding.verdict.word == "derived"


def test_a_rotated_copy_is_turned_back(base: Opened, tmp_path: Path) -> None:
    for finding in both(base, save(tmp_path / "turned", turned(drifted(llama(0), 0.3)))):
        assert all(p_of(finding, name) > -4 for name in (NEURONS, MATCHING, EMBEDDING))
        assert p_of(finding, NEURONS, rotated=True) < -30
        assert p_of(finding, MATCHING, rotated=True) < -30
        assert finding.verdict.word == "derived"
        assert "rotation" in finding.verdict.sentence
    for finding in both(base, save(tmp_path / "disguised", shuffled(turned(drifted(llama(0), 0.2))))):
        assert p_of(finding, NEURONS, rotated=True) > -4
        assert p_of(finding, MATCHING, rotated=True) < -30


def test_fewer_layers_are_paired_with_those_they_were(base: Opened, tmp_path: Path) -> None:
    made = shallower(drifted(llama(0), 0.3), [0, 1, 3, 4])  # the sketch holds layers 1, 3 and 5
    whole, sketch = both(base, save(tmp_path / "shallow", made, num_hidden_layers=4))
    assert whole.verdict.word == sketch.verdict.word == "derived"
    neurons = next(test for test in whole.tests if test.name == NEURONS)
    assert neurons.layers == (0, 1, 3, 4)
    assert neurons.effect > 0.99
    kept = next(test for test in sketch.tests if test.name == NEURONS)
    assert kept.effect == pytest.approx(2 / 3, abs=0.15)  # two of its three layers were kept


def test_fewer_dimensions_and_units_are_matched(base: Opened, tmp_path: Path) -> None:
    keep, units = np.arange(0, HIDDEN, 4) + 1, np.arange(0, 96, 2)
    keep = np.sort(np.concatenate([keep, np.arange(0, HIDDEN, 2)]))
    made = narrower(drifted(llama(0), 0.1), keep, units)
    for finding in both(base, save(tmp_path / "narrow", made, hidden_size=len(keep), intermediate_size=len(units))):
        assert p_of(finding, EMBEDDING) < -30
        assert p_of(finding, NEURONS) < -30
        assert finding.verdict.word == "derived"
        assert finding.shapes.kind == "pruned"


def test_further_words_change_nothing(base: Opened, tmp_path: Path) -> None:
    made, further = drifted(llama(0), 0.3), np.random.default_rng(9).standard_normal((12, HIDDEN)).astype(np.float32)
    made["model.embed_tokens.weight"] = np.concatenate([made["model.embed_tokens.weight"], further])
    for finding in both(base, save(tmp_path / "longer", made, vocab_size=len(made["model.embed_tokens.weight"]))):
        assert finding.shapes.kind == "extended vocabulary"
        assert finding.verdict.word == "derived"


def test_layers_without_attention_are_paired_by_depth(base: Opened, tmp_path: Path) -> None:
    made = shallower(drifted(llama(0), 0.3), [0, 2, 4])
    made = {name: each for name, each in made.items() if "self_attn" not in name}
    finding = examine(base, open_model(save(tmp_path / "plain", made, num_hidden_layers=3)), QUIET)
    neurons = next(test for test in finding.tests if test.name == NEURONS)
    assert neurons.effect == pytest.approx(0.5, abs=0.2)  # layers 0, 2 and 4 of six find themselves
    assert finding.verdict.word == "derived"


def test_experts_are_compared_with_the_layer_they_were_copied_from(base: Opened, tmp_path: Path) -> None:
    grown = open_model(save(tmp_path / "grown", upcycled(llama(0), 4), **MOE), "grown")
    for finding in (examine(base, grown, QUIET), examine(sketch_of(base), grown, QUIET)):
        assert finding.verdict.word == "derived"
        assert p_of(finding, NEURONS) < -30
    assert examine(grown, base, QUIET).verdict.word == "derived"
    assert examine(sketch_of(grown), base, QUIET).verdict.word == "derived"


def test_experts_in_another_order_are_paired_by_the_router(base: Opened, tmp_path: Path) -> None:
    model, other = upcycled(llama(0), 4), {}
    for name, each in model.items():
        unlike = {
            index: np.random.default_rng(index).standard_normal(each.shape).astype(np.float32) for index in range(4)
        }
        index = next((index for index in range(4) if f".experts.{index}." in name), None)
        other[name] = each if index is None else unlike[index]  # four experts that are not copies of one FFN
    moved = {}
    for name, each in other.items():
        index = next((index for index in range(4) if f".experts.{index}." in name), None)
        new = name if index is None else name.replace(f".experts.{index}.", f".experts.{(index + 1) % 4}.")
        moved[new] = np.roll(each, 1, axis=0) if name.endswith("mlp.gate.weight") else each
    first = open_model(save(tmp_path / "first", other, **MOE), "first")
    second = open_model(save(tmp_path / "second", drifted(moved, 0.2), **MOE), "second")
    for finding in (examine(first, second, QUIET), examine(sketch_of(first), second, QUIET)):
        assert p_of(finding, NEURONS) < -30
        assert p_of(finding, ROUTER) > -6  # four experts cannot prove anything by their order


@pytest.mark.parametrize("family", zoo.FURTHER)
def test_every_family_is_known_again(family: str, tmp_path: Path) -> None:
    zoo.build(family).save_pretrained(tmp_path / "base")
    zoo.build(family, seed=1).save_pretrained(tmp_path / "stranger")
    zoo.build(family).save_pretrained(tmp_path / "child")
    file, chance = tmp_path / "child/model.safetensors", np.random.default_rng(0)
    noisy = {
        name: each + 0.1 * chance.standard_normal(each.shape).astype(np.float32)
        for name, each in load_file(file).items()
    }
    save_file(noisy, file)
    base, child, stranger = (open_model(tmp_path / name) for name in ("base", "child", "stranger"))
    for reference in (base, sketch_of(base)):
        assert examine(reference, child, QUIET).verdict.word == "derived"
        assert examine(reference, stranger, QUIET).verdict.word == "none"


def test_a_quantised_file_is_known_again(tmp_path: Path) -> None:
    model, file = zoo.build("llama"), tmp_path / "small.gguf"
    zoo.write_gguf(file, model, GGMLQuantizationType.Q4_0, ["<end>", *map(str, range(zoo.VOCAB - 1))])
    model.save_pretrained(tmp_path / "whole")
    whole, small = open_model(tmp_path / "whole"), open_model(file)
    finding = examine(whole, small, QUIET)
    assert finding.verdict.word == "derived"
    assert finding.notes == ("no tokeniser to compare: equal ids are taken for equal words",)
    assert examine(sketch_of(small), whole, QUIET).verdict.word == "derived"


def test_the_best_match_comes_first_and_every_further_base_costs_certainty(base: Opened, tmp_path: Path) -> None:
    child = open_model(save(tmp_path / "child", drifted(llama(0), 0.5)))
    others = [sketch_of(open_model(save(tmp_path / f"{seed}", llama(seed)), f"other-{seed}")) for seed in (3, 4, 5)]
    found = examine_library(child, [*others, sketch_of(base)], QUIET)
    assert found[0].reference == "base"
    assert [finding.verdict.word for finding in found] == ["derived", "none", "none", "none"]
    alone = examine(sketch_of(base), child, QUIET)
    assert found[0].verdict.log10_p == pytest.approx(alone.verdict.log10_p + math.log10(4))


def test_without_common_words_what_cannot_be_compared_is_said(base: Opened, tmp_path: Path) -> None:
    keep, units = np.arange(32), np.arange(96)
    made = narrower({name: each[:100] if "embed" in name else each for name, each in llama(0).items()}, keep, units)
    mute = save(tmp_path / "mute", made, words=False, hidden_size=32, vocab_size=100)
    for finding in both(base, mute):
        assert finding.verdict.word == "none"
        assert finding.tests == ()
        assert finding.notes[0] == "no tokeniser to compare"
        assert "only 0 words in common" in finding.notes[1]
        assert "widths differ" in finding.notes[2]


@pytest.mark.parametrize("how", ["permuted", "negated", "rotated"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_negated_units_in_another_basis_are_found(
    base: Opened, tmp_path: Path, how: str, share: float, drift: float
) -> None:
    """Both change nothing that the model computes; the first hid from cosines, and so the second was never undone."""
    disguised = turned(flipped(drifted(llama(0), drift), share), how)
    for finding in both(base, save(tmp_path / "it", disguised)):
        assert finding.verdict.word == "derived"
        assert finding.verdict.log10_p < -30
    for finding in both(base, save(tmp_path / "units too", shuffled(disguised))):
        assert finding.verdict.word == "related"  # no exact test sees an order that is gone
    for finding in both(base, save(tmp_path / "stranger", turned(flipped(llama(7), share), how))):
        assert finding.verdict.word == "none"


@pytest.mark.parametrize("signs_only", [False, True])
def test_factors_moved_between_norms_and_what_reads_after_them_are_moved_back(
    base: Opened, tmp_path: Path, *, signs_only: bool
) -> None:
    """They change nothing that the model computes, and every layer has its own; in another basis nothing else was left to find."""
    whole = rescaled(drifted(llama(0), 0.3), signs_only=signs_only)
    for finding in both(base, save(tmp_path / "it", whole)):
        assert finding.verdict.word == "derived"
    names = {"model.layers.": "deep.", "self_attn.": "look_", "mlp.": "think_", "model.embed_tokens": "lookup"}
    unnamed = {}
    for name, each in rescaled(llama(0)).items():
        for known, other in names.items():
            name = name.replace(known, other)  # noqa: PLW2901 - one after another
        unnamed[name] = each
    for finding in both(base, save(tmp_path / "unnamed", unnamed)):
        assert finding.verdict.word == "derived"
    order = np.random.default_rng(8).permutation(HIDDEN)
    writes = ("o_proj", "down_proj")
    permuted = {name: each[order] if each.ndim == 1 or any(part in name for part in writes) else each[:, order]
                for name, each in whole.items()}  # fmt: skip
    for finding in both(base, save(tmp_path / "permuted", permuted)):
        assert finding.verdict.word == "derived"
        assert "rescaling" in finding.verdict.sentence
    plain = open_model(save(tmp_path / "plain", llama(0)))
    assert examine(open_model(tmp_path / "it"), plain, QUIET).verdict.word == "derived"  # whichever is disguised
    for finding in both(base, save(tmp_path / "stranger", rescaled(llama(7), signs_only=signs_only))):
        assert finding.verdict.word == "none"


@pytest.mark.parametrize("order", [[5, 3, 1, 4, 2, 0], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 0]])
def test_layers_in_another_order_are_paired_with_those_they_were(
    base: Opened, tmp_path: Path, order: list[int]
) -> None:
    for finding in both(base, save(tmp_path / "it", shallower(drifted(llama(0), 0.3), order))):
        assert finding.verdict.word == "derived"
    for finding in both(base, save(tmp_path / "stranger", shallower(llama(7), order))):
        assert finding.verdict.word == "none"


@pytest.mark.parametrize("names", ["by layer", "by part", "in order"])
def test_tensors_with_unknown_names_are_known_by_their_shapes(base: Opened, tmp_path: Path, names: str) -> None:
    for number, model in enumerate([drifted(llama(0), 0.3), turned(flipped(llama(0)))]):
        for finding in both(base, save(tmp_path / str(number), renamed(model, names))):
            assert finding.verdict.word == "derived"
            assert finding.shapes.kind == "exact"
            assert "known by their shapes" in finding.notes[-1]
    (tmp_path / "0" / "config.json").write_text('{"depth": 6}', encoding="utf-8")  # nor is its config one that is known
    assert examine(base, open_model(tmp_path / "0"), QUIET).verdict.word == "derived"
    for finding in both(base, save(tmp_path / "stranger", renamed(llama(7), names))):
        assert finding.verdict.word == "none"
    renamed_base = open_model(save(tmp_path / "base", renamed(llama(0), names)))
    assert (
        examine(renamed_base, open_model(save(tmp_path / "child", drifted(llama(0), 0.3))), QUIET).verdict.word
        == "derived"
    )


def test_a_renamed_mixture_is_known_by_its_shapes(base: Opened, tmp_path: Path) -> None:
    names = {".mlp.experts.": "/e", ".mlp.gate.": "/route.", ".up_proj.": "/c.", ".gate_proj.": "/a.", ".down_proj.": "/b.",
             "model.layers.": "deep", "self_attn": "look", "model.embed_tokens": "lookup"}  # fmt: skip
    made = {}
    for name, each in upcycled(llama(0), 4).items():
        for known, other in names.items():
            name = name.replace(known, other)  # noqa: PLW2901 - one after another
        made[name] = each
    suspect = save(tmp_path / "it", made, model_type="mixtral")
    assert open_model(suspect).shape.experts == 4
    for finding in both(base, suspect):
        assert finding.verdict.word == "derived"


def test_names_without_numbers_and_order_are_refused(tmp_path: Path) -> None:
    hashed = {hashlib.sha256(name.encode()).hexdigest(): each for name, each in llama(0).items()}
    with pytest.raises(UserError, match="no layers known"):
        open_model(save(tmp_path / "it", dict(sorted(hashed.items()))))


def test_effort_is_counted(base: Opened, tmp_path: Path) -> None:
    child = open_model(save(tmp_path / "child", drifted(llama(0), 0.5)))
    examine(sketch_of(base), child, QUIET)  # what it imports is loaded before memory is measured
    child.weights.bytes_read = 0
    tracemalloc.start()
    finding = examine(sketch_of(base), child, QUIET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert finding.bytes_total == (tmp_path / "child/model.safetensors").stat().st_size
    rows = 3 * (96 + 96 + 32) + len(sketch_of(base).words)  # of three layers up, gate and key, and the words
    assert finding.bytes_read == 4 * HIDDEN * rows
    assert 0 < peak < 2_000_000
    assert finding.seconds > 0
    told = json.loads(json.dumps(asdict(finding), allow_nan=False))
    assert told["verdict"]["word"] == "derived"
    assert told["tests"][0]["name"] == EMBEDDING
