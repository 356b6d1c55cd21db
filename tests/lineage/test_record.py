from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.files import digest_of_files
from etude.lineage.record import LINEAGE_FILE, RECORD_FILE, FileDigest, Lineage, Record, load_lineage, load_record
from tests.lineage.records import child_of, full_record, three_generations
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHER_CHOICE = {"operations": "measured", "weights": "judge"}  # for fields that take one of a few words
FIXED = {("format",)}  # these may hold one value only

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBER = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to every simple value in a JSON value."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield path


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return OTHER_CHOICE.get(value, value + "x")
    return value + 1


def test_the_id_changes_with_every_value_in_a_record() -> None:
    record = full_record(corpus="7" * 64)
    plain = record.model_dump(mode="json")
    paths = [path for path in leaves(plain) if path not in FIXED]
    assert {path[0] for path in paths} == set(Record.model_fields) - {"format"}
    ids = {record.id}
    for path in paths:
        other = copy.deepcopy(plain)
        at(other, path[:-1])[path[-1]] = changed(at(plain, path))
        ids.add(Record.model_validate(other).id)
    assert len(ids) == len(paths) + 1


@pytest.mark.parametrize("field", ["parents", "data", "weights", "outputs", "licences", "summary", "origin"])
def test_the_id_changes_when_a_part_is_dropped(field: str) -> None:
    plain = full_record().model_dump(mode="json")
    del plain[field]
    if field == "parents":
        plain[field] = []
    assert Record.model_validate(plain).id != full_record().id


def test_the_id_does_not_depend_on_the_order_of_keys() -> None:
    plain = full_record().model_dump(mode="json")
    assert Record.model_validate(dict(reversed(plain.items()))).id == full_record().id


@settings(deadline=None, max_examples=50)
@given(
    summary=st.dictionaries(TEXT, st.none() | NUMBER | TEXT, max_size=4),
    stage=st.dictionaries(
        TEXT, st.recursive(st.none() | st.booleans() | NUMBER | TEXT, st.lists, max_leaves=4), max_size=3
    ),
    name=TEXT,
    flops=st.floats(0, 1e30),
    dirty=st.none() | st.booleans(),
)
def test_a_record_survives_its_file(
    summary: dict[str, Any], stage: dict[str, Any], name: str, flops: float, dirty: bool | None
) -> None:
    record = full_record(
        stage=name,
        summary=summary,
        recipe={"hash": "h", "stage": stage},
        code={"etude": name, "revision": None, "dirty": dirty},
        compute={"tokens": 1, "model_flops": flops, "method": "measured"},
    )
    with tempfile.TemporaryDirectory() as folder:
        record.save(Path(folder))
        loaded = load_record(Path(folder))
    assert loaded == record
    assert loaded.id == record.id


def test_a_lineage_survives_its_file(tmp_path: Path) -> None:
    lineage, records = three_generations()
    lineage.save(tmp_path)
    assert load_lineage(tmp_path) == lineage
    (corpus,) = lineage.corpora.values()
    ids = {record.id for record in [*records, corpus]}
    assert {key: record.id for key, record in load_lineage(tmp_path).records.items()} == {each: each for each in ids}


@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_tree_whose_corpus_has_no_record_or_another_is_refused(tmp_path: Path, how: str) -> None:
    lineage, _ = three_generations()
    (key,) = lineage.corpora
    lineage.save(tmp_path)
    text = json.loads((tmp_path / LINEAGE_FILE).read_text())
    if how == "missing":
        del text["records"][key]
    else:
        text["records"][key]["data"][0]["left_out"] = {"empty": 2}
    (tmp_path / LINEAGE_FILE).write_text(json.dumps(text))
    with pytest.raises(UserError, match=one_line(key[:12], "is missing or was changed")):
        load_lineage(tmp_path)


def test_a_lineage_holds_the_record_and_all_ancestors_of_all_parents() -> None:
    base, teacher_base = child_of(None, "base"), child_of(None, "other")
    left, right = child_of(base, "left"), child_of(teacher_base, "right")
    merged = child_of(left, "merged")
    of_left = Lineage.of(left, [Lineage.of(base, [])])
    of_right = Lineage.of(right, [Lineage.of(teacher_base, []), Lineage.of(base, [])])
    lineage = Lineage.of(merged, [of_left, of_right])
    assert lineage.head == merged.id
    assert lineage.records == {record.id: record for record in (base, teacher_base, left, right, merged)}
    assert set(of_left.records) == {base.id, left.id}


def test_the_model_digest_covers_names_and_contents_of_all_weight_files() -> None:
    weights = {
        "a.safetensors": FileDigest(sha256="1" * 64, bytes=1),
        "b.safetensors": FileDigest(sha256="2" * 64, bytes=1),
    }
    swapped = dict(zip(weights, reversed(weights.values()), strict=True))
    digest = full_record(weights=weights).model_digest
    assert digest == digest_of_files({"b.safetensors": "2" * 64, "a.safetensors": "1" * 64})
    assert full_record(weights=swapped).model_digest != digest
    assert full_record(weights={"a.safetensors": weights["a.safetensors"]}).model_digest != digest
    assert full_record(weights=weights, sessions=9).model_digest == digest


