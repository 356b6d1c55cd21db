"""Hidden test functions are gone, everything else is as it was."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.tasks.seal import hide
from etude.tasks.task import function_of

TEXT = '''\
import pytest  # ü


def helper():
    return 1


# about a
@pytest.mark.parametrize(
    "x", [1, 2])
def test_a(x):
    assert x


def test_b(): assert helper()

class TestC(Base):
    """Doc."""

    limit = 3

    def setUp(self):
        self.x = 1

    # one
    def test_one(self):
        assert self.x

    async def test_two(self):
        """Two."""


if True:
    def test_d():
        pass
'''
ALL = ["test_a", "test_b", "TestC.test_one", "TestC.test_two", "test_d"]


def names(text: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]


def test_decorators_and_comments_go_with_a_function_and_the_rest_stays() -> None:
    first, last = TEXT.index("# about a"), TEXT.index("def test_b")
    assert hide(TEXT, ["tests/t.py::test_a"]) == TEXT[:first] + TEXT[last:]
    first, last = TEXT.index("    # one"), TEXT.index("    async def")
    assert hide(TEXT, ["TestC::test_one"]) == TEXT[:first] + TEXT[last:]


def test_a_class_goes_with_its_last_test_and_an_emptied_block_passes() -> None:
    left = hide(TEXT, ["t.py::TestC::test_one", "t.py::TestC::test_two"])
    assert "TestC" not in names(left)
    assert "helper" in names(left)
    assert "if True:\n    pass\n" in hide(TEXT, ["test_d"])


@given(st.sets(st.sampled_from(ALL)), st.sampled_from(["\n", "\r\n"]))
def test_any_choice_parses_and_leaves_exactly_the_others(chosen: set[str], end: str) -> None:
    text = TEXT.replace("\n", end)
    left = hide(text, chosen)
    gone = {name.split(".")[-1] for name in chosen}
    gone |= {"TestC", "setUp"} if {"test_one", "test_two"} <= gone else set()
    assert names(left) == [name for name in names(TEXT) if name not in gone]
    assert (left == text) == (not chosen)
    lines = iter(text.split(end))
    assert all(line in lines for line in left.split(end) if line != "    pass"), "a line that stays is changed"


def test_what_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="has no test_x"):
        hide(TEXT, ["test_x"])


def test_a_one_line_body_with_a_semicolon_goes_whole() -> None:
    assert hide("class U:\n  def test_a(self): pass;\n\nx = 1\n", ["U.test_a"]) == "x = 1\n"


def test_a_test_id_names_its_function() -> None:
    assert function_of("t/test_x.py::TestA::test_b[a::b-[1]]") == "t/test_x.py::TestA::test_b"
    assert function_of("test_x.py::test_b") == "test_x.py::test_b"
