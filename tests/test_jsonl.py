from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.jsonl import MetricsLog

VALUES = st.lists(st.text() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6)


@given(VALUES, st.floats(0, 1))
def test_cut_at_any_byte_the_whole_rows_survive_and_work_goes_on(values: list[object], share: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with MetricsLog(path) as log:
            for index, value in enumerate(values):
                log.put(f"k{index}", value=value)
        content = path.read_bytes()
        cut = round(share * len(content))
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        with MetricsLog(path) as log:
            assert log.torn_bytes == cut - (content[:cut].rfind(b"\n") + 1)
            assert [row["value"] for row in log.rows()] == values[:whole]
            for index, value in enumerate(values):
                if f"k{index}" not in log:
                    log.put(f"k{index}", value=value)
        with MetricsLog(path) as log:
            assert log.torn_bytes == 0
            assert [row["value"] for row in log.rows()] == values


def test_a_key_is_written_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.put("a", tokens=2)
        with pytest.raises(AssertionError):
            log.put("a", tokens=3)
        log.put("b", tokens=5)
        assert log.total("tokens") == 7
        assert log.get("c") is None


def test_a_foreign_line_ends_what_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"key": "a"}) + "\n[1]\n" + json.dumps({"key": "b"}) + "\n")
    with MetricsLog(path) as log:
        assert [row["key"] for row in log.rows()] == ["a"]
    assert path.read_text() == json.dumps({"key": "a"}) + "\n"
