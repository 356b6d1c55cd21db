from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.tasks.manifest import TaskSet
from etude.tasks.swebench import applied, diff, hunks, row_of, task_of_row, write_rows
from tests.tasks import small

TEXT = st.lists(st.sampled_from(["a", "b", "--- c", "+++ d", "é\f", ""]), max_size=12).map("\n".join)


@given(TEXT, TEXT)
def test_a_diff_applied_and_undone(before: str, after: str) -> None:
    found = list(hunks(diff("x.py", before, after)))
    if before == after:
        assert not found
        return
    [(old, new, changes)] = found
    assert (old, new) == ("x.py", "x.py")
    assert applied(before, changes) == after
    assert applied(after, changes, reverse=True) == before


def test_a_patch_that_does_not_fit_is_refused() -> None:
    [(_, _, changes)] = hunks(diff("x.py", "a\nb\n", "a\nc\n"))
    with pytest.raises(UserError, match="from line 1 on"):
        applied("other\n", changes)


def test_rows_are_read_back(tmp_path: Path) -> None:
    calc, task = small.codebase(tmp_path), small.task()
    row = row_of(task, calc)
    assert "-    result = value" not in row["patch"]
    assert "+        result += value" in row["patch"]
    assert "+def test_mean" in row["test_patch"]
    back = task_of_row(row, calc)
    assert back.candidate.edits == task.candidate.edits
    assert (back.fail_to_pass, back.pass_to_pass, back.prompts) == (task.fail_to_pass, task.pass_to_pass, task.prompts)
    smith = {
        **row,
        "patch": diff("calc/__init__.py", small.SOLVED, small.BROKEN),
        "FAIL_TO_PASS": list(task.fail_to_pass),
    }
    assert task_of_row(smith, calc, reverse=True).candidate.edits == task.candidate.edits
    write_rows(TaskSet("set", "", (task,), {"calc==1": calc}), tmp_path / "rows.jsonl")
    assert len((tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 1
