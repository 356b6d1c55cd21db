"""What could not be used, with its reason and a fix."""

from __future__ import annotations

from collections import Counter

import pytest

from etude.tasks.losses import OF_CANDIDATE, lost_candidates, lost_packages, lost_tests
from etude.tasks.suite import Run


@pytest.mark.parametrize(("said", "reason"), [
    ("E   ModuleNotFoundError: No module named 'face'", "not importable"),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "needs a network"),
    ("redis.exceptions.ConnectionError: Error 111 connecting to localhost:6379. Connection refused.", "needs a server"),
    ("E  fixture 'mocker' not found", "fixture not found"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'toml-test'", "a file or program is missing"),
    ("assert 1 == 2", "fails before anything is changed"),
])  # fmt: skip
def test_a_failing_test_is_told_by_what_it_says(said: str, reason: str) -> None:
    first = Run("complete", {"t.py::a": "failed", "t.py::b": "passed"}, traces={"t.py::a": said})
    (row,) = lost_tests(first, ["t.py::b"], [first, first])
    assert (row["of"], row["reason"], row["count"]) == ("test", reason, 1)
    assert row["fix"]
    assert row["example"].startswith("t.py::a")


def test_tests_and_files_are_counted_by_reason() -> None:
    first = Run(
        "complete",
        {"a": "passed", "b": "skipped", "c": "skipped", "d": "passed"},
        broken={"x.py": "No module", "y.py": "ImportError: cannot import name"},
    )
    again = Run("complete", {"a": "failed", "b": "skipped", "c": "skipped", "d": "passed"})
    rows = lost_tests(first, ["d"], [first, again])
    assert Counter({(row["of"], row["reason"]): row["count"] for row in rows}) == {
        ("test file", "cannot be collected"): 1, ("test file", "not importable"): 1, ("test", "flaky"): 1, ("test", "skipped here"): 2,
    }  # fmt: skip


@pytest.mark.parametrize(("why", "reason"), [
    ("p: its licence is not known; state it", "no licence"),
    ("p: no tests found at the usual places", "no code or no tests found"),
    ("p: no environment for its tests: No matching distribution", "no environment"),
    ("p: none of its tests pass; set: ModuleNotFoundError: No module named 'x'", "not importable"),
    ("p: none of its tests pass; set: AssertionError", "none of its tests pass"),
    ("the test runner did not start: not ready after 30 s: redis-server", "a service does not start"),
])  # fmt: skip
def test_a_package_that_gave_nothing_has_a_reason_and_a_fix(why: str, reason: str) -> None:
    (row,) = lost_packages({"p": why})
    assert (row["package"], row["of"], row["reason"], bool(row["fix"])) == ("p", "package", reason, True)


def test_candidates_are_counted_the_most_frequent_first() -> None:
    rows = lost_candidates(
        {("mutation", "no test fails"): 2, ("", "commit changes no tests"): 7, ("deletion", "new reason"): 1}
    )
    assert [(row["of"], row["count"]) for row in rows] == [
        ("candidate", 7),
        ("mutation candidate", 2),
        ("deletion candidate", 1),
    ]
    assert [row["fix"] for row in rows] == [
        OF_CANDIDATE["commit changes no tests"],
        OF_CANDIDATE["no test fails"],
        "none",
    ]
