from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etude.sandbox.box import Entry
from etude.tasks import report_plugin, suite
from etude.tasks.suite import FORMS, _judged, _messages, entries_of, layers_of, run_tests, spoil, spoilt
from etude.tasks.task import Codebase, Edit
from tests.tasks import small


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


async def outcomes(calc: Codebase, source: str, ids: tuple[str, ...] | None, *, cold: bool = False) -> dict[str, str]:
    async with layers_of(calc.tree, entries_of([Edit("calc/__init__.py", source, None)], "broken")) as layers:
        return dict((await run_tests(calc, layers, ids, cold=cold)).outcomes)


def test_each_test_is_reported_as_it_ended(calc: Codebase) -> None:
    everything = dict.fromkeys(small.FAILING, "failed") | dict.fromkeys(small.PASSING, "passed")
    everything["test_calc.py::test_skipped"] = "skipped"
    assert small.run(outcomes(calc, small.BROKEN, None)) == everything
    assert small.run(outcomes(calc, small.BROKEN, small.PASSING, cold=True)) == dict.fromkeys(small.PASSING, "passed")


def test_a_test_that_hangs_fails_alone(calc: Codebase) -> None:
    hanging = Codebase(
        **{**vars(calc), "seconds": dict.fromkeys(calc.ids, -0.95)}
    )  # so that the limit is half a second
    found = small.run(outcomes(hanging, small.SOLVED.replace('return "calc"', "while True: pass"), calc.ids))
    assert found == dict.fromkeys(calc.ids, "passed") | {"test_calc.py::test_name": "failed"}


SLOW = """
    from time import process_time as now
    began = now()
    while len(values) == {looping} or now() < began + 0.8 * (len(values) == 3):
        pass
"""


@pytest.mark.parametrize(("looping", "failed"), [(0, set()), (2, {*small.FAILING})])
def test_once_a_test_has_computed_for_too_long_others_may_compute_less(
    calc: Codebase, looping: int, failed: set[str]
) -> None:
    """Of 5 s, a test may compute for 2. Sums of three take 0.8, which is no longer granted after sums of two have used up theirs."""
    slow = Codebase(**{**vars(calc), "seconds": dict.fromkeys(calc.ids, -0.5)})
    source = small.SOLVED.replace('"""Return the sum of values."""', SLOW.format(looping=looping).strip())
    found = small.run(outcomes(slow, source, calc.ids))
    assert {name for name, outcome in found.items() if outcome != "passed"} == failed


@pytest.mark.parametrize("form", FORMS)
def test_spoilt_tests_fail_on_the_solved_tree(calc: Codebase, form: str) -> None:
    async def work() -> list[str]:
        async with layers_of(calc.tree, spoilt(calc.tree, calc.ids, form, random.Random(3))) as layers:  # type: ignore[arg-type]
            run = await run_tests(calc, layers, calc.ids)
        assert run.state == "complete"
        return run.passed(calc.ids)

    assert small.run(work()) == []


def test_spoilers_come_last_and_differ() -> None:
    text = "def test_a():\n    x = 1  # é\n    assert x\n\n\ndef test_b(): pass\n\n\nasync def test_c():\n    return 1\n\n\ndef helper():\n    pass"
    seen = set()
    for seed in range(40):
        made = spoil(text, {"test_a", "test_b", "test_c"}, "end", random.Random(seed))
        space: dict[str, object] = {}
        exec(compile(made, "made", "exec"), space)
        for name in ("test_a", "test_b"):
            with pytest.raises(BaseException):  # noqa: B017
                space[name]()  # type: ignore[operator]
        assert made.startswith(
            ("def test_a():\n    x = 1  # é\n    assert x\n    ", "def test_a():\n    x = 1  # é\n    assert not (x)\n")
        )
        seen.add(" ".join(made.split("\n")[2:4]).split()[-3])
        assert not re.search(r"\d{4}", made), "a number that no test would have"
    assert len(seen) >= 3
    assert spoil(text, set(), "end", random.Random(0)) == text


EQUALITIES = """def test_a():
    assert f(1) == g(2), "why"
    assert f(1) in (1, 2)
    self.assertEqual(f(1), 'é')
    assert 7 == f(1)
    assert f(1) == b"xy"
    assert f(1) == 0.5
    assert f(1) == True
"""


@pytest.mark.parametrize("seed", range(5))
def test_what_should_be_equal_is_compared_with_another_value_of_its_kind(seed: int) -> None:
    made = spoil(EQUALITIES, {"test_a"}, "equal", random.Random(seed))
    shape = r"""def test_a\(\):
    assert f\(1\) == \d{8,9}, "why"
    assert f\(1\) in \(1, 2\)
    self.assertEqual\(f\(1\), '[a-z]{8}'\)
    assert (\d+) == f\(1\)
    assert f\(1\) == b'[a-z]{8}'
    assert f\(1\) == (\d+.5)
    assert f\(1\) == \d{8,9}
"""
    found = re.fullmatch(shape, made)
    assert found, made
    assert found[1] != "7"
    assert found[2] != "0.5"


@pytest.mark.parametrize(("last", "code", "state"), [
    (["end", 0, 1], 0, "complete"), (["end", 0, 1], 1, "tampered"), (["end", 0, 2], 0, "tampered"),
    (["end", 1, 1], 1, "tampered"), (["test", "b", "passed", 0, ""], 0, "crash"),
])  # fmt: skip
def test_the_end_must_fit_what_came_before(last: list[object], code: int, state: str) -> None:
    assert _judged([["start"], ["test", "a", "passed", 0.0, ""], last], code) == state


def test_only_numbered_lines_with_the_nonce_count() -> None:
    out = b'n0 0 ["start"]\nPASSED\nother 1 ["test"]\nn0 2 ["late"]\nn0 1 ["test"]\nn0 1 ["again"]\n'
    assert _messages(out, "n0") == [["start"], ["test"]]


def test_files_that_go_and_come(tmp_path: Path) -> None:
    edits = [Edit("a.py", None, "x"), Edit("b.py", "y", None)]
    assert entries_of(edits, "broken") == [Entry("a.py", "gone"), Entry("b.py", "file", 1, 0o644, b"y")]
    assert entries_of(edits, "fixed") == [Entry("a.py", "file", 1, 0o644, b"x"), Entry("b.py", "gone")]


def test_nothing_of_the_product_needs_pytest_itself() -> None:
    code = "import sys; sys.modules['pytest'] = None; import etude.bench.agents, etude.tasks.make, etude.tasks.demos"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert suite.COVERAGE == report_plugin.COVERAGE