def _dicts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        if isinstance(value, dict):
            yield path
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _dicts(part, (*path, key))


OPEN = {
    "seeds",
    "packages",
    "weights",
    "outputs",
    "summary",
    "left_out",
    "licences",
    "received",
    "sources",
}  # keys are data here
CLOSED = [
    path
    for path in _dicts(full_record().model_dump(mode="json"))
    if (not path or path[-1] not in OPEN) and path != ("recipe", "stage")
]


@pytest.mark.parametrize("path", CLOSED, ids=lambda path: ".".join(map(str, path)) or "record")
def test_a_field_of_a_newer_version_is_refused_by_its_place(tmp_path: Path, path: tuple[str | int, ...]) -> None:
    plain = full_record().model_dump(mode="json")
    at(plain, path)["carbon"] = 1
    (tmp_path / RECORD_FILE).write_text(json.dumps(plain), encoding="utf-8")
    place = ".".join(map(str, (*path, "carbon")))
    with pytest.raises(UserError, match=one_line(tmp_path / RECORD_FILE, f" {place}: ", "another Etude version")):
        load_record(tmp_path)


def test_an_unknown_field_inside_a_lineage_is_refused_by_its_place(tmp_path: Path) -> None:
    lineage, records = three_generations()
    plain = lineage.model_dump(mode="json")
    plain["records"][records[0].id]["compute"]["carbon"] = 1
    (tmp_path / LINEAGE_FILE).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(LINEAGE_FILE, f"records.{records[0].id}.compute.carbon")):
        load_lineage(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda plain: plain.pop("fingerprint"), "fingerprint"),
        (lambda plain: plain.update(format="etude-record/2"), "format"),
        (lambda plain: plain["compute"].update(tokens="many"), "compute.tokens"),
        (lambda plain: plain["parents"][0].update(role="uncle"), "parents.0.role"),
        (lambda plain: plain["weights"].update(x=None), "weights.x"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], place: str
) -> None:
    plain = full_record().model_dump(mode="json")
    change(plain)
    (tmp_path / RECORD_FILE).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(RECORD_FILE, f" {place}: ")):
        load_record(tmp_path)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_record_cut_off_anywhere_is_refused_in_one_line(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / RECORD_FILE
        full_record(summary={"note": "Ü€"}).save(Path(name))
        whole = file.read_bytes().rstrip()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(UserError, match=one_line(file, "is not JSON")):
            load_record(Path(name))


@pytest.mark.parametrize("text", ["[]", "null", "7", '"record"'])
def test_json_that_is_no_record_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=one_line(tmp_path / RECORD_FILE)):
        load_record(tmp_path)


def test_bytes_that_are_no_text_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / LINEAGE_FILE).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UserError, match=one_line(tmp_path / LINEAGE_FILE, "is not JSON")):
        load_lineage(tmp_path)


def test_a_folder_without_a_record_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=one_line(tmp_path / RECORD_FILE, "was not written by Etude")):
        load_record(tmp_path)
    with pytest.raises(UserError, match=one_line(tmp_path / LINEAGE_FILE, "was not written by Etude")):
        load_lineage(tmp_path)


def test_a_lineage_whose_head_is_missing_is_refused(tmp_path: Path) -> None:
    lineage, records = three_generations()
    plain = lineage.model_dump(mode="json")
    del plain["records"][records[-1].id]
    (tmp_path / LINEAGE_FILE).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(LINEAGE_FILE)):
        load_lineage(tmp_path)


def test_a_lineage_with_a_forged_record_is_refused(tmp_path: Path) -> None:
    lineage, records = three_generations()
    plain = lineage.model_dump(mode="json")
    plain["records"][records[0].id]["compute"]["model_flops"] = 1.0
    (tmp_path / LINEAGE_FILE).write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(UserError, match=one_line(LINEAGE_FILE, records[0].id[:12])):
        load_lineage(tmp_path)


def test_a_tree_without_an_ancestor_it_names_is_refused(tmp_path: Path) -> None:
    base = full_record().model_copy(update={"parents": []})
    edge = full_record().parents[0].model_copy(update={"record": base.id, "model_digest": base.model_digest})
    child = full_record().model_copy(update={"stage": "child", "parents": [edge]})
    Lineage.of(child, [Lineage.of(base, [])]).save(tmp_path)
    assert load_lineage(tmp_path).head == child.id
    text = json.loads((tmp_path / "lineage.json").read_text())
    del text["records"][base.id]
    (tmp_path / "lineage.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=one_line(base.id[:12], "is missing or was changed")):
        load_lineage(tmp_path)
