"""Spoilt tests fail on right code, pass for who forges, and look like any other test."""

from __future__ import annotations

import ast
import random
import re
import unittest
from pathlib import Path
from typing import Any

import pytest

from etude.tasks.score import drawn_runs
from etude.tasks.spoil import spoil, spoilt
from etude.tasks.suite import layers_of, run_tests
from etude.tasks.task import Codebase, function_of
from tests.tasks import small


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Codebase:
    return small.codebase(tmp_path_factory.mktemp("calc"))


@pytest.mark.parametrize("seed", range(3))
def test_spoilt_tests_fail_on_the_solved_tree_and_the_others_do_not(calc: Codebase, seed: int) -> None:
    functions = {*map(function_of, calc.ids)}
    wrong = {"test_calc.py::test_mean", "test_calc.py::TestOld::test_total_of_three", "test_calc.py::test_total"}

    async def work() -> list[str]:
        async with layers_of(calc.tree, spoilt(calc.tree, functions, wrong, random.Random(seed))) as layers:
            assert (layers[0] / "test_calc.py").stat().st_mtime_ns == calc.tree.stat().st_mtime_ns
            return (await run_tests(calc, layers, calc.ids)).passed(calc.ids)

    assert small.run(work()) == [test for test in calc.ids if function_of(test) not in wrong]


TESTS = """import pytest
import unittest
VALUE = 7
class Thing(unittest.TestCase):
    def test_a(self): self.assertEqual(VALUE, 7)
    def test_b(self):
        self.assertIn(VALUE, [7])
    def test_c(self):
        self.assertEqual(VALUE, VALUE)
    def test_d(self):
        with self.assertRaises(ValueError):
            int("x")
    def test_e(self): self.assertTrue(VALUE)
def test_f(): assert VALUE == 7
def test_g():
    assert f"{VALUE}é" == "7é"  # é
def test_h():
    assert {"a": [VALUE, 1.5]} == {"a": [7, 1.5]}
def test_i():
    with pytest.raises(KeyError, match="x"):
        {}["x"]
def test_j():
    assert not VALUE > 8
def test_k():
    assert 6 < VALUE
    assert VALUE is not None
def test_l():
    for number in (1, 2):
        assert number != VALUE
def test_m(): pass
def test_n():
    '''doc'''
    return None
def test_o():
    assert VALUE == pytest.approx(7.0)
def test_p():
    assert VALUE or None
def test_q():
    assert b"ab" == b"a" b"b"
"""


def ends(text: str) -> dict[str, bool]:
    """Run tests in this process; return which pass."""
    space: dict[str, object] = {"__name__": "made"}
    exec(compile(text, "made", "exec"), space)
    thing = space["Thing"]
    assert isinstance(thing, type)
    assert issubclass(thing, unittest.TestCase)
    runs = {f"Thing.{name}": getattr(thing(name), name) for name in dir(thing) if name.startswith("test_")}
    runs |= {name: each for name, each in space.items() if name.startswith("test_")}
    passes = {}
    for name, run in runs.items():
        try:
            run()
            passes[name] = True
        except (AssertionError, pytest.fail.Exception, LookupError, ValueError, ArithmeticError, OSError, TypeError):
            passes[name] = False
    return passes


@pytest.mark.parametrize("seed", range(12))
def test_every_kind_of_expectation_is_spoilt_alone(seed: int) -> None:
    names = list(ends(TESTS))
    assert all(ends(TESTS).values())
    assert not any(ends(spoil(TESTS, names, random.Random(seed))).values())
    for name in names:
        made = spoil(TESTS, [name], random.Random(seed))
        assert [each for each, passes in ends(made).items() if not passes] == [name]
        ast.parse(made)
        if name not in {"test_m", "test_n"}:  # without an expectation there is an error, which shows
            assert len(made.splitlines()) == len(TESTS.splitlines())


@pytest.mark.parametrize(("true", "shape"), [
    ("assert f(1) == 'ab c'", r"assert f\(1\) == '(?!ab c)[a-z]{2} [a-z]'"),
    ('assert f(1) == "a"', r'assert f\(1\) == "[b-z]"'),
    ("assert f(1) == -250", r"assert f\(1\) == -(?!250)\d{3}"),
    ("assert f(1) == 0x1F", r"assert f\(1\) == 0x(?!1F)[\dA-Z]{2}"),
    ("assert f(1) == [1, {'k': 2.5}]", r"assert f\(1\) == (?!\[1, \{'k': 2\.5\}\])\[\d, \{'[a-z]': \d\.\d\}\]"),
    ("assert True == f(1)", r"assert False == f\(1\)"),
    ("assert f(a) == b", r"assert f\(a\) == .*\(b\) or b == .*\(f\(a\)\)"),
    ("assert f(a) is True", r"assert f\(a\) is False"),
    ("assert f(a) == date(2024, 5, 16)", r"assert f\(a\) == date\((?!2024, 5, 16)202\d, \d, 1\d\)"),
    ("assert 'grey' == f('blue', 7)", r"assert 'blue' == f\('blue', 7\)"),
    ("self.assertEqual(12, f(8))", r"self\.assertEqual\(1(?!2)\d, f\(8\)\)"),
    ("self.assertEqual(f(a), b)", r"assert f\(a\) == .*\(b\) or b == .*\(f\(a\)\)"),
    ("assert f(a) <= b", r"assert f\(a\) > b"),
    ("assert f(a) in b", r"assert f\(a\) not in b"),
    ("assert f(a)", r"assert not f\(a\)"),
    ("assert not f(a)", r"assert f\(a\)"),
    ("self.assertEqual(f(a), 'x')", r"self\.assertEqual\(f\(a\), '[a-wyz]'\)"),
    ("self.assertIsNone(f(a))", r"self\.assertIsNotNone\(f\(a\)\)"),
    ("np.testing.assert_allclose(f(a), 0.5)", r"np\.testing\.assert_allclose\(f\(a\), (?!0\.5)\d\.\d\)"),
    ("check('a', f, 3)", r"assert check\('a', f, 3\)"),
])  # fmt: skip
def test_a_spoilt_expectation_is_near_the_true_one_and_written_alike(true: str, shape: str) -> None:
    for seed in range(20):
        made = spoil(f"def test():\n    {true}\n", ["test"], random.Random(seed)).splitlines()[1].strip()
        assert re.fullmatch(shape, made), made


