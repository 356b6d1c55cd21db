"""Readers of what runners of tests print: real outputs of the real tools, cut off, forged and mixed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.readers import READERS, ReaderName, read

REPORTS = Path(__file__).with_name("reports")
WHOLE: dict[str, tuple[ReaderName, dict[str, str]]] = {
    "go.jsonl": ("go", {"_/workspace::TestAdd": "passed", "_/workspace::TestAdd/b": "passed", "_/workspace::TestAdd/c": "passed",
                        "_/workspace::TestWrong": "failed", "_/workspace::TestSkip": "skipped"}),
    "cargo.txt": ("cargo", {"src/lib.rs::tests::adds": "passed", "tests/sums.rs::never": "skipped", "tests/sums.rs::right": "passed",
                            "tests/sums.rs::wrong": "failed", "tests/sums.rs::breaks": "passed",
                            "doc calc::src/lib.rs - add (line 2)": "passed"}),
    "node.tap": ("tap", {"tests::adds": "passed", "tests::group > inner # one": "passed", "tests::group > wrong": "failed",
                         "tests::group > later": "skipped", "tests::group > never": "skipped"}),
    "node.junit.xml": ("junit", {"test::adds": "passed", "test::inner # one": "passed", "test::wrong": "failed",
                                 "test::later": "skipped", "test::never": "skipped"}),
    "unittest.txt": ("unittest", {"test_calc.Calc::test_add": "passed", "test_calc.Calc::test_doc": "passed",
                                  "test_calc.Calc::test_expected": "skipped", "test_calc.Calc::test_never": "skipped",
                                  "test_calc.Calc::test_sub": "failed", "test_calc.Calc::test_wrong": "failed"}),
    "prove.txt": ("prove", {"t/a.t::1 one": "passed", "t/a.t::2 two > 1 x": "passed", "t/a.t::2 two > 2": "passed",
                            "t/a.t::3 three": "skipped", "t/b.t::1 wrong": "failed", "t/b.t::2": "passed"}),
    "ctest.txt": ("ctest", {"tests::good": "passed", "tests::bad": "failed", "tests::gone": "failed", "tests::skipped": "skipped"}),
    "ctest.junit.xml": ("junit", {"good::good": "passed", "bad::bad": "failed", "gone::gone": "skipped", "skipped::skipped": "skipped"}),
    "tape.tap": ("tape", {"tests::sums": "passed", "tests::wrong": "failed"}),
    "mocha.json": ("mocha", {"m.spec.js::calc > adds": "passed", "m.spec.js::calc > never": "skipped",
                             "m.spec.js::calc deep > wrong": "failed"}),
    "mocha.xunit.xml": ("junit", {"m.spec.js::adds": "passed", "m.spec.js::never": "skipped", "m.spec.js::wrong": "failed"}),
    "jest.json": ("jest", {"m.spec.js::calc > adds": "passed", "m.spec.js::calc > deep > wrong": "failed",
                           "m.spec.js::calc > never": "skipped"}),
    "unity.txt": ("unity", {"tests/calc.c::adds": "passed", "tests/calc.c::wrong": "failed", "tests/calc.c::never": "skipped"}),
}  # fmt: skip
# What code under test can print to look like one more test, or like the same test again.
FORGED: dict[str, str] = {
    "go.jsonl": '{"Action":"pass","Package":"_/workspace","Test":"TestWrong"}',
    "cargo.txt": "test wrong ... ok",
    "node.tap": "ok 3 - forged",
    "unittest.txt": "test_wrong (test_calc.Calc.test_wrong) ... ok",
    "prove.txt": "ok 1 - wrong",
    "ctest.txt": "2/4 Test #2: bad ..............................   Passed    0.02 sec",
    "tape.tap": "ok 3 should be strictly equal",
    "unity.txt": "1: /workspace/tests/calc.c:14:wrong:PASS",
}


def text_of(file: str) -> str:
    return (REPORTS / file).read_text(encoding="utf-8")


def passed(reader: ReaderName, text: str) -> set[str]:
    return {test for test, outcome in read(reader, text).outcomes.items() if outcome == "passed"}


@pytest.mark.parametrize("file", WHOLE)
def test_a_real_report_is_read_whole(file: str) -> None:
    reader, outcomes = WHOLE[file]
    report = read(reader, text_of(file))
    assert (report.outcomes, report.faults) == (outcomes, [])


def test_every_reader_has_a_real_report() -> None:
    assert {reader for reader, _ in WHOLE.values()} == set(READERS) == set(get_args(ReaderName))


@pytest.mark.parametrize("file", WHOLE)
def test_a_report_that_ends_anywhere_passes_nothing_that_the_whole_one_does_not(file: str) -> None:
    reader, outcomes = WHOLE[file]
    text, right = text_of(file), {test for test, outcome in outcomes.items() if outcome == "passed"}
    for end in range(0, len(text), max(1, len(text) // 120)):
        report = read(reader, text[:end])
        assert {test for test, it in report.outcomes.items() if it == "passed"} <= right
        if (
            report.outcomes != outcomes and reader != "cargo"
        ):  # between two programs only the exit code shows it (suite.py)
            assert report.faults, f"cut at {end}: {report.outcomes}"


@pytest.mark.parametrize("file", FORGED)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95, 1.0])
def test_a_forged_line_passes_no_test_that_failed(file: str, share: float) -> None:
    reader, outcomes = WHOLE[file]
    lines = text_of(file).splitlines()
    at = round(share * len(lines))
    got = passed(reader, "\n".join([*lines[:at], FORGED[file], *lines[at:]]) + "\n")
    assert got <= {test for test, outcome in outcomes.items() if outcome == "passed"}


@pytest.mark.parametrize("file", WHOLE)
def test_two_reports_in_one_are_not_better_than_the_worse(file: str) -> None:
    reader, outcomes = WHOLE[file]
    good = re.sub("FAILED|FAIL|not ok|fail", "ok", text_of(file))
    got = passed(reader, good + text_of(file))
    assert (
        got <= {test for test, outcome in outcomes.items() if outcome == "passed"}
        or read(reader, good + text_of(file)).faults
    )


@given(st.sampled_from(get_args(ReaderName)), st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_what_is_no_report_passes_nothing_and_raises_nothing(reader: ReaderName, text: str) -> None:
    report = read(reader, text)
    assert report.faults or report.outcomes
    assert "passed" not in report.outcomes.values() or reader in {"tap", "tape"}


@given(st.sampled_from(sorted(WHOLE)), st.data())
@settings(max_examples=200, deadline=None)
def test_lines_left_out_never_make_a_failed_test_pass(file: str, data: st.DataObject) -> None:
    reader, outcomes = WHOLE[file]
    lines = text_of(file).splitlines(keepends=True)
    gone = data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=4))
    got = passed(reader, "".join(line for i, line in enumerate(lines) if i not in gone))
    # By name alone: without the line of its file a test has another group.
    failed = {test.partition("::")[2] for test, outcome in outcomes.items() if outcome == "failed"}
    assert not {test.partition("::")[2] for test in got} & failed


def test_what_is_not_understood_is_counted() -> None:
    text = text_of("go.jsonl")
    assert read("go", "noise\n" + text).unread == read("go", text).unread + 1


@pytest.mark.parametrize("text", ['<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>', "<testsuite><testcase", "", "{}", "[]"])
def test_hostile_xml_and_json_are_faults(text: str) -> None:
    assert read("junit", text).faults
    assert read("jest", text).faults
    assert read("mocha", text).faults
