from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.files import sha256_file
from etude.lineage.record import Compute, FileDigest, Lineage
from etude.lineage.tree import changed_weights, describe_compute, find_model, render
from etude.progress import Reporter
from tests.lineage.records import child_of, full_record, three_generations
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from etude.lineage.record import Record


def write_model(folder: Path) -> Path:
    lineage, _ = three_generations()
    lineage.save(folder)
    return folder


def test_a_model_is_found_by_its_folder_its_stage_or_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, last = write_model(run / "zz-first" / "model"), write_model(run / "aa-last" / "model")
    (run / "report").mkdir()
    names = ["zz-first", "aa-last", "report", "not-yet"]
    (run / "run.json").write_text(json.dumps({"stages": [{"name": name} for name in names]}), encoding="utf-8")
    assert find_model(first) == first
    assert find_model(run / "zz-first") == first
    assert find_model(run) == last


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(tmp_path / "nowhere", "does not exist", "runs/NAME/STAGE/model")):
        find_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match=one_line(tmp_path, "lineage.json", "was not written by Etude")):
        find_model(tmp_path)
    file = tmp_path / "file.txt"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match=one_line(file, "was not written by Etude")):
        find_model(file)
    write_model(tmp_path / "runs" / "run" / "stage" / "model")
    with pytest.raises(UserError, match=one_line(tmp_path / "runs")):  # a folder of runs means no one model
        find_model(tmp_path / "runs")


def heads(lines: list[str]) -> list[tuple[int, str]]:
    """Return the first words of each node of a drawn tree, with how far in it stands."""
    nodes = [line.partition("└─ ") for line in lines if "└─ " in line]
    return [(len(indent), text) for indent, _, text in nodes]


def test_three_generations_are_drawn_below_each_other_with_a_parent_that_has_no_record() -> None:
    lineage, (base, middle, last) = three_generations()
    (corpus,) = lineage.corpora.values()
    lines = render(lineage, "my model")
    assert lines[0] == "my model"
    assert heads(lines) == [
        (0, f"sft (sft, weights)  record {last.id[:12]}, {last.finished}"),
        (3, f"cpt (cpt, weights)  record {middle.id[:12]}, {middle.finished}"),
        (6, f"base (base, weights)  record {base.id[:12]}, {base.finished}"),
        (6, "teacher-9b (teacher): weights eeeeeeeeeeee, it carries no record"),
        (6, f"data (corpus)  record {corpus.id[:12]}, manifest 888888888888: 1 source(s), 3 files, 1 left out"),
    ]
    assert not [line for line in lines if "\n" in line]


def test_a_node_says_all_that_is_known_of_it() -> None:
    record = full_record(parents=[])
    lines = [line.strip() for line in render(Lineage.of(record, []), "x")]
    assert lines[2:] == [
        f"weights {record.model_digest[:12]} in 1 file(s), 2.5 MB",
        "made by Etude 0.1.0 (revision 999999999999), recipe 333333333333",
        "compute here: 1,234,567 tokens, 8.90e+12 FLOP (operations) in 61 s on gpu",
        "origin: tiny, hub owner/tiny at c0ffee",
        "conversion: none",
        "compute before us: 5 tokens, 7.00e+00 FLOP (operations) in 2 s on abacus, on top of tinier",
        "data: code, 3 files, 99 bytes, 222222222222",
        "licence: MIT (LICENSE, from tiny)",
    ]


def test_a_node_says_what_is_not_known_of_it() -> None:
    plain = full_record().model_dump(mode="json")
    origin = plain["origin"] | {"pretraining": None, "revision": None, "conversion": None}
    unknown = full_record(
        code={"etude": "0.1.0", "revision": None, "dirty": None}, licences=[], origin=origin, parents=[]
    )
    lines = [line.strip() for line in render(Lineage.of(unknown, []), "x")]
    assert "made by Etude 0.1.0 (revision not recorded), recipe 333333333333" in lines
    assert "origin: tiny, hub owner/tiny" in lines
    assert "compute before us: not known" in lines
    assert "licence: no licence file came with it; find out before you share it" in lines
    assert not [line for line in lines if line.startswith("conversion")]

    dirty = full_record(
        code={"etude": "0.1.0", "revision": "9" * 40, "dirty": True},
        licences=[plain["licences"][0] | {"licence": None}],
        parents=[],
    )
    lines = [line.strip() for line in render(Lineage.of(dirty, []), "x")]
    assert "made by Etude 0.1.0 (revision 999999999999 with uncommitted changes), recipe 333333333333" in lines
    assert "licence: unknown text, read it (LICENSE, from tiny)" in lines


def test_an_ancestor_shared_by_two_parents_is_drawn_under_both() -> None:
    base = child_of(None, "base")
    left = child_of(base, "left")
    edge = {"name": "base", "role": "judge", "record": base.id, "model_digest": base.model_digest}
    judge = full_record().parents[0].model_copy(update=edge)
    last = child_of(left, "sft", judge)
    lineage = Lineage.of(last, [Lineage.of(left, [Lineage.of(base, [])]), Lineage.of(base, [])])
    assert [(depth, text.partition(")")[0]) for depth, text in heads(render(lineage, "x"))] == [
        (0, "sft (sft, weights"),
        (3, "left (left, weights"),
        (6, "base (base, weights"),
        (3, "base (base, judge"),
    ]


def test_no_compute_is_said_to_be_none() -> None:
    assert describe_compute(Compute(tokens=0, model_flops=0.0, method="measured")) == "none (no tokens processed)"
    assert (
        describe_compute(Compute(tokens=0, model_flops=2e3, method="hardware")) == "0 tokens, 2.00e+03 FLOP (hardware)"
    )


def recorded(folder: Path, contents: dict[str, bytes]) -> Record:
    """Write weight files and return a record of them."""
    weights = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        weights[name] = FileDigest(sha256=sha256_file(folder / name), bytes=len(content))
    return full_record(weights=weights)


CONTENTS = {"a.safetensors": bytes(range(64)), "b.safetensors": b"weights"}


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(CONTENTS)), st.integers(0, 63), st.integers(1, 255))
def test_any_flipped_bit_of_any_weight_file_is_found(name: str, at: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        record = recorded(folder, CONTENTS)
        assert changed_weights(folder, record, Reporter(quiet=True)) == []
        content = bytearray(CONTENTS[name])
        content[at % len(content)] ^= flip
        (folder / name).write_bytes(content)
        assert changed_weights(folder, record, Reporter(quiet=True)) == [f"{name} is not the file that was recorded"]


def test_every_change_to_a_set_of_weights_is_told(tmp_path: Path, quiet: Reporter) -> None:
    record = recorded(tmp_path, CONTENTS | {"c.safetensors": b"third"})
    (tmp_path / "a.safetensors").write_bytes(CONTENTS["a.safetensors"][:-1])
    (tmp_path / "b.safetensors").unlink()
    (tmp_path / "y.safetensors").write_bytes(b"")
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert changed_weights(tmp_path, record, quiet) == [
        "b.safetensors is missing",
        "a.safetensors is not the file that was recorded",
        "x.safetensors is in no record",
        "y.safetensors is in no record",
    ]