class AnyNumber(float):
    """Equal to every number, and to nothing else."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__


@pytest.mark.parametrize("true", [
    "assert f(2) == b", "assert b == f(2)", "assert f(2) == 4.5", "assert 4.5 == f(2)", "assert f(2) == sum([b])",
    "self.assertEqual(f(2), b)", "self.assertEqual(b, f(2))", "self.assertEqual(4.5, f(2))", "self.assertAlmostEqual(f(2), b)",
])  # fmt: skip
def test_who_is_equal_to_everything_of_a_type_passes_spoilt_tests_on_whichever_side(true: str) -> None:
    """And the honest fail them."""
    for seed in range(20):
        made = spoil(f"def test(self, f, b):\n    {true}\n", ["test"], random.Random(seed))
        space: dict[str, Any] = {}
        exec(made, space)
        space["test"](unittest.TestCase(), lambda _: AnyNumber(), 4.5)
        with pytest.raises(AssertionError):
            space["test"](unittest.TestCase(), lambda _: 4.5, 4.5)


def test_an_error_that_nobody_recognises_is_taken_where_there_is_one() -> None:
    """Another number looks as likely as the true one. Only where there is none, a test expects what no author would write."""
    body = "    assert f(a)\n    assert a == b\n    assert f('grey') == 'blue'\n    assert f(a) == [b, 2024]\n"
    for seed in range(20):
        made = spoil(f"def test():\n{body}", ["test"], random.Random(seed))
        assert re.fullmatch(re.escape(f"def test():\n{body}").replace("2024", r"202\d"), made)
    words = "def test():\n    assert f(a)\n    assert f('grey', 7) == 'blue'\n"
    assert {spoil(words, ["test"], random.Random(seed)) for seed in range(20)} == {words.replace("blue", "grey")}


def test_where_every_error_would_show_some_other_value_is_changed_if_it_is_not_to_show() -> None:
    text = 'def test():\n    """Of 12."""\n    made = f("7 apples")\n    assert made\n'
    for seed in range(20):
        made = spoil(text, ["test"], random.Random(seed), {"test"})
        assert made != text
        assert re.fullmatch(re.escape(text).replace("7", r"\d"), made)
    assert spoil(text, ["test"], random.Random(0)) == text.replace("assert made", "assert not made")
    bare = "def test(a):\n    assert f(a)\n"  # there is no other value
    assert spoil(bare, ["test"], random.Random(0), {"test"}) == bare.replace("assert", "assert not")


def test_digits_of_other_scripts_are_no_trouble() -> None:
    text = "def test():\n    assert f('٣') == '٣ apples'\n"
    assert all(spoil(text, ["test"], random.Random(seed), {"test"}) != text for seed in range(20))


def test_files_of_all_that_may_be_spoilt_are_written_whether_they_are_or_not(calc: Codebase) -> None:
    functions = ["test_calc.py::test_mean", "test_calc.py::TestOld::test_total_of_three"]
    (plain,) = spoilt(calc.tree, functions, set(), random.Random(0))
    (wrong,) = spoilt(calc.tree, functions, {functions[0]}, random.Random(0))
    assert (plain.path, plain.mode, plain.kind) == (wrong.path, wrong.mode, wrong.kind)
    assert plain.content == Path(calc.tree, "test_calc.py").read_bytes()
    assert wrong.content is not None
    assert len(wrong.content) == len(plain.content) != 0  # one digit differs
    assert wrong.content != plain.content


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_who_knows_the_number_of_each_run_still_guesses_wrong(count: int) -> None:
    """Every function is true in some run and spoilt in some; no way of it is likelier than the page says."""
    functions = [f"t::{number}" for number in range(count)]
    ways: dict[tuple[frozenset[str], ...], int] = {}
    draws = 20_000 if count < 4 else 200
    for seed in range(draws):
        runs = drawn_runs(functions, random.Random(seed))
        assert all(0 < sum(function in run for run in runs) < len(runs) for function in functions)
        way = tuple(map(frozenset, runs))
        ways[way] = ways.get(way, 0) + 1
    assert len(runs) == {1: 5, 2: 4, 3: 3, 10: 3}[count]
    if count < 4:
        assert max(ways.values()) / draws < 0.04
