from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks.make import MOST_SECONDS, Coverage, Verdict, chosen, examine, try_candidate
from etude.tasks.task import Candidate, Codebase, Edit
from tests.tasks import small

UNSPOILABLE = "\n\ndef test_early():\n    if total([1]) == 1:\n        return\n    assert total([1]) == 1\n"


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Codebase, Coverage]:
    tests = small.TESTS + UNSPOILABLE + "\n\ndef test_wrong():\n    assert False\n"
    ready, coverage, counts, lost = small.run(examine(small.codebase(tmp_path_factory.mktemp("calc"), tests)))
    assert counts == {
        "stable": 7,
        "flaky": 0,
        "never passed": 2,
        "files not collected": 0,
        "unspoilable": 1,
    }
    assert {(row["of"], row["reason"], row["count"]) for row in lost} == {
        ("test", "fails before anything is changed", 1),
        ("test", "skipped here", 1),
    }
    return ready, coverage


def tried(examined: tuple[Codebase, Coverage], old: str, new: str) -> Verdict:
    changed = small.SOLVED.replace(old, new)
    assert changed != small.SOLVED
    return small.run(
        try_candidate(*examined, Candidate("mutation", ("x",), (Edit("calc/__init__.py", changed, small.SOLVED),), ()))
    )


def test_what_is_known_of_a_codebase(examined: tuple[Codebase, Coverage]) -> None:
    ready, coverage = examined
    assert set(ready.ids) == {*small.FAILING, *small.PASSING, "test_calc.py::test_early"}
    assert ready.unspoilable == {"test_calc.py::test_early"}
    assert coverage.run_by_tests()["calc/__init__.py"] == {6, 7, 8, 9, 14, 18}
    assert coverage.files["calc/__init__.py"]["test_calc.py::test_name"] == [18]


def test_a_candidate_that_some_tests_notice_is_a_task(examined: tuple[Codebase, Coverage]) -> None:
    found = tried(examined, "result += value", "result = value")
    assert found.reason == ""
    assert found.fail_to_pass == small.FAILING
    assert found.pass_to_pass == ("test_calc.py::test_early", *small.PASSING)
    assert "assert 2.0 == 3" in found.traces["test_calc.py::test_mean"]


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("result = 0", "result = 0 + 0", "no test fails"),
    ("def total(values):", "def totals(values):", "most tests fail"),
    ('"""Return the mean."""', '"""The mean."""', "no test runs what was changed"),
])  # fmt: skip
def test_other_candidates_are_none(examined: tuple[Codebase, Coverage], old: str, new: str, reason: str) -> None:
    assert tried(examined, old, new) == Verdict(reason)


def test_a_codebase_without_passing_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of its tests pass"):
        small.run(examine(small.codebase(tmp_path, "import absent\n")))


def test_of_slow_suites_near_tests_come_first(examined: tuple[Codebase, Coverage]) -> None:
    ready, coverage = examined
    candidate = Candidate("mutation", (), (Edit("calc/__init__.py", "", small.SOLVED),), ())
    assert chosen(ready, coverage, candidate, small.FAILING) == ("test_calc.py::test_early", *small.PASSING)
    slow = replace(ready, seconds=dict.fromkeys(ready.ids, MOST_SECONDS / 2))
    far = Coverage({"calc/__init__.py": {"test_calc.py::test_one": [1]}})
    kept = chosen(slow, far, candidate, small.FAILING)
    assert len(kept) == 2
    assert "test_calc.py::test_one" in kept
    assert kept == chosen(slow, far, candidate, small.FAILING)
